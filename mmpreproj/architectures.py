"""The architectures that are known: where a block's self-attention is, and where its skip joins.

The table is keyed by the class of the transformer block, not by the model: whatever is built from a
known block is supported, under whichever head it stands, and nothing of timm's or transformers' own
classes is imported. A block's row says where its self-attention is (by path, so that a
cross-attention of the same class is never taken) and what stands between that attention and the
residual add. Where something scales or norms the branch there (LayerScale, a norm behind
attention), a skip added at the attention's output would be scaled too, which is not the method: it
joins at a later module, behind the scale.
"""

from __future__ import annotations

import dataclasses
import inspect

from torch import nn

__all__ = ["BLOCKS", "SiteRule", "class_name", "rules_of"]


@dataclasses.dataclass(frozen=True)
class SiteRule:
    """One self-attention within a block, as paths relative to the block.

    Args:
        attention: the module that takes x̂ as its first argument or as `hidden_states`, and returns
            the attention branch (or a tuple that starts with it).
        join: the module where the skip joins the branch, where it cannot be added to the
            attention's output: whatever drops the branch of a sample there drops its skip too.
        join_output: the skip is added to the output of `join`, not to its input.
        scaled_by: the block's attribute that scales the branch between the two. Where a block has
            none of it (None or Identity), the skip is added to the attention's output. None means
            that the branch is always changed on its way, so the skip always joins at `join`.
            Without a `join` it is a number: the skip is divided by it at the attention's output.
        normed: whether the attention reads norm(x), or the block's attribute that says so.
            Otherwise (post-norm) x̂ is the block's input.
        only_with: the block's attribute without which it does not have this attention.
    """

    attention: str
    join: str | None = None
    join_output: bool = False
    scaled_by: str | None = None
    normed: bool | str = True
    only_with: str | None = None
    divisor: float = 1.0
    carried: bool = False
    norm: str | None = None
    moved: bool = False
    reads: tuple[tuple[int, str], ...] = ()
    reader: str | None = None


# Divided space-time has a temporal attention too, which comes first. The skip of the class token is
# averaged over the frames with its attention: it is the same in each.
_TIMESFORMER = (
    SiteRule(
        "temporal_attention",
        join="temporal_dense",
        join_output=True,
        only_with="temporal_attention",
    ),
    SiteRule("attention"),
)

# Block class -> its self-attentions, in order of execution.
BLOCKS: dict[str, tuple[SiteRule, ...]] = {
    "transformers.models.timesformer.modeling_timesformer.TimesformerLayer": _TIMESFORMER,
}


def rules_of(block: nn.Module) -> tuple[SiteRule, ...] | None:
    """The table's row for a block, or None.

    A subclass counts as its known base class as long as it runs that class's forward. Decorators
    do not count: transformers wraps the forward of every subclass anew.
    """
    for cls in type(block).__mro__:
        rules = BLOCKS.get(class_name(cls))
        if rules is not None and _forward(type(block)) is _forward(cls):
            return tuple(
                rule for rule in rules if rule.only_with is None or hasattr(block, rule.only_with)
            )
    return None


def _forward(cls: type) -> object:
    return inspect.unwrap(cls.forward)


def class_name(cls: type) -> str:
    """A class as the table names it: its module and its name."""
    return f"{cls.__module__}.{cls.__qualname__}"
