"""Where text comes from: files and tables, their documents, and where they can be cut.

A source has documents in a fixed order. Its `name` is a path, or what else tells a person where the
text is from; `size` counts bytes of text or rows; `digest` is of the content, equal for equal text
wherever it lies; `identity` is what tells it apart in the key of a cache. `cut(fraction)` is where
the first part of it ends, at a line's or a row's end; `pieces(start, end)` gives the text of a
range, or a ValueError with the place of what cannot be read.

A long document comes in pieces, cut where the tokens on both sides stay what they are. Not under a
tokenizer whose normalizer puts a "▁" before every text that it is given (Prepend, of Llama 2,
TinyLlama and Mistral 0.1): each piece but the first of a document begins with one token "▁" too
many, which is one in 128 KiB of text.

Text files are read here and not by `datasets`, which holds a line or a document whole (2.3 GB for a
line of 300 MB), copies text into its cache, and names neither the file nor the byte that is not
UTF-8.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from mmpreproj.data.text.chat import Chat, is_chat, text_of
from mmpreproj.data.text.table_rows import (
    BOM,
    JSON_LINES,
    Table,
    kind,
    not_utf8,
    open_bytes,
    open_table,
    scan,
    suffix,
)
from mmpreproj.messages import listed, short

__all__ = ["Column", "Piece", "Sample", "TextFile", "decoded", "find_files", "in_pieces"]
__all__ += ["line_start", "open_sources", "sample_documents"]

# What is taken from a folder. A file that is named itself may end in anything.
IN_FOLDERS = (".txt", ".text", ".md", ".rst", ".tex", ".parquet", *JSON_LINES)
PIECE_SIZE = 1 << 17  # bytes of a file, characters of a row
MAX_PIECES_GROWN = 8  # how far a piece may grow in search of a good place to cut

# Up to the last space before a letter: tokenizers that first split text into words, with the space
# before them (every byte-level BPE, SentencePiece), never join the two sides. In text without
# spaces up to the last line end between two full lines.
_PLACES = re.compile(r"(?s).*\S(?= [^\W\d_])"), re.compile(r"(?s).*\S\n(?=[^\W\d_])")


class Piece(NamedTuple):
    """Some text of a document: `ends` with its last piece. `read`: the bytes or rows that it is.
    `chat`: the conversation that the document is, where it is one."""

    text: str
    ends: bool
    read: int
    chat: Chat | None = None


class TextFile:
    """One document: the whole file, or what a split holds of it."""

    def __init__(self, path: str):
        self.name = path
        self.digest, self.size, filled = scan(path)
        self.identity = ["TextFile", self.digest, None]
        if not filled:
            raise ValueError(f"{path} is empty ({self.size} bytes, no text in them)")

    def cut(self, fraction: float) -> int:
        with open_bytes(self.name) as stream:
            return line_start(stream, int(self.size * fraction), self.size)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        with open_bytes(self.name) as stream:
            if start == 0 and stream.read(3) == BOM:
                start = 3
            yield from in_pieces(decoded(stream, start, end, self.name))


class Sample:
    """English prose that is always there, with a document for each topic; cut like a text file."""

    name = "the built-in sample (pydoc_data.topics)"
    part = 0

    def __init__(self) -> None:
        self.texts = [text.encode() for text in sample_documents()]
        self.size = sum(map(len, self.texts))
        self.digest = hashlib.blake2b(b"\0".join(self.texts), digest_size=20).hexdigest()
        self.identity = ["Sample", self.digest, None]

    def cut(self, fraction: float) -> int:
        stream = io.BytesIO(b"".join(self.texts))
        return line_start(stream, int(self.size * fraction), self.size)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        at = 0
        for text in self.texts:
            inside = text[max(start - at, 0) : max(end - at, 0)]
            at += len(text)
            if inside:
                yield Piece(inside.decode(), True, len(inside))


class Column:
    """A column of strings in a table, a document a row.

    Rows without any text count as rows, but are no documents.
    """

    def __init__(self, table: Table, text_key: str):
        self.table, self.text_key = table, text_key
        self.name, self.size, self.digest = table.name, table.size, table.digest
        self.identity = [type(table).__name__, self.digest, text_key]
        for place, row in table.rows(0, 1):  # a wrong key shows at once
            self._check(place, row)
        if not self.size:
            raise ValueError(f"{self.name} is empty: it has no rows")

    def cut(self, fraction: float) -> int:
        return int(self.size * fraction + 0.5)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        for place, row in self.table.rows(start, end, [self.text_key]):
            text = self._check(place, row).replace("\r\n", "\n").replace("\r", "\n")
            n = PIECE_SIZE
            blocks = ((text[i : i + n], i + n >= len(text)) for i in range(0, len(text), n))
            yield from in_pieces(blocks)

    def _check(self, place: str, row: dict[str, Any]) -> str:
        key = self.text_key
        if key not in row:
            found = short(sorted(map(str, row)))
            raise ValueError(
                f"{place}: no {key!r} there, found {found}; name it with text_key (or have "
                "messages, prompt and completion, or instruction and output)"
            )
        text = row[key]
        if not isinstance(text, str):
            raise ValueError(f"{place}: {key!r} is {kind(text)}, where text is expected")
        return encodable(place, text)


def encodable(place: str, text: str) -> str:
    """The text. Raises: ValueError if UTF-8 cannot hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: character {error.start} is {text[error.start]!r}, half of a surrogate "
            "pair, which UTF-8 cannot hold"
        ) from error
    return text


