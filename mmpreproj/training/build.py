"""A timm model ready to train: created, given weights, attached to, frozen. Errors come early."""

from __future__ import annotations

import difflib
import logging
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from timm.models import get_model_input_config, load_state_dict
from torch import Tensor, nn

import mmpreproj
from mmpreproj.preproj import PreProjConfig

# What timm looks for in a hub repository
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")


def build_model(
    name: str,
    num_classes: int,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    preproj: PreProjConfig | None = None,
) -> nn.Module:
    """Create a timm model and attach the method to it, after its weights are there.

    Args:
        name: any name that timm.create_model takes.
        num_classes: width of the classifier. Another one than the weights': fresh.
        model_args: further keywords of the model.
        pretrained: take the weights that timm names, from the hub or its local cache.
        weights: take them from this local file (safetensors, a state dict, or a checkpoint of
            `ImageClassifier`), resized as timm resizes its own. No code in the file is run.
        preproj: what to attach; None attaches nothing.

    Raises:
        ValueError: for an unknown model, an argument it does not take, weights that do not fit.
        FileNotFoundError: if `weights` is not there.
        ConnectionError: if pretrained weights are neither cached nor reachable.
    """
    check_name(name)
    arguments = dict(model_args or {})
    for key in ("num_classes", "pretrained"):
        if key in arguments:
            raise ValueError(f"model_args holds {key}: give it as the module's own {key} instead")
    arguments["num_classes"] = num_classes
    source, method = None, {}
    if weights is not None:
        source, method = _local_source(name, Path(weights))
    elif pretrained:
        source = _hub_source(name)
    model = _create(name, arguments, source, weights)
    if preproj is not None:
        if mmpreproj.preproj_modules(model):
            raise ValueError(
                f"preproj= attaches the method, but {name} carries it already; set its options in "
                "model_args instead (expansion, layers, ...), or leave preproj out"
            )
        mmpreproj.attach(model, preproj)
    if method:
        _fill_method(model, method, weights)
    return model


def check_name(name: str) -> None:
    """Raises ValueError, with close matches, if timm has no model of that name."""
    if name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) or timm.is_model(name.split(".")[0]):
        return
    near = difflib.get_close_matches(name.split(".")[0], timm.list_models(), n=5, cutoff=0.5)
    hint = f"close matches: {', '.join(near)}" if near else "timm.list_models() gives all names"
    raise ValueError(f"model={name!r} is not a timm model; {hint}")


def classifier_names(model: nn.Module) -> list[str]:
    """Paths of the classifier's modules (`head`, say), as its timm configuration names them."""
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    named = (named,) if isinstance(named, str) else tuple(named)
    modules = dict(model.named_modules())
    found = [path for path in named if path in modules]
    if not found and hasattr(model, "get_classifier"):
        heads = model.get_classifier()
        heads = heads if isinstance(heads, tuple | list) else (heads,)
        found = [path for path, module in modules.items() if any(module is head for head in heads)]
    return [path for path in found if list(modules[path].parameters())]  # an Identity has none


def freeze(model: nn.Module) -> None:
    """Leave the new parameters and the classifier trainable; without the method, the classifier.

    Raises:
        ValueError: if nothing would be left to train.
    """
    heads = classifier_names(model)
    if not heads and not mmpreproj.preproj_modules(model):
        raise ValueError(
            f"freeze_base on {type(model).__name__}: it has no classifier and no preproj= to train"
        )
    mmpreproj.freeze_base(model, also=heads)


def set_frozen_modes(model: nn.Module) -> None:
    """Put a frozen model in train mode: only what trains leaves eval mode.

    The base's dropout, drop path and batch statistics stay as in evaluation. `head_drop`, timm's
    dropout before the classifier, belongs to the classifier.
    """
    model.eval()
    for preproj in mmpreproj.preproj_modules(model).values():
        preproj.train()
    for path in classifier_names(model):
        model.get_submodule(path).train()
    if isinstance(getattr(model, "head_drop", None), nn.Module):
        model.head_drop.train()


def input_config(model: nn.Module) -> dict[str, Any]:
    """The model's input as plain types: input_size (C, H, W), interpolation, mean, std, crop_pct,
    crop_mode. A grey model gets the mean of its colour model's channel statistics."""
    config = resolve_model_data_config(
        model, args={"input_size": tuple(get_model_input_config(model)["input_size"])}
    )
    channels = config["input_size"][0]
    for key in ("mean", "std"):
        values = [float(value) for value in config[key]]
        if channels == 1 and len(values) != 1:
            values = [sum(values) / len(values)]
        config[key] = values
    return {**config, "input_size": [int(size) for size in config["input_size"]]}


