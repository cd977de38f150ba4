"""Save what the method added to a model as a small folder, and load it onto the same base again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from mmpreproj.attach import (
    Attachment,
    attach,
    attachment_of,
    detach,
    is_within,
    new_parameters,
    preproj_modules,
    refuse_compiled,
)
from mmpreproj.files import parse_json, write_whole
from mmpreproj.messages import about, listed, short
from mmpreproj.preproj import PreProjConfig
from mmpreproj.sites import chosen, find, find_sites
from mmpreproj.values import class_of

__all__ = ["fingerprint", "load", "save"]

WEIGHTS_FILE = "preproj.safetensors"
CONFIG_FILE = "preproj.json"
FORMAT = 1


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write what the method added to `model`, without the base, as a folder.

    `preproj.safetensors` holds the new parameters, and those that `freeze_base` was told to train
    also; `preproj.json` the config and what the base is: name, architecture, width, depth and a
    fingerprint of its weights. Sharded parameters are gathered: call it on every rank.

    Returns:
        The folder.

    Raises:
        ValueError: if the model does not carry the method, or `path` is a file.
    """
    refuse_compiled(model)
    attachment = attachment_of(model)
    if attachment.config is None:
        raise ValueError(f"nothing to save: the method is not attached to {type(model).__name__}")
    sites = {f"{site.attention}.preproj" for site in find_sites(model, attachment.config)}
    changed = sorted(sites ^ preproj_modules(model).keys())
    if changed:
        raise ValueError(
            f"{changed[0]!r} does not agree with the config that was attached, "
            f"{attachment.config}: detach and attach whole models, not some of their blocks"
        )
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; save takes a folder")
    tensors = {name: _whole(tensor) for name, tensor in _stored(model, attachment.also).items()}
    described = {
        "format": FORMAT,
        "config": attachment.config.to_dict(),
        "also": list(attachment.also),
        "base": {
            "name": _base_name(model),
            **_base_shape(model, attachment.config),
            "fingerprint": fingerprint(model),
        },
    }
    write_whole(folder / WEIGHTS_FILE, safetensors.torch.save(tensors))
    write_whole(folder / CONFIG_FILE, json.dumps(described, indent=2) + "\n")
    return folder


def load(
    model: nn.Module, path: str | os.PathLike[str], allow_other_base: bool = False
) -> nn.Module:
    """Attach to `model` what `save` wrote, or fill it in where the same config is attached already.

    Args:
        model: the base, with its weights; other precisions of the same weights are the same base.
        allow_other_base: take a base of the same architecture with other weights.

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
    described, config, tensors = _read(Path(path))
    before = attachment_of(model)
    if before.config is None:
        with about(path, "does not fit this model"):
            config = _of_stacks(model, config, tensors)
    if before.config is not None and before.config != config:
        raise ValueError(f"{path} was saved with {config}, but the model carries {before.config}")
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    if before.config is None:
        _check_expansion(config, tensors, path)
        with about(path, "does not fit this model"):
            attach(model, config)
    try:
        _check_base(model, config, described["base"], allow_other_base, described["also"], path)
        targets = _stored(model, described["also"])
        _check_tensors(targets, tensors, path)
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
    model.preproj_attachment = dataclasses.replace(
        attachment_of(model), also=tuple(described["also"])
    )
    return model


def _read(folder: Path) -> tuple[dict[str, Any], PreProjConfig, dict[str, Tensor]]:
    """What a folder says, the config in it, and its tensors."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no {name}: load takes the folder that mmpreproj.save wrote"
            )
    with about(folder):
        described = parse_json((folder / CONFIG_FILE).read_bytes(), CONFIG_FILE)
        if not isinstance(described, dict):
            raise ValueError(f"{CONFIG_FILE} holds {short(described)}, which is no object")
        found = described.get("format")
        if found != FORMAT:
            raise ValueError(f"format {short(found)}, this version of mmpreproj reads {FORMAT}")
        missing = {"config", "also", "base"} - set(described)
        if missing:
            raise ValueError(f"no {sorted(missing)}")
        also = described["also"]
        for name, holds, what in (
            ("config", isinstance(described["config"], dict), "an object"),
            ("base", isinstance(described["base"], dict), "an object"),
            ("also", isinstance(also, list) and all(isinstance(x, str) for x in also), "paths"),
        ):
            if not holds:
                raise ValueError(f"{name} must be {what}, found {short(described[name])}")
        config = PreProjConfig.from_dict(described["config"])
        return described, config, safetensors.torch.load_file(folder / WEIGHTS_FILE)


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


def _check_base(
    model: nn.Module,
    config: PreProjConfig,
    expected: dict[str, Any],
    allow_other_base: bool,
    also: list[str],
    path: str | os.PathLike[str],
) -> None:
    found = _base_shape(model, config)
    wanted = {key: expected.get(key) for key in found}
    if found != wanted:
        told = ", ".join(f"{key!r}: {short(value)}" for key, value in wanted.items())
        raise ValueError(f"{path} was saved from {{{told}}}, but this model is {found}")
    if not allow_other_base and fingerprint(model, also) != expected.get("fingerprint"):
        saved = expected.get("name")
        saved = saved if isinstance(saved, str) and saved else f"a {found['architecture']}"
        name = _base_name(model)
        raise ValueError(
            f"{path} was saved from {saved} with other weights than this model"
            f"{f' ({name})' if name else ''} has; load those weights, or pass allow_other_base=True"
        )


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


def _stored(model: nn.Module, also: Iterable[str]) -> dict[str, nn.Parameter]:
    """What a saved folder holds: the new parameters and those under the paths of `also`."""
    new = new_parameters(model)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in new or any(is_within(name, path) for path in also)
    }


def _base_name(model: nn.Module) -> str | None:
    """The name that the base's library knows it by, where it has one."""
    timm_config = getattr(model, "pretrained_cfg", None) or {}
    name = ".".join(filter(None, (timm_config.get("architecture"), timm_config.get("tag"))))
    return name or getattr(getattr(model, "config", None), "name_or_path", None) or None


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


def _base_shape(model: nn.Module, config: PreProjConfig) -> dict[str, Any]:
    """Architecture, width and depth: the parts of a base that cannot be let differ."""
    widths = sorted({module.dim for module in preproj_modules(model).values()})
    found = find(model, config)
    stacks = config.layers if isinstance(config.layers, dict) else found.stacks
    depth = sum(len(sites) for stack in stacks for sites in found.stacks[stack].values())
    return {
        "architecture": class_of(model).__name__,
        "width": widths[0] if len(widths) == 1 else widths,
        "depth": depth,
    }


FINGERPRINT_VALUES = 65536


def fingerprint(model: nn.Module, also: Iterable[str] | None = None) -> str:
    """A hash of the base's weights: names, shapes, and up to 65,536 evenly spaced values of each.

    Values are rounded to bfloat16 first, so that a base loaded in float32 and in bfloat16 is the
    same base. The new parameters, and those under the paths of `also` (None: what `freeze_base` was
    told), do not count.
    """
    own = _stored(model, attachment_of(model).also if also is None else also)
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if name in own:
            continue
        values = _whole(parameter).reshape(-1)
        values = values[:: max(1, -(-values.numel() // FINGERPRINT_VALUES))]
        if values.is_floating_point():
            values = values.to(torch.bfloat16)
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def _whole(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous; a sharded one (DTensor) is gathered first."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.cpu().contiguous()
