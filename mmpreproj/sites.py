"""Where the self-attentions of a model are, and where their skips join the residual stream.

The table is keyed by the class of the transformer block, not by the model: whatever is built from a
known block is supported, under whichever head it stands. A block's row says where its
self-attention is and what stands between that attention and the residual add. Where something
scales or norms the branch there (LayerScale, a norm behind attention), a skip added at the
attention's output would be scaled too, which is not the method; it joins at a later module, behind
the scale.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator

from torch import nn

from mmpreproj.preproj import PreProjConfig


@dataclasses.dataclass(frozen=True)
class SiteRule:
    """One self-attention within a block, as paths relative to the block.

    Args:
        attention: the module that takes x̂ as its first argument or as `hidden_states`, and returns
            the attention branch (or a tuple that starts with it).
        join: the module to whose input the skip is added, where it cannot be added to the
            attention's output: whatever drops the branch of a sample there drops its skip too.
        scaled_by: the block's attribute that scales the branch between the two. Where a block has
            none of it (None or Identity), the skip is added to the attention's output. None means
            that the branch is always changed on its way, so the skip always joins at `join`.
        normed: whether the attention reads norm(x). Otherwise (post-norm) x̂ is the block's input.
    """

    attention: str
    join: str | None = None
    scaled_by: str | None = None
    normed: bool = True

    def join_of(self, block: nn.Module) -> str | None:
        """The path of the module where this block's skip joins; None is the attention's output."""
        if self.join is not None and self.scaled_by is not None:
            scale = getattr(block, self.scaled_by, None)
            if scale is None or isinstance(scale, nn.Identity):
                return None
        return self.join


_LAYER_SCALE_PARAMETER = (SiteRule("attn", join="drop_path1", scaled_by="gamma_1"),)
_POST_NORM = (SiteRule("attn", join="drop_path1", normed=False),)

# Block class -> its self-attentions, in order of execution.
BLOCKS: dict[str, tuple[SiteRule, ...]] = {
    # ViT, DeiT, DeiT III, DINOv2, SigLIP, CLIP, hybrid and NaFlex ViTs
    "timm.models.vision_transformer.Block": (SiteRule("attn", join="drop_path1", scaled_by="ls1"),),
    "timm.models.vision_transformer.ResPostBlock": _POST_NORM,
    # EVA, EVA-02, DINOv3, Perception Encoder, every vit_*_rope_*
    "timm.models.eva.EvaBlock": _LAYER_SCALE_PARAMETER,
    "timm.models.eva.EvaBlockPostNorm": _POST_NORM,
    "timm.models.beit.Block": _LAYER_SCALE_PARAMETER,
}


@dataclasses.dataclass(frozen=True)
class Site:
    """One self-attention of a model, with qualified paths."""

    block: str
    attention: str
    join: str | None
    normed: bool


def rules_of(block: nn.Module) -> tuple[SiteRule, ...] | None:
    """The table's row for a block, or None.

    A subclass counts as its known base class as long as it runs that class's forward.
    """
    for cls in type(block).__mro__:
        rules = BLOCKS.get(f"{cls.__module__}.{cls.__qualname__}")
        if rules is not None and type(block).forward is cls.forward:
            return rules
    return None


def find_sites(model: nn.Module, config: PreProjConfig) -> list[Site]:
    """The self-attentions of `model` that `config` asks for, in order of execution.

    Raises:
        ValueError: if the architecture is unknown, a path matches nothing, or `config.layers` names
            a block that does not exist.
    """
    if config.attention is None:
        stacks = _known_stacks(model)
    else:
        stacks = [_stack_by_hand(model, config.attention, config.join)]
    sites: list[Site] = []
    for blocks in stacks:
        for index in _chosen(config.layers, len(blocks)):
            sites.extend(blocks[index])
    return sites


def block_sites(block: nn.Module) -> list[Site]:
    """The self-attentions of one block, with paths relative to it. Raises as `find_sites`."""
    rules = rules_of(block)
    if rules is None:
        raise ValueError(_unknown(block))
    return _sites(block, "", rules)


def _sites(block: nn.Module, path: str, rules: tuple[SiteRule, ...]) -> list[Site]:
    def absolute(relative: str | None) -> str | None:
        return relative if relative is None or not path else f"{path}.{relative}"

    return [
        Site(path, absolute(rule.attention), absolute(rule.join_of(block)), rule.normed)
        for rule in rules
    ]


def _known_stacks(model: nn.Module) -> list[list[list[Site]]]:
    """The sites by stack and block, for blocks that the table knows."""
    stacks: dict[str, list[list[Site]]] = {}
    for path, module in model.named_modules():
        rules = rules_of(module)
        if rules is not None:
            parent = path.rpartition(".")[0]
            stacks.setdefault(parent, []).append(_sites(module, path, rules))
    if not stacks:
        raise ValueError(_unknown(model))
    return list(stacks.values())


def _stack_by_hand(model: nn.Module, attention: str, join: str | None) -> list[list[Site]]:
    """The sites by block, for paths with a * that the user gave."""
    names = [name for name, _ in model.named_modules()]
    pattern = re.compile(re.escape(attention).replace(r"\*", r"(\d+)"))
    numbers = [match[1] for match in map(pattern.fullmatch, names) if match]
    if not numbers:
        near = difflib.get_close_matches(attention.replace("*", "0"), names, n=3, cutoff=0.3)
        raise ValueError(f"attention={attention!r} matches no module; the nearest are {near}")
    stack = []
    for number in numbers:
        attention_path = attention.replace("*", number)
        join_path = None if join is None else join.replace("*", number)
        if join_path is not None and join_path not in names:
            raise ValueError(f"join={join!r} matches no module: there is no {join_path!r}")
        block = attention[: attention.index("*") + 1].replace("*", number)
        stack.append([Site(block, attention_path, join_path, normed=True)])
    return stack


def _chosen(layers: tuple[int, ...] | None, depth: int) -> list[int]:
    """Block numbers from 0, ascending. Raises ValueError on a wrong one, or one named twice."""
    if layers is None:
        return list(range(depth))
    wrong = [layer for layer in layers if not -depth <= layer < depth]
    if wrong:
        raise ValueError(
            f"layers={list(layers)}: there is no block {wrong[0]} in a stack of {depth}; "
            f"use 0 to {depth - 1}, or -{depth} to -1 from the end"
        )
    chosen = sorted({layer % depth for layer in layers})
    if len(chosen) < len(layers):
        raise ValueError(f"layers={list(layers)} names a block of this stack of {depth} twice")
    return chosen


def _unknown(model: nn.Module) -> str:
    """What to say of a model without a known block."""
    found = sorted(set(_repeated_classes(model)) or {_class_name(model)})
    known: dict[str, list[str]] = {}
    for name in BLOCKS:
        known.setdefault(name.rpartition(".")[2], []).append(name)
    near = {
        name
        for cls in found
        for short in difflib.get_close_matches(cls.rpartition(".")[2], known, n=3)
        for name in known[short]
    }
    nearest = sorted(near or BLOCKS)
    return (
        f"{type(model).__name__} has no transformer block that is known here. Its repeated blocks "
        f"are {', '.join(found)}; the nearest known ones are {', '.join(nearest)}. Give the paths "
        "by hand: PreProjConfig(attention='path.to.blocks.*.attn', join=None or the module behind "
        "the branch's scale, such as 'path.to.blocks.*.drop_path1')"
    )


def _repeated_classes(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            classes = {_class_name(child) for child in module}
            if len(classes) == 1 and any(module[0].children()):
                yield classes.pop()


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
