"""Token ids on disk, tokenised once, and the blocks of them that a model reads."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from mmpreproj.backbones.lm.lm_tokenizer import encode, number_of_ids
from mmpreproj.data.text.chat import ChatEncoder
from mmpreproj.data.text.text_sources import Piece
from mmpreproj.files import remove_folder, whole_folder

__all__ = ["IGNORE", "Mixture", "PackedDocuments", "TokenBlocks", "TokenFile", "best_fit"]
__all__ += ["tokens_of"]

IGNORE = -100  # of torch's cross-entropy: nothing is to be predicted here
BATCH_CHARACTERS, BATCH_PIECES = 1 << 21, 4096
TOKENS, ENDS, SCORED = "tokens.bin", "ends.bin", "scored.bin"
HEADER = "header.json"


class TokenFile:
    """The tokens of a split: a flat array in a file, mapped into memory where it is used.

    A folder holds `tokens.bin`, the ids as little-endian unsigned integers and nothing else;
    `ends.bin`, the number of tokens up to the end of each document; of conversations `scored.bin`,
    a byte for each token, 1 where it counts; and `header.json` with the dtype of the ids, the
    counts and what they were made from.

    Raises: ValueError if the two do not agree.
    """

    def __init__(self, folder: Path):
        self.path = folder / TOKENS
        try:
            self.header: dict[str, Any] = json.loads((folder / HEADER).read_text())
            self.dtype = np.dtype(self.header["dtype"])
            self.n_tokens: int = self.header["n_tokens"]
            size = self.path.stat().st_size
            (folder / ENDS).stat()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder} is not a cache of tokens: {error}") from error
        if size != self.n_tokens * self.dtype.itemsize:
            raise ValueError(f"{self.path} has {size} bytes, not {self.n_tokens} x {self.dtype}")

    @cached_property
    def ids(self) -> np.ndarray:
        """Shape: [n_tokens], read-only."""
        return self._mapped(TOKENS, self.dtype)

    @cached_property
    def ends(self) -> np.ndarray:
        """Shape: int64 [n_documents]."""
        return self._mapped(ENDS, np.dtype("<i8"))

    @cached_property
    def scored(self) -> np.ndarray | None:
        """Shape: bool [n_tokens]; None where all count."""
        there = self.path.with_name(SCORED).exists()
        return self._mapped(SCORED, np.dtype(bool)) if there else None

    def _mapped(self, name: str, dtype: np.dtype) -> np.ndarray:
        path = self.path.with_name(name)
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:  # a memory map would be pickled with all it maps
        maps = ("ids", "ends", "scored")
        return {name: value for name, value in self.__dict__.items() if name not in maps}


def tokens_of(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: Any,
    bos: int | None,
    eos: int | None,
    about: dict[str, Any],
    title: str = "tokens",
    total: int | None = None,
    answers: ChatEncoder | None = None,
) -> TokenFile:
    """The tokens in `folder`; if they are not there, `pieces` are tokenised into it.

    What is interrupted leaves no `folder`; of two processes that make the same, the first to end
    gives it, and the other takes that.

    Args:
        bos, eos: ids before and after each document; None: nothing.
        about: what the tokens are made from, for a person who reads the header.
        title, total: of the progress bar; how much is read in all.
        answers: what makes tokens of conversations, where there are any.
    """
    if folder.exists():
        try:
            return TokenFile(folder)
        except ValueError as error:
            warnings.warn(f"{error}; it is made again", stacklevel=2)
            remove_folder(folder)
    with whole_folder(folder) as temporary:
        with tqdm(desc=title, total=total, unit_scale=True, disable=None) as bar:
            header = _write(temporary, pieces, tokenizer, bos, eos, bar.update, answers)
        (temporary / HEADER).write_text(json.dumps(header | about, indent=1))
    return TokenFile(folder)


def _write(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: Any,
    bos: int | None,
    eos: int | None,
    told: Callable[[int], Any],
    answers: ChatEncoder | None,
) -> dict[str, Any]:
    dtype = np.dtype("<u2" if number_of_ids(tokenizer) <= 1 << 16 else "<u4")
    counts = dict.fromkeys(("n_documents", "n_tokens", "n_words", "n_bytes"), 0)
    starts, in_word = True, False
    names = (TOKENS, ENDS) if answers is None else (TOKENS, ENDS, SCORED)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "wb")) for name in names]
        for batch in _batches(pieces):
            flat: list[int] = []
            ends: list[int] = []
            scored: list[bool] = []
            written = iter(encode(tokenizer, [p.text for p in batch if p.chat is None]))
            for piece in batch:
                text, n = piece.text, len(flat)
                if piece.chat is not None:
                    ids, counted = answers(piece.chat)
                    flat += ids
                    scored += counted
                    text = tokenizer.decode(list(itertools.compress(ids, counted)), True)
                else:
                    if starts and bos is not None:
                        flat.append(bos)
                    flat.extend(next(written))
                    if piece.ends and eos is not None:
                        flat.append(eos)
                    scored += [True] * (len(flat) - n if answers else 0)
                counts["n_words"] += len(text.split())
                counts["n_words"] -= in_word and not text[:1].isspace()  # counted before
                counts["n_bytes"] += len(text.encode())
                counts["n_documents"] += piece.ends
                starts = piece.ends
                in_word = not piece.ends and not text[-1:].isspace()
                ends += [counts["n_tokens"] + len(flat)] * piece.ends
            counts["n_tokens"] += len(flat)
            arrays = np.array(flat, dtype), np.array(ends, "<i8"), np.array(scored, bool)
            for file, array in zip(files, arrays, strict=False):
                file.write(array.tobytes())
            told(sum(piece.read for piece in batch))
        for file in files:
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
        self.n_all = self._count(whole)
        self.n_blocks = self.n_all if most is None else min(most, self.n_all)
        self.n_padding = n_padding

    def _count(self, whole: bool) -> int:
        n_targets = max(self.tokens.n_tokens - 1, 0)
        return n_targets // self.block_size if whole else -(-n_targets // self.block_size)

    @property
    def n_targets(self) -> int:
        """Of the whole split."""
        scored = self.tokens.scored
        return max(self.tokens.n_tokens - 1, 0) if scored is None else int(scored[1:].sum())

    def __len__(self) -> int:
        return self.n_blocks + self.n_padding

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index %= len(self)
        item = {name: torch.zeros(self.block_size, dtype=torch.int64) for name in self.names}
        item["targets"] += IGNORE
        if index < self.n_blocks:
            at = 0
            for start, end in self._spans(index * self.n_all // self.n_blocks):
                self._fill(item, at, start, end)
                at += end - start
        return item

    names = ("input_ids", "targets")
    covers_text = True

    def _spans(self, block: int) -> list[tuple[int, int]]:
        """The input tokens of a block, as ranges of the file."""
        start = block * self.block_size
        return [(start, min(start + self.block_size, self.tokens.n_tokens - 1))]

    def _fill(self, item: dict[str, torch.Tensor], at: int, start: int, end: int) -> None:
        ids = torch.from_numpy(self.tokens.ids[start : end + 1].astype(np.int64))
        targets, scored = ids[1:], self.tokens.scored
        if scored is not None:
            counts = torch.from_numpy(scored[start + 1 : end + 1].copy())
            targets = targets.where(counts, torch.tensor(IGNORE))
        item["input_ids"][at : at + end - start] = ids[:-1]
        item["targets"][at : at + end - start] = targets


class PackedDocuments(TokenBlocks):
    """Documents side by side in blocks of T, whole where they fit, that do not see each other.

    An item also has "position_ids", int64 [T], which start at 0 with each document; from them
    transformers' models make the mask, too. Documents are laid into blocks by best fit, the longest
    first; one of more than T tokens is cut, and its parts do not see each other either. What is
    left of a block is padding without targets. Each token but the first of a document is a target
    once.
    """

    names = ("input_ids", "targets", "position_ids")

    def _count(self, whole: bool) -> int:
        ends = self.tokens.ends.astype(np.int64)
        # of n tokens n - 1 are read; the last is only predicted
        starts = np.r_[0, ends[:-1]][: len(ends)]
        lengths = np.maximum(ends - starts - 1, 0)
        n_parts = -(-lengths // self.block_size)
        inside = np.arange(n_parts.sum()) - np.repeat(n_parts.cumsum() - n_parts, n_parts)
        self.starts = np.repeat(starts, n_parts) + inside * self.block_size
        self.lengths = np.minimum(
            np.repeat(lengths, n_parts) - inside * self.block_size, self.block_size
        )
        self.blocks = best_fit(self.lengths, self.block_size)
        return len(self.blocks)

    @property
    def n_targets(self) -> int:
        if self.tokens.scored is None:
            return int(self.lengths.sum())
        return int(self.tokens.scored.sum()) - self._n_firsts

    @property
    def covers_text(self) -> bool:
        """Whether all text that counts is predicted: not the first word of a document."""
        return self.tokens.header["bos"] is not None or not self._n_firsts

    @property
    def _n_firsts(self) -> int:
        """First tokens of documents that would count, had they something before them."""
        firsts, scored = np.r_[0, self.tokens.ends[:-1]].astype(np.int64), self.tokens.scored
        return len(firsts) if scored is None else int(scored[firsts].sum())

    def _spans(self, block: int) -> list[tuple[int, int]]:
        return [(self.starts[i], self.starts[i] + self.lengths[i]) for i in self.blocks[block]]

    def _fill(self, item: dict[str, torch.Tensor], at: int, start: int, end: int) -> None:
        super()._fill(item, at, start, end)
        item["position_ids"][at:] = torch.arange(self.block_size - at)  # the padding's, behind


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Numbers of things of these lengths by the boxes of `room` that they are laid into: the
    longest first, each where the least is left."""
    boxes: list[list[int]] = []
    open_boxes: dict[int, list[list[int]]] = {}  # by what is left in them
    rooms: list[int] = []  # the keys, ascending
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            left, box = room, []
            boxes.append(box)
        else:
            left = rooms[at]
            box = open_boxes[left].pop()
            if not open_boxes[left]:
                del open_boxes[left], rooms[at]
        box.append(number)
        if left := left - length:
            if left not in open_boxes:
                bisect.insort(rooms, left)
            open_boxes.setdefault(left, []).append(box)
    return boxes


class Mixture(Dataset):
    """Blocks of several kinds in given proportions, for training.

    An epoch ends where the first of them is used up (`datasets.interleave_datasets`'s
    "first_exhausted", in whole numbers); the next one goes on in the others. Items are asked for
    as epoch * N + index (see data/loaders.py).
    """

    def __init__(self, parts: list[TokenBlocks], probabilities: Sequence[float]):
        self.parts = parts
        n = min(len(part) / p for part, p in zip(parts, probabilities, strict=True))
        self.shares = [int(n * p + 1e-9) for p in probabilities]
        self.n_blocks = sum(self.shares)

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, index = divmod(index, len(self))
        for part, share in zip(self.parts, self.shares, strict=True):
            if index < share:
                return part[(epoch * share + index) % len(part)]
            index -= share
        raise IndexError(index)
