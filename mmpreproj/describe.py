"""What attach would do to a model, before anything is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from mmpreproj.architectures import Left, Site, starred
from mmpreproj.preproj import PreProjConfig
from mmpreproj.sites import chosen, find

__all__ = ["Description", "describe", "table"]


@dataclasses.dataclass(frozen=True)
class Description:
    """The self-attentions that get the method, and what is left out. Printed, it is a table.

    Args:
        sites: in order of execution within each stack; see `mmpreproj.architectures.Site`.
        left: attentions that cannot take it, each with the reason.
        without: by stack, the blocks that have no self-attention, with their class.
        sentences: what is left out, in words.
    """

    sites: tuple[Site, ...]
    left: tuple[Left, ...]
    without: dict[str, dict[str, str]]
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], int] = {}
        for site in self.sites:
            row = (starred(site.attention), starred(x_hat_of(site)), starred(join_of(site)))
            rows[row] = rows.get(row, 0) + 1
        body = [(row[0], str(number), *row[1:]) for row, number in rows.items()]
        return "\n".join([*table(("self-attention", "sites", "x̂", "skip"), body), *self.sentences])


def describe(model: nn.Module, config: PreProjConfig | None = None) -> Description:
    """Where `attach(model, config)` would put the method, and why not elsewhere.

    The model is left as it is, and may carry the method already.

    Raises:
        ValueError: as `attach`, where no self-attention can take it, or a path matches nothing.
    """
    config = config or PreProjConfig()
    found = find(model, config)
    sites = tuple(chosen(found, config))
    return Description(sites, tuple(found.left), found.without, tuple(found.told()))


def x_hat_of(site: Site) -> str:
    """Where x̂ comes from, in words."""
    if site.normed:
        return site.norm or "a norm"
    return "the block's input"


def join_of(site: Site) -> str:
    """Where the skip joins, in words."""
    if site.mlp:
        joins = "none: it is an MLP"
    elif site.join is None:
        joins = "its output"
    elif site.carried:
        joins = f"the stream that {site.join} reads"
    else:
        joins = f"the {'output' if site.join_output else 'input'} of {site.join}"
    return joins if site.divisor == 1 else f"{joins}, divided by {site.divisor:g}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table with columns of one width."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
