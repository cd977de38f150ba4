"""The figures of a language model as records hold them, and as the screen shows them."""

from __future__ import annotations

import math
from typing import Any

from mmpreproj.evaluation.tasks import task_line


def language_metrics(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """{"loss": …, "perplexity": {"token": …, "word": …, "byte": …}, "tasks": …}; None without n.

    Args:
        result: n (tokens), loss (nats a token) and, of a whole part, words and bytes.
    """
    if not result or not result.get("n"):
        return None
    n, loss = int(result["n"]), result["loss"]
    nll = result.get("nll", loss * n)
    counts = {"token": n, "word": result.get("words"), "byte": result.get("bytes")}
    return {
        "loss": {"value": loss if math.isfinite(loss) else None, "n": n},
        "perplexity": {
            unit: None if not count else {"value": _exp(nll / count), "n": int(count)}
            for unit, count in counts.items()
        },
        "tasks": result.get("tasks") or {},
    }


def language_headline(metrics: dict[str, Any]) -> list[list[str]]:
    """Rows of [label, figure]."""
    figures = metrics.get("perplexity") or {}
    rows = [
        [f"test perplexity per {unit}", f"{f['value']:,.3f}  n = {f['n']:,} {unit}s"]
        for unit, f in figures.items()
        if f and f["value"] is not None
    ]
    return rows + [
        [name, task_line(result)] for name, result in (metrics.get("tasks") or {}).items()
    ]


def _exp(value: float) -> float | None:
    return math.exp(value) if value < 700 else None
