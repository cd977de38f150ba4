"""Where text comes from: files and data sets, their documents, and the parts held out of them."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from mmpreproj.data.text.pieces import (
    BOM,
    OPENERS,
    Piece,
    line_start,
    open_bytes,
    split_text,
    text_pieces,
)
from mmpreproj.data.text.sample import sample_documents

JSON_LINES = (".jsonl", ".ndjson", ".json")
# What is taken from a folder. A file that is named itself may end in anything.
IN_FOLDERS = (".txt", ".text", ".md", ".rst", ".tex", ".parquet", *JSON_LINES)
SAMPLE = "the built-in sample (pydoc_data.topics)"


class Source(Protocol):
    """Documents in a fixed order. `size` counts bytes of text or rows; parts are ranges of it."""

    name: str
    """A path, or what else tells a person where the text is from."""
    size: int
    digest: str
    """Of the content: equal for equal text wherever it lies."""

    def cut(self, fraction: float) -> int:
        """Where the first `fraction` of the source ends: at a line's or a row's end."""

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The text of that range. Raises: ValueError with the place of what cannot be read."""


class TextFile:
    """One document: the whole file, or what a part holds of it."""

    def __init__(self, path: str):
        self.name = path
        self.digest, self.size, _, blank = _scan(path)
        if blank:
            raise ValueError(f"{path} is empty ({self.size} bytes, no text in them)")

    def cut(self, fraction: float) -> int:
        if fraction >= 1.0:
            return self.size
        with open_bytes(self.name) as stream:
            return line_start(stream, int(self.size * fraction), self.size)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        with open_bytes(self.name) as stream:
            if start == 0 and stream.read(3) == BOM:
                start = 3
            for text, at in text_pieces(stream, start, end, self.name):
                yield Piece(text, at == end, (at - start) / (end - start))


class Rows:
    """Base of the sources that are tables: a document a row, the text in one column of strings.

    Rows without any text count as rows, but are no documents.
    """

    name: str
    size: int
    text_key: str

    def cut(self, fraction: float) -> int:
        return int(self.size * fraction + 0.5)

    def rows(self, start: int, end: int) -> Iterator[tuple[str, Any]]:
        """(the place of the row, for messages; its text) of these rows."""
        raise NotImplementedError

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        for i, (place, text) in enumerate(self.rows(start, end)):
            if not isinstance(text, str):
                raise ValueError(
                    f"{place}: {self.text_key!r} is {_kind(text)}, where text is expected"
                )
            done = (i + 1) / (end - start)
            pieces = iter(split_text(text, place))
            piece = next(pieces, None)
            while piece is not None:
                following = next(pieces, None)
                yield Piece(piece, following is None, done)
                piece = following


class JsonLines(Rows):
    """A file with one JSON object a line; blank lines are passed over."""

    def __init__(self, path: str, text_key: str):
        self.name, self.text_key = path, text_key
        self.digest, _, self.size, blank = _scan(path)
        if blank:
            raise ValueError(f"{path} is empty: no lines of JSON")
        next(self.rows(0, 1))  # a wrong key shows at once

    def rows(self, start: int, end: int) -> Iterator[tuple[str, Any]]:
        row = 0
        with open_bytes(self.name) as stream:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    line = line.removeprefix(BOM)
                if not line.strip():
                    continue
                if row >= end:
                    return
                if row >= start:
                    place = f"{self.name}, line {number}"
                    yield place, self._text(line, place)
                row += 1

    def _text(self, line: bytes, place: str) -> Any:
        try:
            item = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start} of "
                f"the line ({error.reason})"
            ) from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not JSON: {error}. One object a line is read") from error
        if not isinstance(item, dict):
            raise ValueError(f"{place} is {_kind(item)}; an object with {self.text_key!r} is read")
        if self.text_key not in item:
            raise ValueError(_no_column(place, self.text_key, item))
        return item[self.text_key]


