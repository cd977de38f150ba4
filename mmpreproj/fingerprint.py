"""What a base is: its name, architecture, width, depth, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.architectures import adapters_beside, unwrapped
from mmpreproj.attach import (
    attachment_of,
    is_within,
    new_parameters,
)
from mmpreproj.messages import short
from mmpreproj.preproj import PreProj, PreProjConfig
from mmpreproj.sites import find
from mmpreproj.values import class_of

__all__ = ["base_facts", "base_name", "base_parameters", "base_shape", "check_base"]
__all__ += ["fingerprint", "whole"]

FINGERPRINT_VALUES = 65536


def base_facts(
    model: nn.Module,
    config: PreProjConfig,
    new: Iterable[PreProj],
    also: Iterable[str] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """What a folder says of the base: JSON's types. Arguments as those of the functions below."""
    return {
        "name": base_name(model),
        **base_shape(model, config, new),
        "fingerprint": fingerprint(model, also, tensors),
    }


def check_base(
    model: nn.Module,
    config: PreProjConfig,
    new: Iterable[PreProj],
    expected: Mapping[str, Any],
    also: Iterable[str] | None = None,
    *,
    allow_other_base: bool = False,
    what: str,
    way: str = "pass allow_other_base=True",
) -> None:
    """Raise ValueError where `model` is not the base that `base_facts` told of.

    Args:
        what: was saved from it, for the message.
        way: to take other weights, for the message.
    """
    found = base_shape(model, config, new)
    wanted = {key: expected.get(key) for key in found}
    if found != wanted:
        told = ", ".join(f"{key!r}: {short(value)}" for key, value in wanted.items())
        raise ValueError(f"{what} was saved from {{{told}}}, but this model is {found}")
    if not allow_other_base and fingerprint(model, also) != expected.get("fingerprint"):
        saved = expected.get("name")
        saved = saved if isinstance(saved, str) and saved else f"a {found['architecture']}"
        name = base_name(model)
        raise ValueError(
            f"{what} was saved from {saved} with other weights than this model"
            f"{f' ({name})' if name else ''} has; load those weights, or {way}"
        )


def base_name(model: nn.Module) -> str | None:
    """The name that the base's library knows it by, where it has one."""
    timm_config = getattr(model, "pretrained_cfg", None) or {}
    name = ".".join(filter(None, (timm_config.get("architecture"), timm_config.get("tag"))))
    return name or getattr(getattr(model, "config", None), "name_or_path", None) or None


def base_shape(model: nn.Module, config: PreProjConfig, new: Iterable[PreProj]) -> dict[str, Any]:
    """Architecture, width and depth: the parts of a base that cannot be let differ.

    Args:
        new: what each self-attention has, or would get.
    """
    widths = sorted({module.dim for module in new})
    width = widths[0] if len(widths) == 1 else widths
    found = find(model, config)
    stacks = config.layers if isinstance(config.layers, dict) else found.stacks
    depth = sum(len(sites) for stack in stacks for sites in found.stacks[stack].values())
    return {"architecture": class_of(model).__name__, "width": width, "depth": depth}


def base_parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(name in the base, name in the model, parameter) of all that is the base's own.

    They differ where PEFT has put adapters of another method into the model.
    """
    new, adapters = new_parameters(model), adapters_beside(model)
    for name, parameter in model.named_parameters():
        if name not in new and not any(is_within(name, path) for path in adapters):
            plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
            yield plain, name, parameter


def fingerprint(
    model: nn.Module,
    also: Iterable[str] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> str:
    """A hash of the base's weights: names, shapes, and up to 65,536 evenly spaced values of each.

    Values are rounded to bfloat16 first, so that a base loaded in float32 and in bfloat16 is the
    same base. The new parameters, and those under the paths of `also` (None: what `freeze_base` was
    told), do not count.

    Args:
        tensors: the model's state dict, where its own parameters are sharded.
    """
    model = unwrapped(model)
    also = attachment_of(model).also if also is None else also
    digest = hashlib.sha256()
    for plain, name, parameter in sorted(base_parameters(model), key=lambda each: each[0]):
        if any(is_within(plain, path) for path in also):
            continue
        values = whole(parameter if tensors is None else tensors[name]).reshape(-1)
        values = values[:: max(1, -(-values.numel() // FINGERPRINT_VALUES))]
        if values.is_floating_point():
            values = values.to(torch.bfloat16)
        digest.update(f"{plain} {tuple(parameter.shape)}".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def whole(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous; a sharded one (DTensor) is gathered, a quantised one
    unpacked."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    elif type(tensor) is not Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        tensor = tensor.dequantize()
    return tensor.cpu().contiguous()
