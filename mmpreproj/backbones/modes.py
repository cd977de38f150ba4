"""Modes of a model: evaluating for a while, split over processes; in transformers' models,
recomputing activations, and rotary frequencies whatever the precision."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from torch import nn

__all__ = ["evaluating", "exact_frequencies", "is_sharded", "set_checkpointing", "train_blocks"]

# Fields of a configuration by which some blocks drop out by themselves, instead of by a module
_DROPOUT = ("dropout", "hidden_dropout", "attention_dropout", "activation_dropout")


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards each module as it was: parts of a frozen model train alone."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def exact_frequencies(model: nn.Module) -> Iterator[None]:
    """For a change of dtype: transformers' rotary frequencies keep theirs, as in from_pretrained.

    In half precision, far positions would be taken for others.
    """
    before = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    yield
    for module, name, buffer in before:
        now = getattr(module, name)
        if now.dtype != buffer.dtype:
            setattr(module, name, buffer.to(now.device))


def set_checkpointing(model: nn.Module, enable: bool = True) -> None:
    """Keep only the inputs of blocks in training, and compute the rest again (non-reentrant: a
    frozen embedding in front does not cut the gradient off).

    Args:
        model: a transformers model, or a module that holds one.
    """
    from transformers import PreTrainedModel

    inner = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    # named so from transformers 5.24 on; the older names warn there
    kind = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"
    if enable:
        getattr(inner, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(inner, f"{kind}_checkpointing_disable")()


def train_blocks(model: nn.Module) -> None:
    """Let checkpointing work in blocks that stay in eval mode, as a frozen model's do.

    transformers asks a block's own `training`. Dropout and drop path are modules of their own in
    most, and stay as they are.

    Raises:
        ValueError: where blocks drop out by their own `training` (OPT, Falcon), at a rate above 0.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if not isinstance(module, GradientCheckpointingLayer) or not module.gradient_checkpointing:
            continue
        for holder, name in itertools.product((module, getattr(module, "config", None)), _DROPOUT):
            rate = getattr(holder, name, None)
            if isinstance(rate, float) and rate > 0:
                raise ValueError(
                    f"grad_checkpointing of a frozen {type(module).__name__} would switch its "
                    f"dropout on ({name}={rate}); leave grad_checkpointing off"
                )
        module.training = True


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are split over processes."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
