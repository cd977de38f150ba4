"""Long texts piece by piece, cut where the tokens on both sides stay what they are.

Not under a tokenizer whose normalizer puts a "▁" before every text that it is given (Prepend, of
Llama 2, TinyLlama and Mistral 0.1): each piece but the first of a document begins with one token
"▁" too many, which is one in 128 KiB of text.

Files are read here and not by `datasets`, which holds a line or a document whole (2.3 GB for a line
of 300 MB), copies text into its cache, and names neither the file nor the byte that is not UTF-8.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from mmpreproj.data.text.table_rows import not_utf8

__all__ = ["Piece", "line_start", "stream_pieces", "string_pieces"]

PIECE_SIZE = 1 << 17  # bytes of a file, characters of a row
MAX_PIECES_GROWN = 8  # how far a piece may grow in search of a good place to cut

# Up to the last space before a letter: tokenizers that first split text into words, with the space
# before them (every byte-level BPE, SentencePiece), never join the two sides. In text without
# spaces up to the last line end between two full lines.
_PLACES = re.compile(r"(?s).*\S(?= [^\W\d_])"), re.compile(r"(?s).*\S\n(?=[^\W\d_])")


class Piece(NamedTuple):
    """Some text of a document: `ends` with its last piece. `read`: the bytes or rows that it is."""

    text: str
    ends: bool
    read: int


def stream_pieces(stream: BinaryIO, start: int, end: int, name: str) -> Iterator[Piece]:
    """Bytes [start, end) of a UTF-8 stream as a document, with LF line ends.

    Raises:
        ValueError: naming `name` and the byte, where the stream is not UTF-8 or ends too early.
    """
    return cut_blocks(_decoded(stream, start, end, name))


def string_pieces(text: str) -> Iterator[Piece]:
    """A string as a document, with LF line ends."""
    text, n = text.replace("\r\n", "\n").replace("\r", "\n"), PIECE_SIZE
    return cut_blocks((text[i : i + n], i + n >= len(text)) for i in range(0, len(text), n))


def cut_blocks(blocks: Iterable[tuple[str, int]]) -> Iterator[Piece]:
    """Pieces of about the size of the blocks that a document comes in, each with its `read`."""
    text, read = "", 0
    for block, more in blocks:
        found = (place.match(text, max(len(text) - PIECE_SIZE, 0)) for place in _PLACES)
        cut = next((match.end() for match in found if match), 0)
        if not cut and len(text) >= MAX_PIECES_GROWN * PIECE_SIZE:
            cut = len(text)  # no good place for long: anywhere between two characters
        if cut:
            yield Piece(text[:cut], False, read)
            text, read = text[cut:], 0
        text, read = text + block, read + more
    if text:
        yield Piece(text, True, read)


def _decoded(stream: BinaryIO, start: int, end: int, name: str) -> Iterator[tuple[str, int]]:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    stream.seek(start)
    while start < end:
        block = stream.read(min(PIECE_SIZE, end - start))
        if not block:
            raise ValueError(f"{name} ends at byte {start}, {end} were expected: it changed")
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=start + len(block) == end)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is {not_utf8(error, start - held)}") from error
        yield text, len(block)
        start += len(block)


def line_start(stream: BinaryIO, position: int, size: int) -> int:
    """The first start of a line at or after a position; `size` where no line starts any more."""
    if not 0 < position < size:
        return position
    at = position - 1  # a line may start at the position itself
    stream.seek(at)
    while block := stream.read(PIECE_SIZE):
        if found := re.search(rb"[\n\r]", block):
            after = at + found.end()
            stream.seek(after - 1)
            return min(after + (stream.read(2) == b"\r\n"), size)
        at += len(block)
    return size
