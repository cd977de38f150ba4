"""The loss of a language model without ever holding all of its logits.

A step of 2,048 tokens and 49,152 rows has 403 MB of logits in float32, and as much again for their
gradient: more than many a model. They are made a piece at a time here, with their gradient, and
given up again; only the gradients of the hidden states and, where it trains, of the head stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmpreproj.backbones.lm.lm_head import LMHead, hidden_states, lm_head_of
from mmpreproj.backbones.modes import is_sharded

__all__ = ["head_loss", "lm_loss", "through_forward", "whole_loss"]

IGNORED = -100

# Logits held at a time: 64 MiB in float32. On a CPU, forward and backward of 2,048 rows of width
# 576 at 49,152 classes took 0.80 of the time with all logits in pieces of 256 rows (about these),
# 0.83 in pieces of 128 and 1.18 in those of 32 that LinearCrossEntropyOptions() picks by itself; in
# bfloat16, by the function below, 0.72 of the time of the model's own loss.
_LOGITS = 2**24


def lm_loss(
    model: nn.Module,
    input_ids: Tensor,
    targets: Tensor,
    attention_mask: Tensor | None = None,
    head: LMHead | None = None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Negative log-likelihood of `targets`: a sum, in nats.

    Args:
        model: any model that `lm_head_of` takes. What it adds to its own loss beside the
            cross-entropy (the balance of a mixture of experts) is not in here.
        input_ids: [B, T].
        targets: [B, T], the token *after* each input (nothing is shifted here), -100 for none.
        position_ids: [B, T], which start at 0 with each document, where documents are not to see
            each other; None: a row is one text.
        head: of the model, where it is known already.

    Returns:
        The sum, differentiable (float32, or float64 for a float64 model), and how many targets it
        is of.

    Raises:
        ValueError: if the shapes differ, or the model's head is not known.
    """
    if input_ids.shape != targets.shape:
        raise ValueError(
            f"targets {list(targets.shape)} must have the shape of input_ids "
            f"{list(input_ids.shape)}: one, already shifted, for each input"
        )
    head = head or lm_head_of(model)
    hidden = hidden_states(model, input_ids, attention_mask, position_ids=position_ids)
    return head_loss(head, hidden, targets)


def head_loss(head: LMHead, hidden: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """`lm_loss` from hidden states [..., D] and targets [...]; rows without one cost nothing."""
    targets = targets.reshape(-1)
    hidden = hidden.reshape(targets.numel(), -1)
    keep = targets != IGNORED
    n = int(keep.sum())
    if n < targets.numel():
        hidden, targets = hidden[keep], targets[keep]
    if n == 0:  # a sum of nothing that still has a gradient: zeros
        exact = torch.promote_types(_compute_dtype(head.weight), torch.float32)
        return hidden.sum().to(exact) * 0.0, 0
    return whole_loss(head, hidden, targets), n


def whole_loss(head: LMHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """`head_loss` of rows [N, D] that all have a target."""
    n, weight, bias = len(targets), head.weight, head.bias
    dtype = _compute_dtype(weight)
    exact = torch.promote_types(dtype, torch.float32)
    # Two pieces at least: small batches are not to hold all logits either.
    rows = math.ceil(n / max(2, math.ceil(n * weight.shape[0] / _LOGITS)))
    with torch.autocast(weight.device.type, enabled=False):
        if head.soft_cap is None and dtype == exact and hasattr(F, "linear_cross_entropy"):
            hidden = hidden.to(dtype)
            if head.multiplier != 1.0:  # m (W h + b) = W (m h) + m b
                hidden = hidden * head.multiplier
                bias = None if bias is None else bias * head.multiplier
            nll = F.linear_cross_entropy(
                hidden,
                weight.to(dtype),
                targets,
                linear_bias=bias,
                reduction="sum",
                ignore_index=IGNORED,
                options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows),
            )
            return nll
        # Older versions of torch lack linear_cross_entropy. It has no soft cap, and sums the losses
        # of half-precision inputs in half precision: 2,048 rows in bfloat16 came out 1.8 % off.
        how = ((dtype, exact), (head.multiplier, head.soft_cap), rows, torch.is_grad_enabled())
        return _ChunkedNLL.apply(hidden, weight, bias, targets, *how)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Of the head's matrix product: autocast's where that is on, else the weight's."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


class _ChunkedNLL(torch.autograd.Function):
    """Cross-entropy of a head's logits, summed; gradients are made in forward, piece by piece.

    The matrix products run in the first of `dtypes`, everything between them in the second.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtypes: tuple[torch.dtype, torch.dtype],
        scale: tuple[float, float | None],
        rows: int,
        training: bool,
    ) -> Tensor:
        dtype, exact = dtypes
        needed = [training and need for need in ctx.needs_input_grad[:3]]
        matrix = weight.to(dtype)
        offset = torch.zeros((), dtype=dtype, device=weight.device)
        offset = offset if bias is None else bias.to(dtype)
        grads = [
            torch.zeros_like(tensor) if need else None
            for tensor, need in zip((hidden, weight, bias), needed, strict=True)
        ]
        # Held through all pieces: fresh memory of this size costs a CPU a tenth of the time.
        logits = hidden.new_empty(rows, len(weight), dtype=dtype)
        probabilities = hidden.new_empty(rows, len(weight), dtype=exact)
        nll = hidden.new_zeros((), dtype=exact)
        for start in range(0, len(hidden), rows):
            piece = slice(start, min(start + rows, len(hidden)))
            x, y = hidden[piece].to(dtype), targets[piece, None]
            z, p = logits[: len(x)], probabilities[: len(x)]
            torch.addmm(offset, x, matrix.t(), out=z)
            scaled, slope = _scaled(z, exact, *scale)
            torch.softmax(scaled, -1, dtype=exact, out=p)
            # -log p[y], by way of the largest p, which cannot underflow
            top, index = scaled.max(-1, keepdim=True)
            log_sum = top.to(exact) - p.gather(1, index).log()
            nll += (log_sum - scaled.gather(1, y)).sum()
            if not any(needed):
                continue
            p.scatter_add_(1, y, p.new_full(y.shape, -1.0))  # the gradient of the scaled logits
            if slope is not None:
                p *= slope
            if grads[2] is not None:
                grads[2] += p.sum(0)
            grad_logits = p if dtype == exact else z.copy_(p)
            if grads[0] is not None:
                grads[0][piece] = grad_logits @ matrix
            if grads[1] is not None:
                grads[1] += grad_logits.t() @ x
            del scaled, slope  # before the next piece makes its own
        ctx.save_for_backward(*grads)
        return nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return (*grads, None, None, None, None, None)


def _scaled(
    logits: Tensor, exact: torch.dtype, multiplier: float, cap: float | None
) -> tuple[Tensor, Tensor | float | None]:
    """The logits behind multiplier and soft cap, and their derivative where it is not 1.

    Logits that are `exact` already are overwritten.
    """
    if multiplier == 1.0 and cap is None:
        return logits, None
    scaled = logits.to(exact).mul_(multiplier)
    if cap is None:
        return scaled, multiplier
    scaled.div_(cap).tanh_()
    slope = scaled.square().neg_().add_(1).mul_(multiplier)
    return scaled.mul_(cap), slope


def through_forward(
    model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """function(*args, **kwargs) in the place of the model's forward.

    A sharded model gathers the weights that no block holds (the output layer's, say) for the length
    of its forward alone.
    """
    if not is_sharded(model):
        return function(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        del model.forward
        return function(*args, **kwargs)

    model.forward = forward
    return model(*args, **kwargs)