def check_image_size(model: nn.Module, used: Mapping[str, Any] | None) -> None:
    """Raises ValueError, naming both sizes, if the data's image size is not the model's."""
    if not used or not used.get("input_size"):
        return
    own = get_model_input_config(model)
    found, wanted = tuple(used["input_size"])[-2:], tuple(own["input_size"])[-2:]
    if own.get("fixed_input_size") and tuple(found) != wanted:
        raise ValueError(
            f"the data give images of {found[0]}x{found[1]} px, the model takes "
            f"{wanted[0]}x{wanted[1]} only; leave data img_size out, or set model_args "
            f"img_size={found[0]} (or dynamic_img_size=true, where the model has it)"
        )


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """How many parameters there are in all, are trained, and were added by the method."""
    new = sum(p.numel() for m in mmpreproj.preproj_modules(model).values() for p in m.parameters())
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "new": new,
    }


def _create(
    name: str,
    arguments: dict[str, Any],
    source: dict[str, Any] | None,
    weights: str | os.PathLike[str] | None,
) -> nn.Module:
    told = _LoadReport()
    builder = logging.getLogger("timm.models._builder")
    level = builder.level
    builder.addHandler(told)
    builder.setLevel(logging.INFO)  # timm tells of missing keys at this level, and nowhere else
    try:
        model = timm.create_model(
            name, pretrained=source is not None, pretrained_cfg_overlay=source, **arguments
        )
    except TypeError as error:
        shown = {key: value for key, value in arguments.items() if key != "num_classes"}
        raise ValueError(f"model={name!r} does not take model_args={shown}: {error}") from error
    except (RuntimeError, KeyError) as error:
        if weights is None:
            raise ValueError(f"model={name!r} with model_args={arguments}: {error}") from error
        message = str(error)[:600]
        raise ValueError(f"weights={str(weights)!r} do not fit {name}: {message}") from error
    finally:
        builder.removeHandler(told)
        builder.setLevel(level)
    heads = tuple(classifier_names(model))
    lost = [key for key in told.unexpected if ".preproj." in key]
    if lost:
        raise ValueError(
            f"weights={str(weights)!r} hold {len(lost)} tensors of the method that {name} with "
            f"model_args={arguments} has no place for, such as {lost[0]!r}"
        )
    missing = [key for key in told.missing if not key.startswith(heads) and ".preproj." not in key]
    if missing:
        raise ValueError(
            f"the weights for {name} ({weights or 'pretrained'}) lack {len(missing)} tensors of "
            f"the model, such as {missing[0]!r}; is it a checkpoint of another architecture?"
        )
    return model


class _LoadReport(logging.Handler):
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


def _fill_method(
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


def _local_source(name: str, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
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


def _hub_source(name: str) -> dict[str, Any]:
    """timm's pretrained_cfg for its own weights: from the cache if there, else the hub's.

    Tried here first because the hub's client retries for most of a minute without a network.
    """
    if name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
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
    from huggingface_hub import constants, try_to_load_from_cache

    for filename in WEIGHTS_FILES:
        cached = try_to_load_from_cache(hub_id, filename)
        if isinstance(cached, str):
            return {"file": cached, "custom_load": False}
    if constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "cannot be reached"
        raise ConnectionError(
            f"pretrained weights of {name}: {hub_id} on {constants.ENDPOINT} {why}, and they are "
            f"not in the cache ({constants.HF_HUB_CACHE}). Download {WEIGHTS_FILES[0]} of {hub_id} "
            "on a machine with a network, then: --model.pretrained false --model.weights FILE"
        )
    return {}


def _reachable(endpoint: str, seconds: float = 5.0) -> bool:
    parts = urllib.parse.urlsplit(endpoint)
    if urllib.request.getproxies().get(parts.scheme):
        return True  # through a proxy, only a real request can tell
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=seconds).close()
    except OSError:
        return False
    return True


def listed(value: Any) -> Any:
    """Tuples as lists, all the way down: plain types, as YAML and checkpoints give them back."""
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value


def some(classes: list[str], most: int = 12) -> str:
    """Class names for a message, the first of them where there are many."""
    shown = ", ".join(str(name) for name in classes[:most])
    return f"{shown}, … ({len(classes)} in all)" if len(classes) > most else shown
