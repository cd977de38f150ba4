"""Rotary embeddings whose frequencies follow the longest row of a batch.

transformers' dynamic NTK scaling and LongRoPE take one set of frequencies for a whole batch, by its
longest row, and dynamic scaling keeps the longest that it has seen. What a row gives then depends
on the others, unless rows of one length are read together and what was seen is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def length_dependent(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of that kind in a model of transformers."""
    return [module for module in model.modules() if _follows_length(module)]


def forget_length(embeddings: Iterable[nn.Module]) -> None:
    """The next batch sets the frequencies anew, whatever was read before."""
    for module in embeddings:
        for name in vars(module):
            if name.endswith("max_seq_len_cached"):
                setattr(module, name, 0)


def _follows_length(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]  # by layer type in Gemma 3
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)
