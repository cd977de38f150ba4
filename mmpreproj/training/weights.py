"""Where the weights of timm's models come from: a local file, or the hub and its cache."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_state_dict
from torch import Tensor, nn

from mmpreproj.backbones.hub import require_hub

# What timm looks for in a hub repository
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
# What starts a name that timm takes from a repository or a folder, not from its registry
REPOSITORIES = ("hf-hub:", "hf_hub:", "local-dir:")


class LoadReport(logging.Handler):
    """Collects the keys that timm found missing in a checkpoint, and those it had no place for."""

    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"(Missing|Unexpected) keys \((.*?)\) ", record.getMessage())
        if found:
            keys = self.missing if found.group(1) == "Missing" else self.unexpected
            keys += found.group(2).split(", ")


def fill_method(
    model: nn.Module, method: Mapping[str, Tensor], weights: str | os.PathLike[str] | None
) -> None:
    """Load a checkpoint's tensors of the method into a model that it was attached to."""
    own = {name: p for name, p in model.named_parameters() if ".preproj." in name}
    wrong = sorted(own.keys() ^ method.keys())
    wrong += [n for n in own.keys() & method.keys() if own[n].shape != method[n].shape]
    if wrong:
        raise ValueError(
            f"weights={str(weights)!r} hold the method, in another form than this model has it: "
            f"{wrong[0]!r} and {len(wrong) - 1} others do not agree. Give the preproj: settings "
            "that the checkpoint was trained with"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(method[name])


def local_source(name: str, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """timm's pretrained_cfg for a local file, and the method's tensors if they are to be attached.

    A timm model knows nothing of the method; `vit_preproj_*` and the like load it by themselves.
    """
    if not path.is_file():
        raise FileNotFoundError(f"weights={str(path)!r}: there is no such file")
    if path.suffix == ".npz":
        return {"file": str(path), "custom_load": True}, {}
    overlay: dict[str, Any] = {"file": str(path), "custom_load": False}
    try:
        tensors = load_state_dict(str(path), device="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"weights={str(path)!r} cannot be read as safetensors or as a PyTorch state dict "
            f"(without running code): {error}"
        ) from error
    own = {key: t for key, t in tensors.items() if key.startswith(("model.", "ema.module."))}
    if path.suffix == ".ckpt" and own:  # a run of ours: the weights that were evaluated
        prefix = "ema.module." if any(key.startswith("ema.") for key in own) else "model."
        tensors = {key.removeprefix(prefix): t for key, t in own.items() if key.startswith(prefix)}
        overlay = {"state_dict": tensors, "custom_load": False}
    method: dict[str, Tensor] = {}
    if not timm.models.model_entrypoint(name.split(".")[0]).__module__.startswith("mmpreproj."):
        method = {key: tensor for key, tensor in tensors.items() if ".preproj." in key}
    if method:
        tensors = {key: tensor for key, tensor in tensors.items() if key not in method}
        overlay = {"state_dict": tensors, "custom_load": False}
    configuration = timm.get_pretrained_cfg(name)
    classifier = getattr(configuration, "classifier", None) or ()
    for head in (classifier,) if isinstance(classifier, str) else classifier:
        weight = tensors.get(f"{head}.weight")
        if isinstance(weight, torch.Tensor):  # timm drops a head of another width by this number
            overlay["num_classes"] = weight.shape[0]
    return overlay, method


def hub_source(name: str) -> dict[str, Any]:
    """timm's pretrained_cfg for its own weights: from the cache if there, else the hub's."""
    if name.startswith(REPOSITORIES):
        return {}
    configuration = timm.get_pretrained_cfg(name)
    hub_id = getattr(configuration, "hf_hub_id", None)
    if not hub_id:
        has = getattr(configuration, "url", None) or getattr(configuration, "file", None)
        if has:
            return {}
        tagged = timm.list_pretrained(f"{name.split('.')[0]}*")[:5]
        hint = f"; with weights: {', '.join(tagged)}" if tagged else ""
        raise ValueError(
            f"timm has no pretrained weights for {name}{hint}; set pretrained: false, or weights: "
            "to a local file"
        )
    from huggingface_hub import try_to_load_from_cache

    for filename in WEIGHTS_FILES:
        cached = try_to_load_from_cache(hub_id, filename)
        if isinstance(cached, str):
            return {"file": cached, "custom_load": False}
    require_hub(
        f"pretrained weights of {name} ({hub_id})",
        f"Download {WEIGHTS_FILES[0]} of {hub_id} on a machine with a network, then: "
        "--model.pretrained false --model.weights FILE",
    )
    return {}