class ParquetFile(Rows):
    """A column of a parquet file."""

    def __init__(self, path: str, text_key: str):
        self.name, self.text_key = path, text_key
        parquet = _import("pyarrow.parquet", f"to read {path}")
        try:
            file = parquet.ParquetFile(path)
        except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
            raise ValueError(f"{path} cannot be read as parquet: {error}") from error
        with file:
            columns = file.schema_arrow.names
            self.groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        if text_key not in columns:
            raise ValueError(_no_column(path, text_key, columns))
        self.size = sum(self.groups)
        if not self.size:
            raise ValueError(f"{path} is empty: it has no rows")
        self.digest = _scan(path, unpack=False)[0]

    def rows(self, start: int, end: int) -> Iterator[tuple[str, Any]]:
        ends = list(itertools.accumulate(self.groups))
        wanted = [g for g, n in enumerate(self.groups) if ends[g] > start and ends[g] - n < end]
        row = ends[wanted[0]] - self.groups[wanted[0]] if wanted else end
        parquet = _import("pyarrow.parquet", f"to read {self.name}")
        with parquet.ParquetFile(self.name) as file:
            for batch in file.iter_batches(1024, row_groups=wanted, columns=[self.text_key]):
                for text in batch.column(0).to_pylist():
                    if start <= row < end:
                        yield f"{self.name}, row {row}", text
                    row += 1


class HFDataset(Rows):
    """A column of a data set of Hugging Face's library, which maps it into memory."""

    def __init__(self, dataset: Any, name: str, text_key: str, salt: str = ""):
        """salt: tells apart data sets that are different rows of the same files."""
        self.name, self.text_key, self.dataset = name, text_key, dataset
        if text_key not in dataset.column_names:
            raise ValueError(_no_column(name, text_key, dataset.column_names))
        self.size = len(dataset)
        if not self.size:
            raise ValueError(f"{name} is empty: it has no rows")
        total = hashlib.blake2b(f"{self.size} {salt}".encode(), digest_size=20)
        for file in dataset.cache_files:
            total.update(_scan(file["filename"], unpack=False)[0].encode())
        self.digest = total.hexdigest()

    def rows(self, start: int, end: int) -> Iterator[tuple[str, Any]]:
        column = self.dataset.with_format(None).select_columns([self.text_key])
        row = start
        for batch in column.select(range(start, end)).iter(batch_size=1024):
            for text in batch[self.text_key]:
                yield f"{self.name}, row {row}", text
                row += 1


class Sample:
    """The built-in sample. Cut at a line's end like a text file, with a document for each topic."""

    name = SAMPLE

    def __init__(self) -> None:
        self.texts = [text.encode() for text in sample_documents()]
        self.size = sum(map(len, self.texts))
        self.digest = hashlib.blake2b(b"\0".join(self.texts), digest_size=20).hexdigest()

    def cut(self, fraction: float) -> int:
        position = int(self.size * fraction)
        found = b"".join(self.texts).find(b"\n", max(position - 1, 0))
        return self.size if found < 0 or fraction >= 1.0 else found + 1 if position else 0

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        at = 0
        for text in self.texts:
            inside = text[max(start - at, 0) : max(end - at, 0)]
            at += len(text)
            if inside:
                done = (min(at, end) - start) / (end - start)
                yield Piece(inside.decode(), True, done)


def open_sources(names: str | Sequence[str] | None, text_key: str) -> list[Source]:
    """The sources that files, folders, globs and "hf:NAME[:config[:split]]" stand for.

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
    paths: list[str] = []
    for name in [names] if isinstance(names, str) else list(names):
        if name.startswith("hf:"):
            from mmpreproj.hub_cache import hub_dataset

            sources.append(HFDataset(hub_dataset(name), name, text_key, salt=name))
            continue
        for path in find_files(name):
            real = os.path.realpath(path)
            if real in paths:
                raise ValueError(f"{path} is named twice in {names!r}")
            paths.append(real)
            sources.append(_open(path, text_key))
    if not sources:
        raise ValueError(f"no text was named: {names!r}")
    return sources


def find_files(name: str) -> list[str]:
    """The files (and folders of `datasets`) that one name stands for."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        files, others = _below(path)
        if not files:
            raise FileNotFoundError(
                f"no text in {path}: files of these kinds are looked for: {' '.join(IN_FOLDERS)} "
                f"(also .gz, .bz2, .xz); found {others[:5] or 'no files'}"
            )
        _tell_left_out(name, others)
        return files
    if os.path.exists(path):
        return [path]
    files = _matched(path) if glob.has_magic(path) else []
    if not files:
        kind = "no file fits the pattern" if glob.has_magic(path) else "no such file or folder"
        raise FileNotFoundError(
            f"text {name!r}: {kind} (looked for from {os.getcwd()}). Name files, folders, globs, "
            "hf:NAME for a data set of the hub, or nothing for the built-in sample"
        )
    return files


