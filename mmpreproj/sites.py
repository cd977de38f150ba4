"""Finding the self-attentions of a model, and where their skips join the residual stream.

What each known block looks like stands in `mmpreproj.architectures`; paths that the user gave are
found here as well.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator

from torch import nn

from mmpreproj.architectures import BLOCKS, SiteRule, class_name, rules_of
from mmpreproj.preproj import PreProjConfig


@dataclasses.dataclass(frozen=True)
class Site:
    """One self-attention of a model, with qualified paths.

    Without a `join` the skip is added to the attention's output, divided by `divisor`; with one, to
    the input of that module, or to its output where `join_output` says so.
    """

    block: str
    attention: str
    join: str | None = None
    join_output: bool = False
    divisor: float = 1.0
    normed: bool = True


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
    return [_site(block, path, rule) for rule in rules]


def _site(block: nn.Module, path: str, rule: SiteRule) -> Site:
    prefix = f"{path}." if path else ""
    join, divisor = rule.join, 1.0
    if rule.scaled_by is not None:
        scale = getattr(block, rule.scaled_by, None)
        if join is None:
            divisor = float(scale)
            if divisor == 0:
                raise ValueError(f"{prefix}{rule.scaled_by} is 0, which turns the attention off")
        elif scale is None or isinstance(scale, nn.Identity):
            join = None
    return Site(
        block=path,
        attention=prefix + rule.attention,
        join=None if join is None else prefix + join,
        join_output=join is not None and rule.join_output,
        divisor=divisor,
        normed=getattr(block, rule.normed) if isinstance(rule.normed, str) else rule.normed,
    )


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


def order_of_execution(model: nn.Module) -> dict[str, int]:
    """The rank of each attention's path among those in known blocks; blocks run as they stand."""
    paths = [
        f"{path}.{rule.attention}" if path else rule.attention
        for path, module in model.named_modules()
        for rule in rules_of(module) or ()
    ]
    return {path: rank for rank, path in enumerate(paths)}


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
        stack.append([Site(block, attention_path, join_path)])
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
    found = sorted(set(_repeated_classes(model)) or {class_name(type(model))})
    nearest = sorted(
        {name for cls in found for name in difflib.get_close_matches(cls, BLOCKS, n=3, cutoff=0)}
    )
    return (
        f"{type(model).__name__} has no transformer block that is known here. Its repeated blocks "
        f"are {', '.join(found)}; the nearest known ones are {', '.join(nearest)}. Give the paths "
        "by hand: PreProjConfig(attention='path.to.blocks.*.attn', join=None or the module behind "
        "the branch's scale, such as 'path.to.blocks.*.drop_path1')"
    )


def _repeated_classes(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            classes = {class_name(type(child)) for child in module}
            if len(classes) == 1 and any(module[0].children()):
                yield classes.pop()
