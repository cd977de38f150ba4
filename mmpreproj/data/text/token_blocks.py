"""Token ids on disk, tokenised once, and the blocks of them that a model reads."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from mmpreproj.backbones.lm.lm_tokenizer import encode, number_of_ids
from mmpreproj.data.text.text_sources import Piece
from mmpreproj.files import remove_folder, whole_folder

__all__ = ["IGNORE", "TokenBlocks", "TokenFile", "tokens_of"]

IGNORE = -100  # of torch's cross-entropy: nothing is to be predicted here
BATCH_CHARACTERS, BATCH_PIECES = 1 << 21, 4096
TOKENS = "tokens.bin"
HEADER = "header.json"


class TokenFile:
    """The tokens of a split: a flat array in a file, mapped into memory where it is used.

    A folder holds `tokens.bin`, the ids as little-endian unsigned integers and nothing else, and
    `header.json` with their dtype, the counts and what they were made from.

    Raises: ValueError if the two do not agree.
    """

    def __init__(self, folder: Path):
        self.path = folder / TOKENS
        try:
            self.header: dict[str, Any] = json.loads((folder / HEADER).read_text())
            self.dtype = np.dtype(self.header["dtype"])
            self.n_tokens: int = self.header["n_tokens"]
            size = self.path.stat().st_size
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} is not a cache of tokens: {error}") from error
        if size != self.n_tokens * self.dtype.itemsize:
            raise ValueError(f"{self.path} has {size} bytes, not {self.n_tokens} x {self.dtype}")

    @cached_property
    def ids(self) -> np.ndarray:
        """Shape: [n_tokens], read-only."""
        if not self.n_tokens:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:  # a memory map would be pickled with all it maps
        return {name: value for name, value in self.__dict__.items() if name != "ids"}


def tokens_of(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: Any,
    bos: int | None,
    eos: int | None,
    about: dict[str, Any],
    title: str = "tokens",
    total: int | None = None,
) -> TokenFile:
    """The tokens in `folder`; if they are not there, `pieces` are tokenised into it.

    What is interrupted leaves no `folder`; of two processes that make the same, the first to end
    gives it, and the other takes that.

    Args:
        bos, eos: ids before and after each document; None: nothing.
        about: what the tokens are made from, for a person who reads the header.
        title, total: of the progress bar; how much is read in all.
    """
    if folder.exists():
        try:
            return TokenFile(folder)
        except ValueError as error:
            warnings.warn(f"{error}; it is made again", stacklevel=2)
            remove_folder(folder)
    with whole_folder(folder) as temporary:
        with tqdm(desc=title, total=total, unit_scale=True, disable=None) as bar:
            header = _write(temporary / TOKENS, pieces, tokenizer, bos, eos, bar.update)
        (temporary / HEADER).write_text(json.dumps(header | about, indent=1))
    return TokenFile(folder)


def _write(
    path: Path,
    pieces: Iterable[Piece],
    tokenizer: Any,
    bos: int | None,
    eos: int | None,
    told: Callable[[int], Any],
) -> dict[str, Any]:
    dtype = np.dtype("<u2" if number_of_ids(tokenizer) <= 1 << 16 else "<u4")
    counts = dict.fromkeys(("n_documents", "n_tokens", "n_words", "n_bytes"), 0)
    starts, in_word = True, False
    with open(path, "wb") as file:
        for batch in _batches(pieces):
            flat: list[int] = []
            for piece, ids in zip(batch, encode(tokenizer, [p.text for p in batch]), strict=True):
                if starts and bos is not None:
                    flat.append(bos)
                flat.extend(ids)
                if piece.ends and eos is not None:
                    flat.append(eos)
                counts["n_words"] += len(piece.text.split())
                counts["n_words"] -= in_word and not piece.text[:1].isspace()  # counted before
                counts["n_bytes"] += len(piece.text.encode())
                counts["n_documents"] += piece.ends
                starts = piece.ends
                in_word = not piece.ends and not piece.text[-1:].isspace()
            counts["n_tokens"] += len(flat)
            file.write(np.array(flat, dtype=dtype).tobytes())
            told(sum(piece.read for piece in batch))
        file.flush()
        os.fsync(file.fileno())  # or the rename may reach the disk first
    return {"dtype": dtype.str, **counts, "bos": bos, "eos": eos}


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Enough at a time for the tokenizer to use all processors, little enough for any memory."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class TokenBlocks(Dataset):
    """A flat array of tokens in blocks of T, block i the tokens [i*T, i*T + T).

    An item is {"input_ids": int64 [T], "targets": int64 [T]}, and targets[t] is the token that
    follows input_ids[t]: they are shifted here, and by no one else.

    In training the last block is left out unless it is whole. In evaluation it is filled up with
    id 0 and targets IGNORE, so that over all blocks each token but the very first is a target
    exactly once. Items may be asked for as epoch * N + index (see data/loaders.py).
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
        self.n_all = n_targets // block_size if whole else -(-n_targets // block_size)
        self.n_blocks = self.n_all if most is None else min(most, self.n_all)
        self.n_padding = n_padding

    def __len__(self) -> int:
        return self.n_blocks + self.n_padding

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index %= len(self)
        inputs = torch.zeros(self.block_size, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORE)
        if index < self.n_blocks:
            start = index * self.n_all // self.n_blocks * self.block_size
            ids = torch.from_numpy(self.tokens.ids[start:][: self.block_size + 1].astype(np.int64))
            inputs[: len(ids) - 1], targets[: len(ids) - 1] = ids[:-1], ids[1:]
        return {"input_ids": inputs, "targets": targets}
