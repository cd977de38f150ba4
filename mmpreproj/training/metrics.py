"""What the evaluation of a split counts, and its figures as records and the screen have them.

Targets below 0 are marks of `mmpreproj.data.targets`: padding, which is never counted, and
unreadable images, which count as wrong and are left out of the loss. Scores of NaN are wrong, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from mmpreproj.analysis.records import proportion
from mmpreproj.data.targets import decode

__all__ = ["EXACT", "EvaluationMetrics", "Sums", "class_rows", "finite", "metrics_of", "percent"]
__all__ += ["unreadable_rows"]

# The dtype of sums: not the model's, in which n would stop at 256 (bfloat16).
EXACT = torch.float32 if torch.backends.mps.is_available() else torch.float64


class Sums(Metric):
    """Sums by name, over all processes; a NaN in one comes out as NaN."""

    full_state_update = False

    def __init__(self, **sizes: int) -> None:
        """sizes: of each sum's vector; 0: a number."""
        super().__init__()
        self.names = list(sizes)
        for name, size in sizes.items():
            zeros = torch.zeros(size or (), dtype=EXACT)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            setattr(self, name, getattr(self, name) + value)

    def compute(self) -> dict[str, Any]:
        """Plain numbers and lists; call it on every rank."""
        return {name: getattr(self, name).tolist() for name in self.names}


class EvaluationMetrics(Sums):
    """Top-1, top-5, cross-entropy and counts of one split.

    Args:
        num_classes: C. Top-5 exists only above five classes.
        per_class: keep counts by class too.

    `kept`, where it is a list, gets (logits, targets) of every batch, on the CPU.
    """

    kept: list[tuple[Tensor, Tensor]] | None = None

    def __init__(self, num_classes: int, per_class: bool = False) -> None:
        classes = {"class_correct": num_classes, "class_n": num_classes} if per_class else {}
        top5 = {"top5": 0} if num_classes > 5 else {}
        super().__init__(n=0, correct=0, loss=0, n_loss=0, **top5, **classes)

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Shape: logits [B, C], targets int64 [B] with marks."""
        logits = logits.float()
        if self.kept is not None:
            self.kept.append((logits.cpu(), targets.cpu()))
        true, readable, counted = decode(targets)
        losses = F.cross_entropy(logits, true, reduction="none").to(EXACT)
        sure = readable & ~logits.isnan().any(1)  # argmax takes a NaN for the highest
        right = sure & (logits.argmax(1) == true)
        found = {"n": counted.sum(), "correct": right.sum(), "n_loss": readable.sum()}
        found["loss"] = losses.where(readable, 0.0).sum()
        if "top5" in self.names:
            near = (logits.topk(5).indices == true[:, None]).any(1)
            found["top5"] = (sure & near).sum()
        if "class_n" in self.names:
            for name, items in (("class_correct", right), ("class_n", counted)):
                zeros = torch.zeros_like(getattr(self, name))
                found[name] = zeros.index_add(0, true, items.to(zeros.dtype))
        super().update(**found)

    def compute(self) -> dict[str, Any]:
        """n, correct, top1, top5, loss, n_loss, class_correct, class_n; without any image n = 0."""
        sums = super().compute()
        n, n_loss = int(sums["n"]), int(sums["n_loss"])
        if not n:
            return {"n": 0}
        found: dict[str, Any] = {"n": n, "correct": int(sums["correct"]), "n_loss": n_loss}
        found |= {"top1": sums["correct"] / n, "loss": sums["loss"] / n_loss if n_loss else None}
        if "top5" in sums:
            found["top5"] = sums["top5"] / n
        return found | {k: list(map(int, sums[k])) for k in sums if k.startswith("class_")}


def metrics_of(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """A `test_result` as records hold it: proportions with interval, loss with its n."""
    if not result or not result.get("n"):
        return None
    found: dict[str, Any] = {"top1": proportion(result["correct"], result["n"])}
    if result.get("top5") is not None:
        found["top5"] = proportion(round(result["top5"] * result["n"]), result["n"])
    return found | {"loss": {"value": finite(result.get("loss")), "n": result["n_loss"]}}


def class_rows(
    result: dict[str, Any] | None, classes: list[str] | None
) -> list[dict[str, Any]] | None:
    """One row a class: name, n, correct, accuracy and interval (None where there is no image).

    Without a result, None.
    """
    if not result or not result["n"]:
        return None
    counts = list(zip(result["class_correct"], result["class_n"], strict=True))
    names = classes or [str(index) for index in range(len(counts))]
    return [
        {"class": name, **proportion(correct, n)}
        for name, (correct, n) in zip(names, counts, strict=True)
    ]


def percent(figure: dict[str, Any] | None) -> str:
    """`98.15 %  [96.6, 99.0]  n = 540`, or a dash where there is none."""
    if not figure or figure["value"] is None:
        return "–"
    low, high = figure["interval95"]
    return f"{figure['value']:.2%}  [{low:.2%}, {high:.2%}]  n = {figure['n']:,}"


def finite(value: float | None) -> float | None:
    """The number; None for what is missing or not finite."""
    return value if value is not None and math.isfinite(value) else None


def unreadable_rows(first: dict[str, Any] | None, metrics: dict[str, Any]) -> list[list[str]]:
    """How many of the items of a figure were unreadable: they count as wrong, and have no loss."""
    n = first["n"] - metrics["loss"]["n"] if first else 0
    return [["  of them unreadable, so wrong", f"{n:,}"]] if n else []
