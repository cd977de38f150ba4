"""Save what the method added to a model as a small folder, and load it onto the same base again."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from mmpreproj.architectures import unwrapped
from mmpreproj.attach import (
    Attachment,
    attach,
    attachment_of,
    detach,
    freeze_base,
    is_within,
    new_parameters,
    preproj_modules,
    refuse_compiled,
)
from mmpreproj.card import write_card
from mmpreproj.files import write_whole
from mmpreproj.fingerprint import (
    base_facts,
    base_parameters,
    check_base,
    fingerprint,
    whole,
)
from mmpreproj.folders import (
    CONFIG_FILE,
    PEFT_CONFIG,
    WEIGHTS_FILE,
    Folder,
    read_folder,
    write_peft,
)
from mmpreproj.messages import about, listed
from mmpreproj.preproj import PreProjConfig
from mmpreproj.sites import chosen, find, find_sites

__all__ = ["fingerprint", "load", "save"]

_logger = logging.getLogger(__name__)

BESIDE = "peft"  # the folder within a folder that holds what PEFT put beside the method
FORMATS = ("mmpreproj", "peft")


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    format: str = "mmpreproj",
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write what the method added to `model`, without the base, as a folder.

    `preproj.safetensors` holds the new parameters, and those that `freeze_base` was told to train
    also; `preproj.json` the config and what the base is: name, architecture, width, depth and a
    fingerprint of its weights; `README.md` is a card. LoRA that PEFT has put beside the method goes
    into `peft/`. Sharded parameters are gathered: call it on every rank.

    Args:
        dtype: to store the parameters in, such as "bfloat16"; None: as they are.
        format: "mmpreproj", or "peft" for a folder that `peft.PeftModel.from_pretrained` reads.
        card: what the card says besides: `license`, `data` and `figures`, a mapping of names to
            values or to {"value": …, "n": …}.

    Returns:
        The folder.

    Raises:
        ValueError: if the model does not carry the method, or `path` is a file.
    """
    refuse_compiled(model)
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, found {format!r}")
    return write(unwrapped(model), Path(path), dtype, format, card)


def write(
    model: nn.Module,
    folder: Path,
    dtype: str | torch.dtype | None = None,
    format: str = "mmpreproj",
    card: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
    here: bool = True,
) -> Path:
    """`save` of a model that is no PeftModel.

    Args:
        state: its state dict, where the model's own parameters are sharded.
        here: write; the other ranks only take part in gathering.
    """
    attachment, config = attachment_of(model), attachment_of(model).config
    if config is None:
        raise ValueError(_nothing_to_save(model))
    sites = {f"{site.attention}.preproj" for site in find_sites(model, config)}
    changed = sorted(sites ^ preproj_modules(model).keys())
    if changed:
        raise ValueError(
            f"{changed[0]!r} does not agree with the config that was attached, "
            f"{config}: detach and attach whole models, not some of their blocks"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; save takes a folder")
    beside = hasattr(model, "peft_config")
    if beside and format == "peft":
        raise ValueError("LoRA and the method on one model are one folder in our format alone")
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = {
        name: whole(parameter if state is None else state[given]).to(dtype or parameter.dtype)
        for name, (given, parameter) in _stored(model, attachment.also).items()
    }
    base = base_facts(model, config, preproj_modules(model).values(), tensors=state)
    if not here:
        return folder
    described = Folder(config, list(attachment.also), base, tensors)
    if format == "peft":
        write_peft(folder, described)
    else:
        write_whole(folder / WEIGHTS_FILE, safetensors.torch.save(tensors))
        write_whole(folder / CONFIG_FILE, json.dumps(described.to_dict(), indent=2) + "\n")
    if beside:
        from mmpreproj.peft_method.beside import save_beside

        save_beside(model, folder / BESIDE, dtype)
    write_card(folder, described, card or {}, format)
    return folder


def _nothing_to_save(model: nn.Module) -> str:
    if preproj_modules(model) and hasattr(model, "peft_config"):
        return (
            f"{type(model).__name__} carries the method as one of PEFT's: save_pretrained of the "
            "PeftModel writes it, and mmpreproj.load reads that folder, too"
        )
    return f"nothing to save: the method is not attached to {type(model).__name__}"


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    allow_other_base: bool = False,
    *,
    is_trainable: bool = False,
) -> nn.Module:
    """Attach to `model` what `save` wrote, or fill it in where the same config is attached already.

    The folder may also be one of PEFT's, that a PeftModel with `PreProjPeftConfig` wrote.

    Args:
        model: the base, with its weights; other precisions of the same weights are the same base.
        allow_other_base: take a base of the same architecture with other weights.
        is_trainable: to train on: the base is frozen, and what was trained trains.

    Returns:
        The same model.

    Raises:
        FileNotFoundError: if the folder lacks a file.
        ValueError: with what was found and what was expected, and the model as it was, if a file
            cannot be read, the architecture or the weights of the base differ, another config is
            attached, or a tensor is missing, unknown, of another shape, or of values that are not
            finite numbers.
    """
    refuse_compiled(model)
    given, model = model, unwrapped(model)
    folder = read_folder(Path(path))
    config, tensors = folder.config, folder.tensors
    before = attachment_of(model)
    if before.config is None:
        with about(path, "does not fit this model"):
            config = _of_stacks(model, config, tensors)
    elif folder.format == "peft":  # which names the dtype of its tensors
        config = dataclasses.replace(config, dtype=before.config.dtype)
    if before.config is not None and before.config != config:
        raise ValueError(f"{path} was saved with {config}, but the model carries {before.config}")
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    if before.config is None:
        _check_expansion(config, tensors, path)
        with about(path, "does not fit this model"):
            attach(model, config)
    try:
        if "fingerprint" in folder.base or folder.format != "peft":
            check_base(
                *(model, config, preproj_modules(model).values(), folder.base, folder.also),
                allow_other_base=allow_other_base,
                what=os.fspath(path),
            )
        else:
            _logger.warning("%s does not say what its base was: nothing is checked", path)
        targets = {name: parameter for name, (_, parameter) in _stored(model, folder.also).items()}
        _check_tensors(targets, tensors, path)
        if Path(path, BESIDE, PEFT_CONFIG).is_file():
            from mmpreproj.peft_method.beside import load_beside

            load_beside(model, Path(path, BESIDE), is_trainable)
    except BaseException:
        if before.config is None:
            detach(model)  # which undoes freeze_base, too
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trained[name])
            if before != Attachment():
                model.preproj_attachment = before
        raise
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    model.preproj_attachment = dataclasses.replace(attachment_of(model), also=tuple(folder.also))
    if is_trainable:
        freeze_base(model, folder.also)
    return given


