"""The self-attentions of a model at paths that the user gives, with what can be read of them."""

from __future__ import annotations

import dataclasses
import re

from torch import nn

from mmpreproj.architectures import Found, Site, starred
from mmpreproj.blocks import read_block
from mmpreproj.messages import nearest
from mmpreproj.preproj import PreProjConfig

__all__ = ["by_hand"]


def by_hand(model: nn.Module, config: PreProjConfig) -> Found:
    """The sites by stack and block, for paths with stars that the user gave."""
    modules = dict(model.named_modules())
    found = Found()
    for attention, join in zip(config.attentions, config.joins, strict=True):
        pattern = re.compile(re.escape(attention).replace(r"\*", r"(\d+)"))
        matches = [match for match in map(pattern.fullmatch, modules) if match]
        if not matches:
            near = nearest(attention.replace("*", "0"), modules, cutoff=0.3)
            raise ValueError(f"attention={attention!r} matches no module; the nearest are {near}")
        for match in matches:
            path = match.string
            block = path[: match.end(len(match.groups()))]
            behind = None if join is None else _filled(join, match.groups())
            if behind is not None and behind not in modules:
                raise ValueError(f"join={join!r} matches no module: there is no {behind!r}")
            blocks = found.stacks.setdefault(block.rpartition(".")[0], {})
            held = blocks.setdefault(block, [])
            held.append(_given(modules, block, path, behind, len(held)))
    return found


def _filled(path: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        path = path.replace("*", number, 1)
    return path


def _given(
    modules: dict[str, nn.Module], block: str, attention: str, join: str | None, rank: int
) -> Site:
    """A site at paths by hand, with what can be read of it.

    Raises:
        ValueError: if it can be read that the branch is scaled behind the path that was given, or
            that the attention's width changes.
    """
    inner = [path.removeprefix(f"{block}.") for path in modules if path.startswith(f"{attention}.")]
    rules, left = read_block(modules[block], [attention.removeprefix(f"{block}."), *inner])
    for each in left:
        if f"{block}.{each.attention}" == attention and "channels and returns" in each.why:
            raise ValueError(f"{attention!r} cannot take the method: {each.why}")
    for rule in rules:
        site = dataclasses.replace(rule.under(f"{block}."), rank=rank)
        if site.attention == attention:
            if join is None and site.join is not None:
                raise ValueError(
                    f"attention={starred(attention)!r}: its branch is scaled or normed before it "
                    f"is added to the residual stream. Give join={starred(site.join)!r} too, or "
                    "no paths at all: this block can be read"
                )
            same = join == site.join
            return site if same else Site(attention, block, join, reads=rule.reads, rank=rank)
    return Site(attention, block, join, rank=rank)