class Chats(Column):
    """Conversations, one a row of a table: see chat.py."""

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        for place, row in self.table.rows(start, end):
            yield Piece(self._check(place, row), True, 1, Chat(place, row))

    def _check(self, place: str, row: dict[str, Any]) -> str:
        return encodable(place, text_of(Chat(place, row)))


def _of_table(table: Table, text_key: str) -> Column:
    first = next((row for _, row in table.rows(0, 1)), {})
    return (Chats if text_key not in first and is_chat(first) else Column)(table, text_key)


Source = TextFile | Sample | Column


def open_sources(names: str | Sequence[str] | None, text_key: str) -> list[Source]:
    """The sources that files, folders, globs and "hf:NAME[:config[:split]]" stand for; `part` of
    each is the number of its name.

    Folders are searched to any depth, in the order of their names; what starts with a dot is left
    out, and so are files whose names are not those of text (IN_FOLDERS, also packed: .gz, .bz2,
    .xz), with a warning. A folder that `datasets` wrote is one source. Folders that a glob gives
    are read in the same way.

    Raises:
        FileNotFoundError: where nothing is there.
        ValueError: for an empty source, a missing column, a file that is named twice.
        ConnectionError: for a hub's data set that is neither cached nor to be reached.
    """
    if names is None:
        return [Sample()]
    sources: list[Source] = []
    seen: set[str] = set()
    for part, name in enumerate([names] if isinstance(names, str) else names):
        for path in [name] if name.startswith("hf:") else find_files(name):
            if (real := os.path.realpath(path)) in seen:
                raise ValueError(f"{path} is named twice in {names!r}")
            seen.add(real)
            table = open_table(path)
            sources.append(TextFile(path) if table is None else _of_table(table, text_key))
            sources[-1].part = part
    if not sources:
        raise ValueError(f"no text was named: {names!r}")
    return sources


def find_files(name: str) -> list[str]:
    """The files (and folders of `datasets`) that one name stands for."""
    path = os.path.expanduser(name)
    pattern = glob.has_magic(path) and not os.path.exists(path)
    found: dict[str, bool] = {}  # whether it is text
    for match in glob.glob(path, recursive=True) if pattern else [path]:
        if os.path.isdir(match):
            for file, is_text in _below(match.rstrip(os.sep) or os.sep):
                found[file] = is_text or found.get(file, False)
        elif os.path.exists(match):
            found[match] = True
    # "**" also gives what is in the folders of `datasets`
    tables = tuple(os.path.join(file, "") for file in found if os.path.isdir(file))
    found = {file: is_text for file, is_text in found.items() if not file.startswith(tables)}
    files = [file for file, is_text in found.items() if is_text]
    others = sorted(found.keys() - set(files))
    if not files and os.path.isdir(path):
        raise FileNotFoundError(
            f"no text in {path}: files of these kinds are looked for: {' '.join(IN_FOLDERS)} "
            f"(also .gz, .bz2, .xz); found {listed(others, 5) or 'no files'}"
        )
    if not files:
        raise FileNotFoundError(
            f"text {name!r}: {'no file fits the pattern' if pattern else 'no such file or folder'} "
            f"(looked for from {os.getcwd()}). Name files, folders, globs, hf:NAME for a data set "
            "of the hub, or nothing for the built-in sample"
        )
    if others:
        warnings.warn(
            f"{len(others)} files below {name!r} are left out, since their names are not those of "
            f"text, for example {others[0]!r}; name a file itself to have it read as text",
            stacklevel=2,
        )
    return sorted(files) if pattern else files


def _below(folder: str) -> Iterator[tuple[str, bool]]:
    """The files and the folders of `datasets` in a folder, and whether they are text."""
    for parent, folders, names in os.walk(folder):
        if "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= set(names):
            folders.clear()
            yield parent, True
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            yield os.path.join(parent, name), suffix(name) in IN_FOLDERS


SAME_FROM = 40  # characters; shorter paragraphs ("See also:") may repeat
SHORTEST = 200  # characters; what is left of a topic that is all in another one is no document


def sample_documents() -> list[str]:
    """The topics of pydoc, about 370,000 characters of technical English and some code.

    Some topics are parts of others, word for word: paragraphs that came before are left out, so
    that no held-out text is trained on. The order is fixed and not that of the alphabet, in which
    the held-out end would be all about types. Another Python version has a slightly different text.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = {}
    for name in sorted(topics):
        kept = []
        for paragraph in re.split(r"\n{2,}", topics[name].strip("\n")):
            key = " ".join(paragraph.split())
            if len(key) >= SAME_FROM and key in seen:
                continue
            seen.add(key)
            kept.append(paragraph)
        text = "\n\n".join(kept) + "\n"
        if len(text) >= SHORTEST:
            documents[name] = text
    order = sorted(documents, key=lambda name: hashlib.blake2b(name.encode()).digest())
    return [documents[name] for name in order]


def in_pieces(blocks: Iterable[tuple[str, int]]) -> Iterator[Piece]:
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


def decoded(stream: BinaryIO, start: int, end: int, name: str) -> Iterator[tuple[str, int]]:
    """Bytes [start, end) of a UTF-8 stream as text with LF line ends, in blocks for `in_pieces`.

    Raises:
        ValueError: naming `name` and the byte, where the stream is not UTF-8 or ends too early.
    """
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
