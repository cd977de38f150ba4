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
| question, choices (text, label), answerKey | ARC: "Question: QUESTION\\nAnswer:" and the texts |

Between a context and what follows stands `delimiter`, one space. Behind a HellaSwag, PIQA or ARC
item's it always does, as in the harness; elsewhere not where white space is there already: the
context ends with it, or the continuation begins with it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mmpreproj.messages import short

__all__ = ["ChoiceItem", "LambadaItem", "read_choices", "read_lambada"]

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
        always: it does so beside white space, too.
    """

    context: str
    choices: tuple[str, ...]
    gold: int
    delimiter: str = " "
    always: bool = False

    def pairs(self) -> list[tuple[str, str]]:
        join = (self.context, self.delimiter, self.always)
        return [(self.context, _behind(choice, *join)) for choice in self.choices]


def read_lambada(source: str | Path, delimiter: str = " ") -> list[LambadaItem]:
    """LAMBADA items of a file, a folder or the hub.

    Raises:
        FileNotFoundError: no such file.
        ConnectionError: a hub name, without the hub.
        ValueError: naming file and line, of what is not such an item; or there are none.
    """

    def item(row: Row) -> LambadaItem:
        if "continuation" in row:
            context, continuation = _text(row, "context"), _text(row, "continuation")
            continuation = _behind(continuation, context, delimiter)
        else:
            context, space, word = _text(row, "text").rstrip("\n").rpartition(" ")
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
        form = next((column for column in _FORMS if column in row), "query")
        context, choices, gold = _FORMS[form](row)
        choices = list(choices)
        if len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
            raise ValueError(
                f"at least two choices that are not empty are needed, found {short(choices)}"
            )
        if isinstance(gold, bool) or not re.fullmatch(r"\d+", str(gold)):
            raise ValueError(
                f"the index of the right choice is {short(gold)} (a part without answers?)"
            )
        if int(gold) >= len(choices):
            raise ValueError(
                f"the right choice is {short(int(gold))}, but there are {len(choices)} (from 0)"
            )
        return ChoiceItem(context, tuple(choices), int(gold), delimiter, always=form != "query")

    columns = (
        "query, choices and gold; HellaSwag's ctx, endings and label; PIQA's goal, sol1, sol2 and "
        "label; or ARC's question, choices and answerKey"
    )
    return _read(source, item, columns)


def _hellaswag(row: Row) -> tuple[str, Iterable[str], Any]:
    def clean(text: str) -> str:  # WikiHow's marks, in the harness's order
        if not isinstance(text, str):
            raise ValueError(f"'endings' must be texts, found {short(text)}")
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    if "ctx_a" in row:
        context = f"{_text(row, 'ctx_a')} {_text(row, 'ctx_b').capitalize()}"
    else:
        context = _text(row, "ctx")
    if row.get("activity_label"):
        context = f"{row['activity_label']}: {context}"
    return clean(context), map(clean, row["endings"]), row["label"]


def _piqa(row: Row) -> tuple[str, Iterable[str], Any]:
    return f"Question: {_text(row, 'goal')}\nAnswer:", (row["sol1"], row["sol2"]), row["label"]


def _arc(row: Row) -> tuple[str, Iterable[str], Any]:
    labels, key = list(row["choices"]["label"]), row["answerKey"]
    gold = labels.index(key) if key in labels else f"that of {short(key)} in {short(labels)}"
    return f"Question: {_text(row, 'question')}\nAnswer:", row["choices"]["text"], gold


# Context, choices and the index of the right one, by a column that no other form has. llm-foundry's
# form comes last; the others are as the harness's tasks make them.
_FORMS: dict[str, Callable[[Row], tuple[str, Iterable[str], Any]]] = {
    "endings": _hellaswag,
    "sol1": _piqa,
    "answerKey": _arc,
    "query": lambda row: (_text(row, "query"), row["choices"], row["gold"]),
}


def _behind(continuation: str, context: str, delimiter: str, always: bool = False) -> str:
    """The continuation behind the delimiter, unless white space parts the two already."""
    parted = not context or context[-1].isspace() or continuation[:1].isspace()
    return continuation if parted and not always else delimiter + continuation


def _text(row: Row, name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f"{name!r} must be text, found {short(row[name])}")
    return row[name]


def _read(source: str | Path, make: Callable[[Row], Item], columns: str) -> list[Item]:
    items = []
    for place, row in _rows(str(source)):
        try:
            items.append(make(row))
        except KeyError as error:
            found = short(sorted(row))
            raise ValueError(
                f"{place}: no {error.args[0]!r} among {found}; the columns are {columns}"
            ) from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place}: {error}") from error
    if not items:
        raise ValueError(f"{source} holds no items")
    return items


def _rows(source: str) -> Iterator[tuple[str, Row]]:
    """Rows of a source, each with the place to name in an error."""
    from mmpreproj.data.text.table_rows import JSON_LINES, Delimited, open_table

    path = Path(source).expanduser()
    if source.startswith("hf:"):
        if source.count(":") < 3:  # nobody means the training part
            raise ValueError(
                f"{source!r}: say which part, as hf:NAME:CONFIG:SPLIT, such as hf:NAME::test"
            )
    elif not path.exists():
        raise FileNotFoundError(
            f"there is no file {source}; give a .jsonl or .parquet file, a folder of "
            "datasets.save_to_disk, or hf:NAME:CONFIG:SPLIT for a data set of the hub"
        )
    table = open_table(source if source.startswith("hf:") else str(path))
    if table is None or isinstance(table, Delimited):  # in which all is text, choices too
        raise ValueError(
            f"{str(path)!r} is none of {', '.join(JSON_LINES)} (or these .gz, …), .parquet"
        )
    return table.rows()
