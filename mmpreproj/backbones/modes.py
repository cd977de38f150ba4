"""Eval mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


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
