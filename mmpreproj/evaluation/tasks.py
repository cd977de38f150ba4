"""What the field reports of a language model: LAMBADA, multiple choice, perplexity.

Results are plain dicts. Each figure has its counts beside it and names its rule, so that it can be
compared with others of the same rule, and only with those. A config names evaluations
(EvaluationConfig), which run one after another on one model.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import math
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from mmpreproj.evaluation.encoding import Request, windows
from mmpreproj.evaluation.items import ChoiceItem, LambadaItem, read_choices, read_lambada
from mmpreproj.evaluation.scoring import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EvaluationConfig", "choices", "lambada", "perplexity", "perplexity_ratio"]
__all__ += ["mean_exp", "read_suite", "run_suite", "task_line"]

TASKS = ("lambada", "choices", "perplexity")
Unit = Literal["token", "word", "byte"]
UNITS: tuple[Unit, ...] = ("token", "word", "byte")
# How the figures of a result are shown on a line; the first of them gives the n.
_SHOWN = {
    "accuracy": ("accuracy", ".2%"),
    "accuracy_normalised": ("normalised", ".2%"),
    "perplexity": ("perplexity", ",.3f"),
    **{f"{unit}_perplexity": (f"per {unit}", ",.3f") for unit in UNITS},
}


def lambada(
    scorer: Scorer,
    items: Sequence[LambadaItem],
    limit: int | None = None,
    variant: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Accuracy and perplexity of the last word of passages.

    Args:
        limit: only the first so many items.
        variant: which of LAMBADA's texts it is. None: "standard" (the original, cut into words) if
            no text has a capital letter, else "openai". The two differ by over 10 points.

    Returns:
        accuracy: an item is correct if every token of the whole last word is the most probable one.
        perplexity: exp of the mean over items of the negative log-likelihood of the whole word.
    """
    items = _first(items, limit)
    pairs = [item.pair() for item in items]
    scores = scorer.loglikelihood(pairs, progress)
    if variant is None:
        capitals = any(c.isupper() for pair in pairs for text in pair for c in text)
        variant = "openai" if capitals else "standard"
    nll = -math.fsum(score.logprob for score in scores)
    rule = "every token of the last word is the most probable one"
    return {
        "task": "lambada",
        "variant": variant,
        "accuracy": _accuracy(sum(score.greedy for score in scores), len(scores), rule),
        "perplexity": {
            "value": mean_exp(nll, len(scores)),
            "nll_sum": nll,
            "n": len(scores),
            "rule": "exp of the mean negative log-likelihood of a last word",
        },
        "n_tokens": sum(score.n_tokens for score in scores),
        "n_cut": sum(score.n_cut > 0 for score in scores),
        "scorer": scorer.describe(),
    }


def choices(
    scorer: Scorer,
    items: Sequence[ChoiceItem],
    limit: int | None = None,
    name: str = "choices",
    progress: bool = False,
) -> dict[str, Any]:
    """Accuracy over multiple-choice items, raw and normalised by length.

    Of choices with equal scores the first is taken.

    Args:
        limit: only the first so many items.
        name: what to call the task, such as "hellaswag".

    Returns:
        accuracy: the choice of the highest log-likelihood is the right one (the harness's acc).
        accuracy_normalised: that of the highest log-likelihood a character of the choice, without
            the delimiter before it (the harness's acc_norm).
    """
    items = _first(items, limit)
    pairs = [pair for item in items for pair in item.pairs()]
    scores = iter(scorer.loglikelihood(pairs, progress))
    raw = normalised = n_cut = 0
    for item in items:
        found = list(itertools.islice(scores, len(item.choices)))
        values = [score.logprob for score in found]
        raw += values.index(max(values)) == item.gold
        values = [value / len(choice) for value, choice in zip(values, item.choices, strict=True)]
        normalised += values.index(max(values)) == item.gold
        n_cut += any(score.n_cut for score in found)
    by_length = "highest log-likelihood / number of characters; the first of equals"
    return {
        "task": name,
        "accuracy": _accuracy(raw, len(items), "highest log-likelihood; the first of equals"),
        "accuracy_normalised": _accuracy(normalised, len(items), by_length),
        "n_choices": len(pairs),
        "n_cut": n_cut,
        "scorer": scorer.describe(),
    }


