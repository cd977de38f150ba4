"""Rows of JSON lines, CSV, parquet and the data sets of Hugging Face, each with its place for
messages.

JSON lines are read here and not by `datasets`, which names neither the file nor the line of what is
no JSON, and copies what it reads into its cache.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import itertools
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mmpreproj.files import parse_json
from mmpreproj.hub_cache import hub_dataset
from mmpreproj.messages import about, listed, need

__all__ = ["Delimited", "HFDataset", "JsonLines", "ParquetFile", "Table", "open_bytes"]
__all__ += ["open_table"]

JSON_LINES = (".jsonl", ".ndjson", ".json")
BOM = b"\xef\xbb\xbf"
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
Rows = Iterator[tuple[str, dict[str, Any]]]


class Table:
    """Base of what has rows. `digest`: of the content, equal for equal rows wherever they lie."""

    name: str
    size: int
    digest: str

    def rows(self, start: int = 0, end: int | None = None, columns: Any = None) -> Rows:
        """(place, row) of a range of rows; of these columns, where others cost time to read."""
        raise NotImplementedError


class JsonLines(Table):
    """A file with one JSON object a line; blank lines are passed over."""

    def __init__(self, path: str):
        self.name = path
        self.digest, _, self.size = scan(path, lines=True)

    def rows(self, start: int = 0, end: int | None = None, columns: Any = None) -> Rows:
        with open_bytes(self.name) as stream:
            lines = enumerate((line.removeprefix(BOM) for line in stream), 1)
            filled = ((number, line) for number, line in lines if line.strip())
            for number, line in itertools.islice(filled, start, end):
                place = f"{self.name}, line {number}"
                try:
                    row = parse_json(line.decode(), place)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{place} is {not_utf8(error, of=' of the line')}") from error
                except ValueError as error:
                    raise ValueError(f"{error}. One object a line") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{place} is {kind(row)}, where an object is expected")
                yield place, row


class ArrowFile(Table):
    """Base of files that pyarrow reads, in batches of rows."""

    kind: str

    def rows(self, start: int = 0, end: int | None = None, columns: Any = None) -> Rows:
        with about(self.name, f"cannot be read as {self.kind}"):
            rows = (row for batch in self._batches(columns) for row in batch.to_pylist())
            for number, row in enumerate(itertools.islice(rows, start, end), start):
                yield f"{self.name}, row {number}", row

    def _batches(self, columns: Any) -> Iterator[Any]:
        raise NotImplementedError


class ParquetFile(ArrowFile):
    """A parquet file."""

    kind = "parquet"

    def __init__(self, path: str):
        self.name = path
        with about(path, "cannot be read as parquet"), self._open() as file:
            self.size = file.metadata.num_rows
        self.digest = scan(path)[0]

    def _batches(self, columns: Any) -> Iterator[Any]:
        with self._open() as file:
            yield from file.iter_batches(256, columns=columns)

    def _open(self) -> Any:
        return need("pyarrow.parquet", self.name, "text").ParquetFile(self.name)


class Delimited(ArrowFile):
    """A CSV file, or TSV by its name, whose first line names the columns; all cells are text."""

    kind = "CSV with a first line of column names"

    def __init__(self, path: str):
        self.name = path
        self.digest = scan(path)[0]
        self.size = sum(1 for _ in self.rows())

    def _batches(self, columns: Any) -> Iterator[Any]:
        csv = need("pyarrow.csv", self.name, "text")
        by = "\t" if suffix(self.name) == ".tsv" else ","
        cells = csv.ParseOptions(delimiter=by, newlines_in_values=True)
        with open_bytes(self.name) as stream:
            names = csv.open_csv(stream, parse_options=cells).schema.names
        text = dict.fromkeys(names, "string")
        how = csv.ConvertOptions(column_types=text, include_columns=columns)
        with open_bytes(self.name) as stream:
            yield from csv.open_csv(stream, parse_options=cells, convert_options=how)


class HFDataset(Table):
    """A data set of Hugging Face's library, which maps it into memory."""

    def __init__(self, dataset: Any, name: str, salt: str = ""):
        """salt: tells apart data sets that are different rows of the same files."""
        self.name, self.dataset, self.size = name, dataset, len(dataset)
        total = hashlib.blake2b(f"{self.size} {salt}".encode(), digest_size=20)
        for file in dataset.cache_files:
            total.update(scan(file["filename"])[0].encode())
        self.digest = total.hexdigest()

    def rows(self, start: int = 0, end: int | None = None, columns: Any = None) -> Rows:
        dataset = self.dataset.select_columns(columns) if columns else self.dataset
        chosen = dataset.select(range(start, self.size if end is None else end))
        batches = chosen.with_format("arrow").iter(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start):
            yield f"{self.name}, row {number}", row


def open_table(name: str) -> Table | None:
    """The table that a path or "hf:NAME[:config[:split]]" stands for; None for any other file.

    Raises: ValueError for a file that is not what its name says, and as `hub_dataset`.
    """
    if name.startswith("hf:"):
        return HFDataset(hub_dataset(name), name, salt=name)
    if os.path.isdir(name):
        datasets = need("datasets", name, "text")
        with about(name, "cannot be read as a data set of Hugging Face's library"):
            dataset = datasets.load_from_disk(name)
        if isinstance(dataset, dict):
            one = listed(os.path.join(name, split) for split in sorted(dataset))
            raise ValueError(f"{name} holds several data sets; name the one that is meant: {one}")
        return HFDataset(dataset, name)
    kinds = {".parquet": ParquetFile, ".csv": Delimited, ".tsv": Delimited}
    kinds |= dict.fromkeys(JSON_LINES, JsonLines)
    opened = kinds.get(suffix(name))
    return opened and opened(name)


@contextmanager
def open_bytes(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its name ends in .gz, .bz2 or .xz.

    Raises: ValueError if a packed file cannot be unpacked.
    """
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    try:
        with opener(path, "rb") as stream:
            yield stream
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        if opener is open or isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} cannot be unpacked: {error}") from error


def suffix(path: str) -> str:
    """Of the file's name in lower case, without that of the packing."""
    name = Path(path)
    return (name.with_suffix("") if name.suffix.lower() in OPENERS else name).suffix.lower()


def scan(path: str, lines: bool = False) -> tuple[str, int, int]:
    """Digest of a file's bytes, their number, and its blocks (or lines) with something on them."""
    digest, size, filled = hashlib.blake2b(digest_size=20), 0, 0
    with open_bytes(path) as stream:
        for block in stream if lines else iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
            size += len(block)
            filled += bool(block.removeprefix(BOM).strip())
    return f"{size}-{digest.hexdigest()}", size, filled


def kind(value: Any) -> str:
    """What a value is, for a message."""
    return "missing (null)" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def not_utf8(error: UnicodeDecodeError, offset: int = 0, of: str = "") -> str:
    """What to say of bytes that are not UTF-8; `offset`: where what was decoded begins."""
    return (
        f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset + error.start}{of} "
        f"({error.reason}). Convert it first, for example with iconv -f latin1 -t utf-8"
    )
