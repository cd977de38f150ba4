"""Give the method to a model that exists, and take it away again.

Nothing is wrapped: the class of each self-attention is swapped for a subclass (`mmpreproj.swap`),
so that every parameter of the base keeps its name and every isinstance check holds.

In training, DropPath and dropout that act on the attention branch behind the point where the skip
joins act on the skip as well: a sample that loses its attention branch loses its skip.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.architectures import Found, Site, adapters_beside, unwrapped, width_of
from mmpreproj.blocks import CROSS
from mmpreproj.preproj import PreProj, PreProjConfig
from mmpreproj.sites import block_sites, chosen, find
from mmpreproj.swap import (
    AttentionSwap,
    BlockSwap,
    CarrySwap,
    Handoff,
    JoinOutputSwap,
    JoinSwap,
    ModelSwap,
    NormSwap,
    PretrainedSwap,
    ReaderSwap,
    Swapped,
    swap,
    swap_back,
)

__all__ = ["attach", "attach_block", "attachment_of", "detach", "freeze_base", "is_within"]
__all__ += ["make_preproj", "new_parameters", "plan_swaps", "preproj_modules", "refuse_compiled"]
__all__ += ["report", "swap_all"]

_logger = logging.getLogger(__name__)

# For paths by hand: the first of these that an attention has is where it reads its input.
INPUT_PROJECTIONS = (
    *("qkv", "q_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn"),
    *("query", "query_proj", "q_lin", "q"),
    # an attention that hands its input on to another
    *("attention.q_proj", "attention.query", "attention.qkv"),
)


@dataclasses.dataclass
class Attachment:
    """What a model remembers of attach and freeze_base, so that both can be undone and saved."""

    config: PreProjConfig | None = None
    also: tuple[str, ...] = ()
    requires_grad: dict[str, bool] | None = None


def attach(model: nn.Module, config: PreProjConfig | None = None) -> nn.Module:
    """Give every self-attention of `model` the method, in place.

    Load the base's weights first: loading afterwards through the library that made the model may
    draw the new parameters afresh. With the default config the outputs stay bit-identical.

    Args:
        model: any model whose blocks can be read (`mmpreproj.describe` says what is found), or of
            any architecture when `config.attention` gives the paths by hand. What is left out of
            it is logged.
        config: what to add, and where; None is both parts in every block.

    Returns:
        The same model.

    Raises:
        ValueError: before anything is changed, if no self-attention can take it, a layer or path
            matches nothing, the model carries the method already, or a module cannot take it.
        TypeError: if `config` is no PreProjConfig.
    """
    config, given = _checked(config), model
    model = unwrapped(model)
    found = find(_attachable(model, config), config)
    _attach(model, config, chosen(found, config), found)
    if not isinstance(model, Swapped):  # a model may be its own only block
        swap(model, PretrainedSwap if hasattr(model, "save_pretrained") else ModelSwap, {})
    return given


def attach_block(block: nn.Module, config: PreProjConfig | None = None) -> nn.Module:
    """`attach` for one transformer block; `config.layers` does not apply. Returns the block."""
    config = _checked(config)
    if config.layers is not None or config.attention is not None:
        raise ValueError("attach_block takes one known block: layers and attention must be None")
    _attach(block, config, block_sites(_attachable(block, config), config), Found())
    return block


def _checked(config: PreProjConfig | None) -> PreProjConfig:
    config = config or PreProjConfig()
    if not isinstance(config, PreProjConfig):
        raise TypeError(
            f"config must be a PreProjConfig or None, found {config!r}; of a mapping, "
            "PreProjConfig.from_dict makes one"
        )
    return config


def _attachable(model: nn.Module, config: PreProjConfig) -> nn.Module:
    if not config.enabled:
        raise ValueError("nothing to attach: pre_projection and content_skip are both False")
    refuse_compiled(model)
    for name, taken in model.named_modules():
        if not isinstance(taken, AttentionSwap):
            continue
        way = "detach" if isinstance(taken.preproj, PreProj) else "the PeftModel's unload()"
        raise ValueError(f"the method is attached already, at {name!r}; call {way} first")
    return model


def _attach(model: nn.Module, config: PreProjConfig, sites: list[Site], found: Found) -> None:
    new = {site.attention: make_preproj(model, site, config) for site in sites}
    swap_all(model, plan_swaps(model, sites, new, config.content_skip))
    model.preproj_attachment = dataclasses.replace(attachment_of(model), config=config)
    report(model, sites)
    for told in found.told():
        level = logging.INFO if told.endswith(CROSS) else logging.WARNING
        _logger.log(level, "%s: %s", type(model).__name__, told)


Swaps = dict[str, tuple[type, dict[str, Any]]]


def plan_swaps(
    model: nn.Module, sites: Iterable[Site], preprojs: Mapping[str, nn.Module], skip: bool
) -> Swaps:
    """What is to be swapped, by path: the mixin and its attributes. Nothing is changed yet.

    Args:
        preprojs: what each attention gets as its `preproj`, by its path.
        skip: whether there may be a skip to hand on.

    Raises:
        ValueError: if a module cannot be swapped.
    """
    swaps: Swaps = {}
    for site in sites:
        _swappable(model, site.attention)
        handoff = None
        if site.join is not None and skip:
            handoff = Handoff()
            _swappable(model, site.join)
            _swappable(model, site.block)
            assert site.join not in swaps, f"two skips would join at {site.join!r}"
            mixin = JoinOutputSwap if site.join_output else CarrySwap if site.carried else JoinSwap
            swaps[site.join] = (mixin, {"preproj_handoff": handoff})
            if site.moved and site.norm is not None:
                assert site.norm not in swaps, (
                    f"{site.norm!r} makes x̂, and two skips would join there"
                )
                swaps[site.norm] = (NormSwap, {"preproj_handoff": handoff})
            of_block = swaps.setdefault(site.block, (BlockSwap, {}))[1]
            for name, value in (
                ("preproj_handoffs", handoff),
                ("preproj_reads_block", site.moved and site.norm is None),
                ("preproj_carries", site.carried),
            ):
                of_block[name] = (*of_block.get(name, ()), value)
        readers = Handoff() if site.readers else None
        for reader in site.readers:
            _swappable(model, reader)
            swaps[reader] = (ReaderSwap, {"preproj_readers": readers})
        levels = site.attention.count(".") - site.block.count(".") + (not site.block)
        swaps[site.attention] = (
            AttentionSwap,
            {
                "preproj": preprojs[site.attention],
                "preproj_handoff": handoff,
                "preproj_divisor": site.divisor,
                "preproj_reads": site.reads,
                "preproj_readers": readers,
                "preproj_channels_first": site.channels_first,
                "preproj_place": (levels, site.rank),
            },
        )
    return swaps


def swap_all(model: nn.Module, swaps: Swaps) -> None:
    """Swap the class of every module that `plan_swaps` planned for."""
    for path, (mixin, attributes) in swaps.items():
        swap(model.get_submodule(path), mixin, attributes)


def report(model: nn.Module, sites: list[Site]) -> None:
    """Log what was attached, and warn where the blocks are post-norm."""
    new = sum(p.numel() for module in preproj_modules(model).values() for p in module.parameters())
    everything = sum(p.numel() for p in model.parameters())
    mlps = sum(site.mlp for site in sites)
    _logger.info(
        "attached to %d self-attentions and %d MLPs of %s: %.1f M new parameters beside %.1f M; "
        "%d skips join behind a scale",
        *(len(sites) - mlps, mlps, type(model).__name__, new / 1e6, (everything - new) / 1e6),
        sum(site.join is not None for site in sites),
    )
    if not all(site.normed for site in sites):
        warnings.warn(
            f"{type(model).__name__} is post-norm: its attention reads no norm(x), so x̂ is the "
            "block's own input",
            stacklevel=1,  # by this line, so once for each class of model
        )


def _swappable(model: nn.Module, path: str) -> nn.Module:
    module = model.get_submodule(path)
    if "forward" in vars(module):
        raise ValueError(
            f"{path!r} has a forward of its own set on the instance (an offload hook or a patched "
            "kernel), which would bypass the method; remove it, attach, then set it again"
        )
    return module


def make_preproj(model: nn.Module, site: Site, config: PreProjConfig) -> PreProj:
    """A PreProj of the width, device and dtype of what reads x̂ in the attention."""
    path = site.attention
    attention = model.get_submodule(path)
    names = INPUT_PROJECTIONS if site.reader is None else ()
    found = [p for p in (_descendant(attention, name) for name in names) if p is not None]
    reader = found[0] if found else model.get_submodule(site.reader or path)
    dim = width_of(reader)
    by_hand = reader is attention and site.reader is None
    if dim is None or by_hand and not hasattr(reader, "embed_dim"):
        linear = [name for name, module in attention.named_children() if hasattr(module, "weight")]
        raise ValueError(
            f"{path!r} ({type(attention).__name__}) has none of the input projections "
            f"{INPUT_PROJECTIONS}; it has {linear}"
        )
    weight, packed = _stored_weight(reader)
    if weight.is_meta and site.reader is not None:  # offloaded: its weights are there in a call
        _swappable(model, site.reader)
    if config.dtype is None and packed:
        raise ValueError(
            f"{path!r} holds packed weights ({weight.dtype}): say which dtype the new parameters "
            "take, such as PreProjConfig(dtype='bfloat16')"
        )
    dtype = weight.dtype if config.dtype is None else getattr(torch, config.dtype)
    return PreProj(dim, config.at(site.mlp), device=weight.device, dtype=dtype)


def _stored_weight(projection: nn.Module) -> tuple[Tensor, bool]:
    """The tensor that holds a projection's weight, and whether it is packed (quantised).

    A quantised projection may name it otherwise, or hold numbers of one byte (float8).
    """
    weight = getattr(projection, "weight", None)
    if callable(weight):  # torch's own quantised modules
        warnings.warn(
            f"{type(projection).__module__} has no backward: with the method on such a base, "
            "evaluate, but do not train",
            stacklevel=1,
        )
        return weight(), True
    if weight is None:
        plain = (p for p in projection.parameters() if p.is_floating_point() and p.ndim > 1)
        weight = None if hasattr(projection, "in_features") else next(plain, None)
    if weight is None:
        return next(iter((*projection.parameters(), *projection.buffers()))), True
    return weight, not weight.is_floating_point() or weight.element_size() < 2


def _descendant(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)
        if not isinstance(module, nn.Module):
            return None
    return module


def detach(model: nn.Module) -> nn.Module:
    """Make `model` exactly its base again, `requires_grad` included; the new parameters are gone.

    Raises:
        ValueError: if the model does not carry the method.
    """
    refuse_compiled(model)
    given, model = model, unwrapped(model)
    swapped = [module for module in model.modules() if isinstance(module, Swapped)]
    if not swapped:
        raise ValueError(f"nothing to detach: {type(model).__name__} does not carry the method")
    for module in swapped:
        swap_back(module)
    frozen = attachment_of(model).requires_grad or {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen.get(name, parameter.requires_grad))
    for module in model.modules():  # those of single blocks, too
        vars(module).pop("preproj_attachment", None)
    return given


def preproj_modules(model: nn.Module) -> dict[str, PreProj]:
    """`{qualified name: PreProj}`, one per site: self-attentions, and the MLPs behind them.

    They stand in order of execution, an MLP behind the attentions of its block.

    Stacks stand as the model lists them: encoder before decoder; CLIP's two towers, neither of
    which reads the other, text before image.
    """
    found: dict[str, tuple[int, int, PreProj]] = {}
    seen: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, AttentionSwap):
            levels, rank = module.preproj_place
            block = path.rsplit(".", levels)[0] if path.count(".") >= levels else ""
            new = module.preproj
            for name, each in new.named_modules(prefix=f"{path}.preproj"):
                if isinstance(each, PreProj):
                    found[name] = (seen.setdefault(block, len(seen)), rank, each)
    return {name: new for name, (*_, new) in sorted(found.items(), key=lambda item: item[1][:2])}


def freeze_base(model: nn.Module, also: Iterable[str] = ()) -> nn.Module:
    """Leave only the new parameters trainable, and those that `also` names. LoRA that the model
    carries as well is no part of the base: it stays as it is.

    Args:
        also: paths of modules or parameters that train too, such as `["head"]`; `save` then stores
            them beside the new parameters.

    Returns:
        The same model. `detach` gives back what was trainable before.

    Raises:
        ValueError: before anything is changed, if a path matches nothing, or nothing would train.
    """
    refuse_compiled(model)
    given, model = model, unwrapped(model)
    also = (also,) if isinstance(also, str) else tuple(also)
    new, adapters = new_parameters(model), adapters_beside(model)
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in new or not any(is_within(name, path) for path in adapters)
    }
    for path in also:
        if not any(is_within(name, path) for name in parameters):
            known = [n for n, m in model.named_modules() if next(m.parameters(), None) is not None]
            near = difflib.get_close_matches(path, known, n=3) or list(dict(model.named_children()))
            empty = path in dict(model.named_modules())
            what = "a module without parameters (num_classes=0?)" if empty else "no parameter"
            raise ValueError(f"also={path!r} names {what}; the nearest with parameters are {near}")
    trainable = {
        name for name in parameters if name in new or any(is_within(name, path) for path in also)
    }
    if not trainable:
        raise ValueError("nothing would train: attach the method first, or name parts in `also`")
    before = attachment_of(model)
    requires_grad = before.requires_grad or {
        name: parameter.requires_grad for name, parameter in parameters.items()
    }
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trainable)
    model.preproj_attachment = dataclasses.replace(before, also=also, requires_grad=requires_grad)
    return given


def refuse_compiled(model: nn.Module) -> None:
    """Raise ValueError for what `torch.compile` returned: it stands for another model."""
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ValueError(
            "this model is compiled: give the model inside (model._orig_mod), before torch.compile "
            "where the model is changed"
        )


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """`{name: parameter}` of what the method added, by the names of the model's state dict."""
    return {
        f"{path}.{name}": parameter
        for path, module in preproj_modules(model).items()
        for name, parameter in module.named_parameters()
    }


def attachment_of(model: nn.Module) -> Attachment:
    """What a model remembers; an empty one where nothing was attached."""
    return vars(unwrapped(model)).get("preproj_attachment") or Attachment()


def is_within(name: str, path: str) -> bool:
    """Whether a parameter or module is the one at `path`, or below it."""
    return name == path or name.startswith(f"{path}.")
