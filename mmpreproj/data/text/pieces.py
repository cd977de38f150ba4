"""Long texts piece by piece, cut where the tokens on both sides stay what they are.

Not under a tokenizer whose normalizer puts a "▁" before every text that it is given (Prepend, of
Llama 2, TinyLlama and Mistral 0.1): each piece but the first of a document begins with one token
"▁" too many, which is one in 128 KiB of text.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

PIECE_BYTES = 1 << 17
MAX_PIECES_GROWN = 8  # how far a piece may grow in search of a good place to cut
BOM = b"\xef\xbb\xbf"
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

# Before a space and a letter: tokenizers that first split text into words, with the space before
# them (every byte-level BPE, SentencePiece), never join the two sides. After a line end between two
# full lines for text without spaces. C2, E1, E2 and E3 begin Unicode's spaces.
_LETTER = rb"[A-Za-z\x80-\xc1\xc3-\xe0\xe4-\xff]"
_WORD = re.compile(rb"[!-~\x80-\xff](?= " + _LETTER + rb")")
_LINE = re.compile(rb"(?<=[!-~\xb0-\xff])(?:\r\n|\n|\r)(?=" + _LETTER + rb")")


class Piece(NamedTuple):
    """Some text of a document: `ends` with its last piece. `done`: the part of the source read."""

    text: str
    ends: bool
    done: float


@contextmanager
def open_bytes(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its name ends in .gz, .bz2 or .xz.

    Raises: ValueError if a packed file cannot be unpacked.
    """
    opener = OPENERS.get(Path(path).suffix.lower())
    if opener is None:
        with open(path, "rb") as stream:
            yield stream
        return
    try:
        with opener(path, "rb") as stream:
            yield stream
    except FileNotFoundError:
        raise
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from error


def text_pieces(stream: BinaryIO, start: int, end: int, name: str) -> Iterator[tuple[str, int]]:
    """The text of bytes [start, end) of a UTF-8 stream with LF line ends, and how far it was read.

    Pieces have about PIECE_BYTES bytes. They end before a word; where there is none for long, at
    a line end; where there is none either, anywhere between two characters.

    Raises:
        ValueError: naming `name` and the byte, where the stream is not UTF-8 or ends too early.
    """
    stream.seek(start)
    buffer, at, left = b"", start, end - start
    while left > 0:
        block = stream.read(min(PIECE_BYTES, left))
        if not block:
            raise ValueError(f"{name} ends at byte {end - left}, {end} were expected: it changed")
        buffer, left = buffer + block, left - len(block)
        cut = _cut(buffer) if left else len(buffer)
        if cut:
            yield _decoded(buffer[:cut], at, name), at + cut
            buffer, at = buffer[cut:], at + cut


def split_text(text: str, name: str) -> Iterator[str]:
    """The same for a string at hand, which has to be one that UTF-8 can hold.

    Raises:
        ValueError: naming `name`, for half a surrogate pair.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: character {error.start} is {text[error.start]!r}, half of a surrogate pair, "
            "which UTF-8 cannot hold"
        ) from error
    return (piece for piece, _ in text_pieces(io.BytesIO(data), 0, len(data), name))


def line_start(stream: BinaryIO, position: int, size: int) -> int:
    """The first start of a line at or after a position; `size` where no line starts any more."""
    if position <= 0:
        return 0
    at = position - 1  # a line may start at the position itself
    stream.seek(at)
    while block := stream.read(PIECE_BYTES):
        found = re.search(rb"[\n\r]", block)
        if found:
            after = at + found.end()
            stream.seek(after - 1)
            return min(after + (stream.read(2) == b"\r\n"), size)
        at += len(block)
    return size


def _cut(buffer: bytes) -> int:
    """Where to cut a buffer that goes on; 0: read more first."""
    for pattern in (_WORD, _LINE):
        last = None
        for last in pattern.finditer(buffer, max(len(buffer) - PIECE_BYTES, 0)):  # noqa: B007
            pass  # only the last one is wanted
        if last is not None:
            return last.end()
    if len(buffer) < MAX_PIECES_GROWN * PIECE_BYTES:
        return 0
    cut = len(buffer) - 1
    while cut > 1 and (buffer[cut] & 0xC0 == 0x80 or buffer[cut - 1 : cut + 1] == b"\r\n"):
        cut -= 1  # not inside a character
    return cut


def _decoded(data: bytes, offset: int, name: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset "
            f"{offset + error.start} ({error.reason}). Convert it first, for example with "
            "iconv -f latin1 -t utf-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
