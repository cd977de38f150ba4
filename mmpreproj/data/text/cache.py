"""Token ids on disk: tokenised once, mapped into memory, whole or not there at all."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mmpreproj.backbones.lm.lm_tokenizer import number_of_ids
from mmpreproj.data.text.pieces import Piece
from mmpreproj.data.text.tokenizers import dtype_for, encode
from mmpreproj.files import remove_folder, whole_folder

BATCH_CHARACTERS = 1 << 21
BATCH_PIECES = 4096
TOKENS = "tokens.bin"
HEADER = "header.json"


class TokenFile:
    """The tokens of a part: a flat array in a file, mapped into memory where it is used.

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
        self._ids: np.ndarray | None = None

    @property
    def ids(self) -> np.ndarray:
        """Shape: [n_tokens], read-only."""
        if self._ids is None:  # an empty file cannot be mapped
            if self.n_tokens:
                self._ids = np.memmap(self.path, dtype=self.dtype, mode="r")
            else:
                self._ids = np.empty(0, self.dtype)
        return self._ids

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ids": None}  # a memory map would be pickled with all it maps


def tokens_of(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: Any,
    bos: int | None,
    eos: int | None,
    about: dict[str, Any],
    title: str = "tokens",
) -> TokenFile:
    """The tokens in `folder`; if they are not there, `pieces` are tokenised into it.

    What is interrupted leaves no `folder`; of two processes that make the same, the first to end
    gives it, and the other takes that.

    Args:
        bos, eos: ids before and after each document; None: nothing.
        about: what the tokens are made from, for a person who reads the header.
        title: of the progress bar.
    """
    if folder.exists():
        try:
            return TokenFile(folder)
        except ValueError as error:
            warnings.warn(f"{error}; it is made again", stacklevel=2)
            remove_folder(folder)
    with whole_folder(folder) as temporary:
        header = _write(temporary / TOKENS, pieces, tokenizer, bos, eos, title)
        (temporary / HEADER).write_text(json.dumps(header | about, indent=1))
    return TokenFile(folder)


def _write(
    path: Path,
    pieces: Iterable[Piece],
    tokenizer: Any,
    bos: int | None,
    eos: int | None,
    title: str,
) -> dict[str, Any]:
    dtype = dtype_for(number_of_ids(tokenizer))
    counts = dict.fromkeys(("n_documents", "n_tokens", "n_words", "n_bytes"), 0)
    starts, in_word = True, False
    with open(path, "wb") as file, _progress(title) as told:
        for batch in _batches(pieces):
            texts = [piece.text for piece in batch]
            flat: list[int] = []
            for piece, ids in zip(batch, encode(tokenizer, texts), strict=True):
                if starts and bos is not None:
                    flat.append(bos)
                flat.extend(ids)
                if piece.ends and eos is not None:
                    flat.append(eos)
                words = len(piece.text.split())
                if in_word and not piece.text[:1].isspace():
                    words -= 1  # the word was counted with the piece before
                counts["n_words"] += words
                counts["n_bytes"] += len(piece.text.encode())
                counts["n_documents"] += piece.ends
                starts = piece.ends
                in_word = not piece.ends and not piece.text[-1:].isspace()
            counts["n_tokens"] += len(flat)
            file.write(np.array(flat, dtype=dtype).tobytes())
            told(batch[-1].done)
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


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """A function that takes the part done, 0 to 1; on a terminal it moves a bar."""
    try:
        from rich.console import Console
        from rich.progress import Progress, TimeRemainingColumn
    except ImportError:
        yield lambda done: None
        return
    console = Console(file=sys.stderr)
    columns = [*Progress.get_default_columns()[:-1], TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda done: bar.update(task, completed=done)
