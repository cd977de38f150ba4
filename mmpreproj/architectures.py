"""What is known of a self-attention, and the blocks that cannot be read.

What a block's forward does is read off its source (`mmpreproj.blocks`). This table, keyed by the
class of the block, is for those whose forward says too little. A row's sites are in order of
execution, by path, so that a cross-attention of the same class is never taken.
"""

from __future__ import annotations

import dataclasses
import inspect

from torch import nn

__all__ = ["BLOCKS", "Site", "SiteRule", "class_name", "rules_of"]


@dataclasses.dataclass(frozen=True)
class Site:
    """A self-attention, or an MLP. Paths are relative to its block; once found, to the model.

    Args:
        attention: the module that takes x̂ and returns the attention branch, or a tuple that starts
            with it.
        block: the transformer block that holds it.
        join: the module where the skip joins the branch, where it cannot be added to the
            attention's output: whatever drops the branch of a sample there drops its skip too.
        join_output: the skip is added to the output of `join`, not to its input.
        divisor: the skip is divided by it, since the block multiplies what it joins by it.
        carried: the skip joins what `join` reads of the residual stream, and what the block returns
            as well.
        normed: whether the attention reads norm(x). Otherwise x̂ is the block's input.
        norm: the module that makes x̂, where one does.
        moved: the tokens are moved about between x̂ and `join`, so that the skip is computed from
            x̂ as `norm` (None: the block's input) gives it, in the order of the residual stream.
        channels_first: x̂ is a map [B, D, ...], not tokens [..., D].
        reads: the arguments that x̂ comes in as, by place and name; empty: the first one.
        reader: a module that reads x̂ in the attention, for its width.
        readers: where the attention's module adds the residual as well, the projections that read
            x̃ in the place of x̂; all else in it keeps x̂.
        rank: its place among the sites of its block, in order of execution.
        mlp: `attention` is the path of the block's MLP, which gets a pre-projection alone.
    """

    attention: str
    block: str = ""
    join: str | None = None
    join_output: bool = False
    divisor: float = 1.0
    carried: bool = False
    normed: bool = True
    norm: str | None = None
    moved: bool = False
    channels_first: bool = False
    reads: tuple[tuple[int, str], ...] = ()
    reader: str | None = None
    readers: tuple[str, ...] = ()
    rank: int = 0
    mlp: bool = False

    def under(self, prefix: str) -> Site:
        """The same with `prefix` before every path: "layers.0.", say, or nothing."""
        paths = {
            name: prefix + getattr(self, name)
            for name in ("attention", "join", "norm", "reader")
            if getattr(self, name) is not None
        }
        readers = tuple(prefix + reader for reader in self.readers)
        block = f"{prefix}{self.block}".rstrip(".")
        return dataclasses.replace(self, block=block, readers=readers, **paths)


SiteRule = Site  # as rows of BLOCKS are called


# Divided space-time has a temporal attention too, which comes first. The skip of the class token is
# averaged over the frames with its attention: it is the same in each.
_TIMESFORMER = (
    Site("temporal_attention", join="temporal_dense", join_output=True),
    Site("attention"),
)

# Block class -> its self-attentions, in order of execution.
BLOCKS: dict[str, tuple[Site, ...]] = {
    "transformers.models.timesformer.modeling_timesformer.TimesformerLayer": _TIMESFORMER,
}


def rules_of(block: nn.Module) -> tuple[Site, ...] | None:
    """The table's row for a block, or None.

    A subclass counts as its known base class as long as it runs that class's forward. Decorators
    do not count: transformers wraps the forward of every subclass anew.
    """
    for cls in type(block).__mro__:
        rules = BLOCKS.get(class_name(cls))
        if rules is not None and _forward(type(block)) is _forward(cls):
            return tuple(rule for rule in rules if hasattr(block, rule.attention))
    return None


def _forward(cls: type) -> object:
    return inspect.unwrap(cls.forward)


def class_name(cls: type) -> str:
    """A class as the table names it: its module and its name."""
    return f"{cls.__module__}.{cls.__qualname__}"
