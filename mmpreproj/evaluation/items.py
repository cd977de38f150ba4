"""Evaluation items from local files or the hub: LAMBADA, HellaSwag, PIQA and others of their form.

Files: JSON lines (.jsonl, .json, .ndjson, also .gz, .bz2, .xz) and .parquet, with columns as
llm-foundry has them or as the hub's data sets do; a folder of `datasets.save_to_disk`;
"hf:NAME:CONFIG:SPLIT". No data set's own code is run.

| columns | what becomes of them |
|---|---|
| context, continuation | as they stand, with one space between (below) |
| text | LAMBADA: the last word, and the space before it, is the continuation |
| query, choices, gold | as they stand; gold is the index of the right choice |
| ctx_a, ctx_b (or ctx), activity_label, endings, label | HellaSwag, cleaned as the harness does |
| goal, sol1, sol2, label | PIQA: "Question: GOAL\\nAnswer:" and the two solutions |

Between a context and what follows stands `delimiter`, one space, unless white space is there
already: the context ends with it, or the continuation begins with it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

HUB = "hf:"
_JSON = (".jsonl", ".json", ".ndjson")
_PACKED = (".gz", ".bz2", ".xz")

Row = Mapping[str, Any]
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class LambadaItem:
    """A passage and the word that ends it."""

    context: str
    continuation: str

    def pair(self) -> tuple[str, str]:
        return self.context, self.continuation


@dataclasses.dataclass(frozen=True)
class ChoiceItem:
    """A question, its choices, and the index of the right one.

    Args:
        choices: without the delimiter: their length is what scores are normalised by.
        delimiter: what stands between the context and a choice.
    """

    context: str
    choices: tuple[str, ...]
    gold: int
    delimiter: str = " "

    def pairs(self) -> list[tuple[str, str]]:
        return [
            (self.context, _delimited(self.context, choice, self.delimiter))
            for choice in self.choices
        ]


def read_lambada(source: str | Path, delimiter: str = " ") -> list[LambadaItem]:
    """LAMBADA items of a file, a folder or the hub.

    Raises:
        FileNotFoundError: no such file.
        ConnectionError: a hub name, without the hub.
        ValueError: naming file and line, of what is not such an item; or there are none.
    """

    def item(row: Row) -> LambadaItem:
        if "continuation" in row:
            context, continuation = _texts(row, "context", "continuation")
            continuation = _delimited(context, continuation, delimiter)
        else:
            (text,) = _texts(row, "text")
            context, space, word = text.rstrip("\n").rpartition(" ")
            continuation = space + word
        if not continuation.strip():
            raise ValueError("its continuation is empty")
        return LambadaItem(context, continuation)

    return _read(source, item, "context and continuation, or text")


def read_choices(source: str | Path, delimiter: str = " ") -> list[ChoiceItem]:
    """Multiple-choice items of a file, a folder or the hub.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: as `read_lambada`; also where the right
            choice is not known (the hub's test parts) or not among the choices.
    """

    def item(row: Row) -> ChoiceItem:
        if "endings" in row:
            context, choices, gold = _hellaswag(row)
        elif "sol1" in row:
            goal, *choices = _texts(row, "goal", "sol1", "sol2")
            context, gold = f"Question: {goal}\nAnswer:", row["label"]
        else:
            (context,) = _texts(row, "query")
            choices, gold = row["choices"], row["gold"]
        choices = list(choices)
        if len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
            raise ValueError(f"at least two choices that are not empty are needed, found {choices}")
        if isinstance(gold, bool) or not re.fullmatch(r"\d+", str(gold)):
            raise ValueError(f"the index of the right choice is {gold!r} (a part without answers?)")
        if int(gold) >= len(choices):
            raise ValueError(f"the right choice is {gold}, but there are {len(choices)} (from 0)")
        return ChoiceItem(context, tuple(choices), int(gold), delimiter)

    columns = "query, choices and gold; HellaSwag's ctx, endings and label; or PIQA's goal, sol1, "
    return _read(source, item, columns + "sol2 and label")


def _hellaswag(row: Row) -> tuple[str, list[str], Any]:
    if "ctx_a" in row:
        first, second = _texts(row, "ctx_a", "ctx_b")
        context = f"{first} {second.capitalize()}"
    else:
        (context,) = _texts(row, "ctx")
    if row.get("activity_label"):
        context = f"{row['activity_label']}: {context}"
    return _clean(context), [_clean(ending) for ending in row["endings"]], row["label"]


def _clean(text: str) -> str:
    """WikiHow's marks out of a HellaSwag text, in the harness's order."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _delimited(context: str, continuation: str, delimiter: str) -> str:
    """The continuation behind the delimiter, unless white space parts the two already."""
    if not context or context[-1].isspace() or continuation[:1].isspace():
        return continuation
    return delimiter + continuation


def _texts(row: Row, *names: str) -> list[str]:
    for name in names:
        if not isinstance(row[name], str):
            raise ValueError(f"{name!r} must be text, found {row[name]!r}")
    return [row[name] for name in names]


def _read(source: str | Path, make: Callable[[Row], Item], columns: str) -> list[Item]:
    items = []
    for place, row in _rows(str(source)):
        try:
            items.append(make(row))
        except KeyError as error:
            raise ValueError(
                f"{place}: no {error.args[0]!r} among {sorted(row)}; the columns are {columns}"
            ) from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place}: {error}") from error
    if not items:
        raise ValueError(f"{source} holds no items")
    return items


def _rows(source: str) -> Iterator[tuple[str, Row]]:
    """Rows of a source, each with the place to name in an error."""
    if source.startswith(HUB):
        if len(source.removeprefix(HUB).split(":")) < 3:  # nobody means the training part
            raise ValueError(
                f"{source!r}: say which part, as {HUB}NAME:CONFIG:SPLIT, such as {HUB}NAME::test"
            )
        from mmpreproj.data.text.hub import hub_dataset

        yield from _table(source, hub_dataset(source))
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {str(path)!r}; give a .jsonl or .parquet file, a folder of "
            f"datasets.save_to_disk, or {HUB}NAME:CONFIG:SPLIT for a data set of the hub"
        )
    suffixes = [s for s in path.suffixes if s not in _PACKED]
    if path.is_dir():
        yield from _table(source, _saved(path))
    elif path.suffix == ".parquet":
        yield from _table(source, _parquet(path))
    elif suffixes and suffixes[-1] in _JSON:
        yield from _json_lines(path)
    else:
        raise ValueError(f"{str(path)!r} is none of {', '.join(_JSON)} (or these .gz, …), .parquet")


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are such
                raise ValueError(f"{place}: not JSON in UTF-8 ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: one JSON object a line is expected")
            yield place, row


def _open(path: Path) -> AbstractContextManager[BinaryIO]:
    if path.suffix not in _PACKED:
        return open(path, "rb")
    from mmpreproj.data.text.pieces import open_bytes

    return open_bytes(path)


def _table(source: str, rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


def _parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("parquet needs pyarrow: pip install 'mmpreproj[text]'") from error
    try:
        return parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a parquet file ({error})") from error


def _saved(folder: Path) -> Any:
    """What `datasets.save_to_disk` wrote."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{folder} needs datasets: pip install 'mmpreproj[text]'") from error
    found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.DatasetDict):
        raise ValueError(
            f"{folder} holds several data sets; name the one that is meant: "
            f"{', '.join(str(folder / split) for split in sorted(found))}"
        )
    return found
