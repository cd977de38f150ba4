"""Blocks of tokens, with what follows each token as its target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from mmpreproj.data.text.cache import TokenFile

IGNORE = -100  # of torch's cross-entropy: nothing is to be predicted here


class TokenBlocks(Dataset):
    """A flat array of tokens in blocks of T, block i the tokens [i*T, i*T + T).

    An item is {"input_ids": int64 [T], "targets": int64 [T]}, and targets[t] is the token that
    follows input_ids[t]: they are shifted here, and by no one else.

    In training the last block is left out unless it is whole. In evaluation it is filled up with
    id 0 and targets IGNORE, so that over all blocks each token but the very first is a target
    exactly once. Items may be asked for as epoch * N + index (see data/sampling.py).
    """

    def __init__(
        self,
        tokens: TokenFile,
        block_size: int,
        whole: bool,
        n_padding: int = 0,
        most: int | None = None,
    ):
        """
        Args:
            whole: leave out a last block that is not whole, as in training.
            n_padding: blocks without targets to add at the end.
            most: use so many blocks at most, evenly spread over all.
        """
        self.tokens = tokens
        self.block_size = block_size
        n_targets = max(tokens.n_tokens - 1, 0)
        self.n_blocks = n_targets // block_size if whole else -(-n_targets // block_size)
        self.kept: np.ndarray | None = None
        if most is not None and most < self.n_blocks:
            self.kept = np.arange(most) * self.n_blocks // most
            self.n_blocks = most
        self.n_padding = n_padding

    def __len__(self) -> int:
        return self.n_blocks + self.n_padding

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index %= len(self)
        block = index if self.kept is None or index >= self.n_blocks else int(self.kept[index])
        size = self.block_size
        inputs = torch.zeros(size, dtype=torch.int64)
        targets = torch.full((size,), IGNORE, dtype=torch.int64)
        if index < self.n_blocks:
            ids = self.tokens.ids[block * size : block * size + size + 1].astype(np.int64)
            n = len(ids) - 1
            inputs[:n] = torch.from_numpy(ids[:-1])
            targets[:n] = torch.from_numpy(ids[1:])
        return {"input_ids": inputs, "targets": targets}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        return [self[index] for index in indices]