def _matched(pattern: str) -> list[str]:
    """What a glob gives, in the order of the paths: files, and those of the folders."""
    found = glob.glob(pattern, recursive=True)
    files = {path for path in found if not os.path.isdir(path)}
    others: set[str] = set()
    for folder in set(found) - files:
        kept, left_out = _below(folder.rstrip(os.sep) or os.sep)
        files.update(kept)
        others.update(left_out)
    # "**" also gives what is in the folders of `datasets`
    tables = tuple(os.path.join(path, "") for path in files if os.path.isdir(path))
    files = {path for path in files if not path.startswith(tables)}
    _tell_left_out(pattern, sorted(others - files))
    return sorted(files)


def _below(folder: str) -> tuple[list[str], list[str]]:
    """Text files and folders of `datasets` in a folder, and the files that are neither."""
    files, others = [], []
    for parent, folders, names in os.walk(folder):
        if "dataset_dict.json" in names:
            raise ValueError(
                f"{parent} holds several data sets; name the one that is meant: "
                f"{', '.join(os.path.join(parent, split) for split in sorted(folders))}"
            )
        if {"state.json", "dataset_info.json"} <= set(names):
            folders.clear()
            files.append(parent)
            continue
        folders[:] = sorted(n for n in folders if not n.startswith("."))
        for name in sorted(n for n in names if not n.startswith(".")):
            kept = _suffix(name) in IN_FOLDERS
            (files if kept else others).append(os.path.join(parent, name))
    return files, others


def _tell_left_out(name: str, files: Sequence[str]) -> None:
    if files:
        warnings.warn(
            f"{len(files)} files below {name!r} are left out, since their names are not those "
            f"of text, for example {files[0]!r}; name a file itself to have it read as text",
            stacklevel=3,
        )


def _open(path: str, text_key: str) -> Source:
    if os.path.isdir(path):
        datasets = _import("datasets", f"to read {path}")
        return HFDataset(datasets.load_from_disk(path), path, text_key)
    suffix = _suffix(path)
    if suffix == ".parquet":
        return ParquetFile(path, text_key)
    return JsonLines(path, text_key) if suffix in JSON_LINES else TextFile(path)


def _suffix(path: str) -> str:
    """Of the file's name in lower case, without that of the packing."""
    name = Path(path)
    if name.suffix.lower() in OPENERS:
        name = name.with_suffix("")
    return name.suffix.lower()


def _scan(path: str, unpack: bool = True) -> tuple[str, int, int, bool]:
    """One pass over a file: digest of its bytes, their number, lines with something on them, and
    whether there are none."""
    digest = hashlib.blake2b(digest_size=20)
    size = n_lines = 0
    filled = False  # the line that the last block broke off in has something on it
    with open_bytes(path) if unpack else open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
            if unpack:
                lines = (block if size else block.removeprefix(BOM)).split(b"\n")
                for i, line in enumerate(lines):
                    filled = bool(line.strip()) or (filled and i == 0)
                    n_lines += filled and i < len(lines) - 1
            size += len(block)
    n_lines += filled
    return f"{size}-{digest.hexdigest()}", size, n_lines, n_lines == 0


def _kind(value: Any) -> str:
    return "missing (null)" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _no_column(place: str, key: str, found: Any) -> str:
    return f"{place}: no {key!r} there, found {sorted(map(str, found))}; name it with text_key"


def _import(name: str, why: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{why} {name.split('.')[0]} is needed: pip install 'mmpreproj[text]'"
        ) from error
