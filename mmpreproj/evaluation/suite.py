"""Evaluations named in a config, and run one after another on one model."""

from __future__ import annotations

import dataclasses
import re
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
        source: a file (JSON lines or parquet; plain text for perplexity) or "hf:NAME".
        limit: the first so many items, or words of the text; None: all.
        window: perplexity: tokens read at once; None: all that the model can.
        stride: perplexity: tokens by which the window moves; None: half of it.
        batch_tokens: tokens in a batch, padding included.
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
        if self.task != "perplexity" and (self.window or self.stride):
            raise ValueError(f"window and stride are for perplexity, not for {self.task}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be 1 or more, or null, found {self.limit}")


def check_sources(configs: Mapping[str, EvaluationConfig]) -> None:
    """Raises FileNotFoundError, naming it, if a local file is not there."""
    for name, config in configs.items():
        if not config.source.startswith("hf:") and not Path(config.source).is_file():
            raise FileNotFoundError(f"evaluation {name!r}: there is no file {config.source}")


def run_suite(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    configs: Mapping[str, EvaluationConfig],
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """The result of each evaluation, as tasks.py gives it, with its source; by name.

    Raises:
        FileNotFoundError, ValueError: as the readers and the scorer do.
    """
    check_sources(configs)
    found: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        scorer = Scorer(model, tokenizer, batch_tokens=config.batch_tokens)
        if config.task == "lambada":
            result = lambada(scorer, read_lambada(config.source), config.limit, progress=progress)
        elif config.task == "choices":
            items = read_choices(config.source)
            result = choices(scorer, items, config.limit, name, progress)
        else:
            text = first_words(Path(config.source).read_text(encoding="utf-8"), config.limit)
            window = min(config.window or scorer.max_length, scorer.max_length)
            result = perplexity(scorer, text, config.stride, window, progress)
        found[name] = result | {"source": Path(config.source).name, "limit": config.limit}
    return found


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
