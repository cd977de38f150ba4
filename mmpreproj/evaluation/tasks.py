"""What the field reports of a language model: LAMBADA, multiple choice, perplexity.

Results are plain dicts. Each figure has its counts beside it and names its rule, so that it can be
compared with others of the same rule, and only with those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from mmpreproj.evaluation.items import ChoiceItem, LambadaItem
from mmpreproj.evaluation.scoring import Scorer

Unit = Literal["token", "word", "byte"]
UNITS: tuple[Unit, ...] = ("token", "word", "byte")


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
    scores = scorer.loglikelihood([item.pair() for item in items], progress)
    if variant is None:
        capitals = any(c.isupper() for item in items for c in item.context + item.continuation)
        variant = "openai" if capitals else "standard"
    nll = -math.fsum(score.logprob for score in scores)
    return {
        "task": "lambada",
        "variant": variant,
        "accuracy": _accuracy(sum(score.greedy for score in scores), len(scores))
        | {"rule": "every token of the last word is the most probable one"},
        "perplexity": {
            "value": _exp(nll / len(scores)),
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
        found = [next(scores) for _ in item.choices]
        values = [score.logprob for score in found]
        lengths = map(len, item.choices)
        raw += values.index(max(values)) == item.gold
        values = [value / length for value, length in zip(values, lengths, strict=True)]
        normalised += values.index(max(values)) == item.gold
        n_cut += any(score.n_cut for score in found)
    return {
        "task": name,
        "accuracy": _accuracy(raw, len(items))
        | {"rule": "highest log-likelihood; the first of equals"},
        "accuracy_normalised": _accuracy(normalised, len(items))
        | {"rule": "highest log-likelihood / number of characters; the first of equals"},
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
    sequences = scorer.encoder.encode(texts)
    bos = scorer.encoder.prefix
    rests = [
        text if bos and ids[: len(bos)] == bos else _behind_first(scorer, text, ids)
        for text, ids in zip(texts, sequences, strict=True)
    ]
    scores = scorer.in_windows(sequences, window, stride, progress)
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
            f"{unit}_perplexity": {"value": _exp(nll / n) if n else None, "unit": unit, "n": n}
            for unit, n in counts.items()
        },
        "n_texts": len(texts),
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
            or bytes differ, so it was not the same text, or there are none.
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, found {unit!r}")
    tokenizers = [result["scorer"]["tokenizer"] for result in (a, b)]
    if unit == "token" and tokenizers[0]["hash"] != tokenizers[1]["hash"]:
        raise ValueError(
            f"perplexities per token of different tokenizers ({tokenizers[0]['name']!r}, "
            f"{tokenizers[1]['name']!r}) do not compare; take those per word or per byte"
        )
    for key in ("window", "stride", "first_token_counts"):
        if a[key] != b[key]:
            raise ValueError(
                f"perplexities of different rules do not compare: {key} is {a[key]} on one side, "
                f"{b[key]} on the other"
            )
    n, other = (result[f"{unit}_perplexity"]["n"] for result in (a, b))
    if n != other:
        raise ValueError(f"not the same text: {n} {unit}s on one side, {other} on the other")
    if not n:
        raise ValueError(f"the text has no {unit}s that count")
    # not of the two values: a perplexity may be more than a float can hold
    ratio = _exp((a["nll_sum"] - b["nll_sum"]) / n)
    return math.inf if ratio is None else ratio


def _behind_first(scorer: Scorer, text: str, ids: list[int]) -> str:
    """The text without its first token."""
    tokenizer = scorer.tokenizer
    if tokenizer.is_fast:
        found = tokenizer(
            text[:1000], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return text[found["offset_mapping"][0][1] :] if found["input_ids"] else text
    first = tokenizer.decode(ids[:1])
    return text.removeprefix(first)


def _first(items: Sequence[Any], limit: int | None) -> Sequence[Any]:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, found {limit}")
    items = items[:limit]
    if not items:
        raise ValueError("there are no items")
    return items


def _accuracy(correct: int, n: int) -> dict[str, Any]:
    return {"value": correct / n, "correct": correct, "n": n}


def _exp(value: float) -> float | None:
    """exp, or None where no float can hold it."""
    try:
        return math.exp(value)
    except OverflowError:
        return None