def _check_expansion(
    config: PreProjConfig, tensors: dict[str, Tensor], path: str | os.PathLike[str]
) -> None:
    """Raises ValueError where the config asks for other widths than the tensors have.

    It comes before attaching, which would take as much memory as the config says.
    """
    ends, found = (".preproj.up.weight", ".preproj.down.weight"), False
    for name, tensor in tensors.items():
        if name.endswith(ends) and tensor.dim() == 2:
            found = True
            hidden, width = tensor.shape if name.endswith(ends[0]) else reversed(tensor.shape)
            if not hidden <= max(1.0, config.expansion * width) < hidden + 1:
                raise ValueError(
                    f"{path} does not fit its own config: expansion is {config.expansion}, but "
                    f"{name} is {tuple(tensor.shape)}"
                )
    if config.pre_projection and not found:
        raise ValueError(f"{path} does not fit its own config: it has no tensor of pre_projection")


def _check_tensors(
    targets: dict[str, Tensor], tensors: dict[str, Tensor], path: str | os.PathLike[str]
) -> None:
    shapes = {
        name: (tuple(targets[name].shape), tuple(tensors[name].shape))
        for name in targets.keys() & tensors.keys()
    }
    faults = {
        "missing": sorted(targets.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - targets.keys()),
        "of another shape (expected, found)": sorted(
            f"{name} {expected} {found}"
            for name, (expected, found) in shapes.items()
            if expected != found
        ),
        "of values that are no finite numbers of the model's dtype": sorted(
            f"{name} ({tensors[name].dtype})"
            for name in shapes
            if not _finite(tensors[name], targets[name].dtype)
        ),
    }
    told = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
    if told:
        raise ValueError(f"{path} does not fit this model. Tensors {told}")


def _finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether it holds floating-point numbers, all of them finite in that dtype too."""
    return tensor.is_floating_point() and bool(tensor.to(dtype).isfinite().all())


def _stored(model: nn.Module, also: Iterable[str]) -> dict[str, tuple[str, nn.Parameter]]:
    """What a saved folder holds: the new parameters and those under the paths of `also`, by name.

    With the name in the model, which another adapter of PEFT may have changed.
    """
    own = {
        plain: (name, parameter)
        for plain, name, parameter in base_parameters(model)
        if any(is_within(plain, path) for path in also)
    }
    return {name: (name, p) for name, p in new_parameters(model).items()} | own


def _of_stacks(
    model: nn.Module, config: PreProjConfig, tensors: dict[str, Tensor]
) -> PreProjConfig:
    """The config as it was meant: a folder may be older than what is known of the model's stacks.

    Then it holds tensors for some of the stacks that its config takes now, and these are named.
    """
    saved = {name.partition(".preproj.")[0] for name in tensors if ".preproj." in name}
    found = find(model, config)
    wanted = {site.attention for site in chosen(found, config)}
    layers: dict[str, list[int]] = {}
    whole: set[str] = set()
    for stack, blocks in found.stacks.items():
        paths = [{site.attention for site in sites} & wanted for sites in blocks.values()]
        if saved.intersection(set().union(*paths)):
            layers[stack] = [number for number, held in enumerate(paths) if held]
            whole.update(*paths)
    older = saved < wanted and saved == whole  # whole stacks are missing, not some tensors
    return dataclasses.replace(config, layers=layers) if older and layers else config
