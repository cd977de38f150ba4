"""Evaluations named in a config, and run one after another on one model."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mmpreproj.evaluation.items import read_choices, read_lambada
from mmpreproj.evaluation.scoring import Scorer
from mmpreproj.evaluation.tasks import choices, lambada, perplexity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = ("lambada", "choices", "perplexity")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """One evaluation of a language model.

    Args:
        task: lambada, choices (HellaSwag, PIQA and the like) or perplexity (strided).
        source: a file (JSON lines or parquet; plain text for perplexity, also packed) or
            "hf:NAME:CONFIG:SPLIT".
        limit: the first so many items, or words of the text; None: all.
        window: perplexity: tokens read at once; None: all that the model can.
        stride: perplexity: tokens by which the window moves; None: half of it.
        batch_tokens: tokens in a batch, padding included.

    Raises:
        ValueError: an unknown task, or a number that is out of range.
    """

    task: str
    source: str
    limit: int | None = None
    window: int | None = None
    stride: int | None = None
    batch_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, found {self.task!r}")
        if self.task != "perplexity" and (self.window, self.stride) != (None, None):
            raise ValueError(f"window and stride are for perplexity, not for {self.task}")
        for name in ("limit", "window", "stride", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                null = "" if name == "batch_tokens" else ", or null"
                raise ValueError(f"{name} must be 1 or more{null}, found {value}")
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ValueError(
                f"stride must be at most the window ({self.window}), found {self.stride}: tokens "
                "between two windows would not be scored"
            )


def read_suite(configs: Mapping[str, EvaluationConfig]) -> dict[str, Any]:
    """The items, or the text, of each evaluation: what is wrong with a file shows before training.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: naming the evaluation and the fault.
    """
    found = {}
    for name, config in configs.items():
        try:
            found[name] = _read(config)
        except (FileNotFoundError, ConnectionError, ValueError) as error:
            raise type(error)(f"evaluation {name!r}: {error}") from error
    return found


def _read(config: EvaluationConfig) -> Any:
    hub, path = config.source.startswith("hf:"), Path(config.source).expanduser()
    if not hub and not path.exists():
        raise FileNotFoundError(f"there is no file {config.source}")
    if config.task == "lambada":
        return read_lambada(config.source if hub else path)
    if config.task == "choices":
        return read_choices(config.source if hub else path)
    if hub:
        raise ValueError(f"perplexity takes a text file, found {config.source}")
    if path.is_dir():
        raise ValueError(f"perplexity takes one text file, found the folder {config.source}")
    from mmpreproj.data.text.sources import TextFile

    file = TextFile(str(path))
    text = "".join(piece.text for piece in file.pieces(0, file.size))
    return first_words(text, config.limit)


def run_suite(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    configs: Mapping[str, EvaluationConfig],
    progress: bool = False,
    held: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """The result of each evaluation, as tasks.py gives it, with its source; by name.

    One that fails (a choice longer than the model reads, logits that are not finite, memory that
    is not enough) has {"error": what it said} instead, and the others go on.

    Args:
        held: what `read_suite` gave; None reads it now.

    Raises:
        FileNotFoundError, ConnectionError, ValueError: as `read_suite`.
    """
    held = read_suite(configs) if held is None else held
    found: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        try:
            scorer = Scorer(model, tokenizer, batch_tokens=config.batch_tokens)
            result = _run(scorer, name, config, held[name], progress)
        except (ValueError, RuntimeError, IndexError) as error:
            told = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            warnings.warn(f"evaluation {name!r} failed: {told}", stacklevel=2)
            result = {"task": config.task, "error": told}
        found[name] = result | {"source": Path(config.source).name, "limit": config.limit}
    return found


def _run(
    scorer: Scorer, name: str, config: EvaluationConfig, held: Any, progress: bool
) -> dict[str, Any]:
    if config.task == "lambada":
        return lambada(scorer, held, config.limit, progress=progress)
    if config.task == "choices":
        return choices(scorer, held, config.limit, name, progress)
    window = min(config.window or scorer.max_length, scorer.max_length)
    return perplexity(scorer, held, config.stride, window, progress)


def first_words(text: str, limit: int | None) -> str:
    """The text up to the end of its word number `limit`; None: all of it."""
    if limit is None:
        return text
    end = 0
    for number, word in enumerate(re.finditer(r"\S+", text), 1):
        end = word.end()
        if number == limit:
            break
    return text[:end]


def task_line(result: dict[str, Any]) -> str:
    """The figures of one evaluation on a line."""
    if "error" in result:
        return f"failed: {result['error']}"
    parts = []
    for key, label in (("accuracy", "accuracy"), ("accuracy_normalised", "normalised")):
        if key in result:
            parts.append(f"{label} {result[key]['value']:.2%}")
            n = result[key]["n"]
    if isinstance(result.get("perplexity"), dict):
        parts.append(f"perplexity {_number(result['perplexity']['value'])}")
    for unit in ("token", "word", "byte"):
        figure = result.get(f"{unit}_perplexity")
        if figure:
            parts.append(f"per {unit} {_number(figure['value'])}")
            n = result["token_perplexity"]["n"]
    return f"{', '.join(parts)}  n = {n:,}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3f}"
