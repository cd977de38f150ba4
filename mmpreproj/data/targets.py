"""Marks carried by the targets of evaluation batches.

Evaluation must count every item of a split exactly once, whatever the number of processes and
however many files turn out to be unreadable. A batch is (pixels, targets) and nothing else, so what
is special about an item travels in its target:

    t >= 0    class t
    t == -1   padding, added so that every process has equally many items; never counted
    t <= -2   an item of class -2 - t that could not be read; counted, and wrong, but left out of
              the loss
"""

import torch

__all__ = ["PADDING", "decode", "unreadable"]

PADDING = -1


def unreadable(true_class: int | torch.Tensor) -> int | torch.Tensor:
    """The target of an item of class `true_class` that could not be read: -2 - true_class."""
    return -2 - true_class


def decode(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits marked targets into what they say.

    Shape: targets int64 [B] -> true_class int64 [B], readable bool [B], counted bool [B].
    `true_class` of padding is 0, so that it can be used as an index before it is masked out.
    """
    readable = targets >= 0
    counted = targets != PADDING
    true_class = torch.where(readable, targets, -2 - targets).clamp_min(0)
    return true_class, readable, counted