def perplexity(
    scorer: Scorer,
    texts: str | Iterable[str],
    stride: int | None = None,
    window: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Strided perplexity of texts, per token, per word and per byte.

    Each text starts afresh and is read in overlapping windows, so that every token has at least
    window - stride + 1 others before it (those of the first window fewer). Every token counts once,
    except the first of a text, which has nothing before it, unless BOS stands there
    (Scorer(add_bos)). Words (between white space) and UTF-8 bytes are those of the text that
    counts: without its first token where that does not. All three are exp of the same sum of
    negative log-likelihoods, over different counts.

    Args:
        texts: one text, or several, such as documents.
        window: tokens that the model reads at once; None: all it can.
        stride: tokens by which the window moves; None: half the window.

    Raises:
        ValueError: no texts, or one of a single token; window or stride out of range.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not texts:
        raise ValueError("there are no texts to take the perplexity of")
    window = scorer.max_length if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= window <= scorer.max_length:
        raise ValueError(
            f"the window must be from 1 to the {scorer.max_length} tokens that the model reads at "
            f"once, found {window}"
        )
    bos = scorer.encoder.prefix
    requests, rests = [], []
    for index, (text, ids) in enumerate(zip(texts, scorer.encoder.encode(texts), strict=True)):
        if len(ids) < 2:
            raise ValueError(f"text {index} has no tokens to score")
        spans = windows(len(ids), window, stride)
        requests.extend(Request(ids[start:end], n_scored) for start, end, n_scored in spans)
        whole = bos and ids[: len(bos)] == bos
        rests.append(text if whole else _behind_first(scorer.tokenizer, text, ids))
    scores = scorer.score(requests, progress)
    nll = -math.fsum(score.logprob for score in scores)
    counts = {
        "token": sum(score.n_tokens for score in scores),
        "word": sum(len(rest.split()) for rest in rests),
        "byte": sum(len(rest.encode()) for rest in rests),
    }
    return {
        "task": "perplexity",
        "nll_sum": nll,
        **{
            f"{unit}_perplexity": {"value": mean_exp(nll, n) if n else None, "unit": unit, "n": n}
            for unit, n in counts.items()
        },
        "n_texts": len(texts),
        "text": hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest(),
        "window": window,
        "stride": stride,
        "first_token_counts": bool(bos),
        "scorer": scorer.describe(),
    }


def perplexity_ratio(a: dict[str, Any], b: dict[str, Any], unit: Unit = "byte") -> float:
    """Perplexity of `a` over that of `b`, both results of `perplexity` on the same text.

    Raises:
        ValueError: they cannot be compared: the unit is the token and the tokenizers differ; the
            windows, the strides or whether the first token counts differ; or the numbers of words
            or bytes differ (another text, or another first token), or there are none.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, found {unit!r}")
    first, second = (result["scorer"]["tokenizer"] for result in (a, b))
    if unit == "token" and first["hash"] != second["hash"]:
        raise ValueError(
            f"perplexities per token of different tokenizers ({first['name']!r}, "
            f"{second['name']!r}) do not compare; take those per word or per byte"
        )
    for key in ("window", "stride", "first_token_counts"):
        if a[key] != b[key]:
            raise ValueError(
                f"perplexities of different rules do not compare: {key} is {a[key]} on one side, "
                f"{b[key]} on the other"
            )
    n, other = (result[f"{unit}_perplexity"]["n"] for result in (a, b))
    if n != other:
        why = "not the same text"
        if a.get("text", 0) == b.get("text", 1):
            why = (
                "of the same text another part counts (not the first token, which nothing "
                "predicts: score it behind BOS, by Scorer(add_bos=True))"
            )
        raise ValueError(f"{why}: {n} {unit}s on one side, {other} on the other")
    if not n:
        raise ValueError(f"the text has no {unit}s that count")
    # not of the two values: a perplexity may be more than a float can hold
    ratio = mean_exp(a["nll_sum"] - b["nll_sum"], n)
    return math.inf if ratio is None else ratio


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
    readers = {"lambada": read_lambada, "choices": read_choices, "perplexity": _read_text}
    found = {}
    for name, config in configs.items():
        try:
            found[name] = readers[config.task](config.source)
        except (FileNotFoundError, ConnectionError, ValueError) as error:
            raise type(error)(f"evaluation {name!r}: {error}") from error
        if config.task == "perplexity" and config.limit is not None:
            words = itertools.islice(re.finditer(r"\S+", found[name]), config.limit)
            last = collections.deque(words, maxlen=1)
            found[name] = found[name][: last[0].end()] if last else ""
    return found


def run_suite(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    configs: Mapping[str, EvaluationConfig],
    progress: bool = False,
    held: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """The result of each evaluation with its source, by name.

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
            if config.task == "lambada":
                result = lambada(scorer, held[name], config.limit, progress=progress)
            elif config.task == "choices":
                result = choices(scorer, held[name], config.limit, name, progress)
            else:
                window = min(config.window or scorer.max_length, scorer.max_length)
                result = perplexity(scorer, held[name], config.stride, window, progress)
        except (ValueError, RuntimeError, IndexError) as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            result = {"task": config.task, "error": f"{kind}{error}"}
            warnings.warn(f"evaluation {name!r} failed: {kind}{error}", stacklevel=2)
        found[name] = result | {"source": Path(config.source).name, "limit": config.limit}
    return found


def task_line(result: dict[str, Any]) -> str:
    """The figures of one evaluation on a line."""
    if "error" in result:
        return f"failed: {result['error']}"
    figures = [(*shown, result[key]) for key, shown in _SHOWN.items() if key in result]
    parts = [
        f"{label} {'–' if figure['value'] is None else format(figure['value'], form)}"
        for label, form, figure in figures
    ]
    return f"{', '.join(parts)}  n = {figures[0][-1]['n']:,}"


def _read_text(source: str) -> str:
    path = Path(source).expanduser()
    if path.is_dir() or source.startswith("hf:"):
        kind = "the folder " if path.is_dir() else ""
        raise ValueError(f"perplexity takes one text file, found {kind}{source}")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {source}")
    from mmpreproj.data.text.text_sources import TextFile

    file = TextFile(str(path))
    return "".join(piece.text for piece in file.pieces(0, file.size))


def _behind_first(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> str:
    """The text without its first token."""
    if not tokenizer.is_fast:
        return text.removeprefix(tokenizer.decode(ids[:1]))
    found = tokenizer(
        text[:1000], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    return text[found["offset_mapping"][0][1] :] if found["input_ids"] else text


def _first(items: Sequence[Any], limit: int | None) -> Sequence[Any]:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, found {limit}")
    items = items[:limit]
    if not items:
        raise ValueError("there are no items")
    return items


def _accuracy(correct: int, n: int, rule: str) -> dict[str, Any]:
    return {"value": correct / n, "correct": correct, "n": n, "rule": rule}


def mean_exp(total: float, n: int) -> float | None:
    """exp(total / n), or None where no float can hold it."""
    return math.exp(total / n) if total / n < math.log(sys.float_info.max) else None
