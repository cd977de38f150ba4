"""Top-1, top-5, loss and counts of an evaluation, by torchmetrics.

Targets below 0 are marks of `mmpreproj.data.targets`: padding, which is never counted, and
unreadable images, which count as wrong and are left out of the loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores

from mmpreproj.analysis.records import proportion
from mmpreproj.data.targets import decode


def exact() -> torch.dtype:
    """The dtype of sums: not the model's, in which n would stop at 256 (bfloat16)."""
    return torch.float32 if torch.backends.mps.is_available() else torch.float64


def counter() -> SumMetric:
    """A sum over all processes; a NaN in it comes out as NaN."""
    return SumMetric(nan_strategy="disable").set_dtype(exact())


class EvaluationMetrics(nn.Module):
    """The metrics of one split. Under several processes every figure is over all of them.

    Args:
        num_classes: C. Top-5 exists only above five classes.
        per_class: keep counts by class too.
    """

    def __init__(self, num_classes: int, per_class: bool = False) -> None:
        super().__init__()

        def accuracy(k: int) -> Metric:
            return MulticlassAccuracy(num_classes, top_k=k, average="micro", validate_args=False)

        self.top1 = accuracy(1)
        self.top5 = accuracy(5) if num_classes > 5 else None
        # "disable": a loss that is NaN must come out as NaN, not be dropped from the mean. (It also
        # makes torchmetrics 1.9 ignore weights, so the losses go in image by image.)
        self.loss = MeanMetric(nan_strategy="disable").set_dtype(exact())
        self.n, self.correct, self.n_loss = counter(), counter(), counter()
        self.classes = (
            MulticlassStatScores(num_classes, average=None, validate_args=False)
            if per_class
            else None
        )

    @torch.no_grad()
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Shape: logits [B, C], targets int64 [B] with marks."""
        logits = logits.float()
        if bool((targets < 0).any()):
            true, readable, counted = decode(targets)
            if bool(readable.any()):
                self.loss.update(
                    F.cross_entropy(logits[readable], true[readable], reduction="none")
                )
            unreadable = counted & ~readable
            # The true class can then be in no top-k: wrong, whatever the model made of the zeros.
            rows = unreadable.nonzero().flatten()
            logits = logits.index_put((rows, true[rows]), logits.new_tensor(-torch.inf))
            logits, targets, n_loss = logits[counted], true[counted], readable.sum()
            if not len(targets):
                return
        else:
            n_loss = torch.tensor(len(targets), device=targets.device)
            self.loss.update(F.cross_entropy(logits, targets, reduction="none"))
        self.top1.update(logits, targets)
        self.correct.update((logits.argmax(1) == targets).sum())
        if self.top5 is not None:
            self.top5.update(logits, targets)
        self.n.update(len(targets))
        self.n_loss.update(n_loss)
        if self.classes is not None:
            self.classes.update(logits, targets)

    def logged(self) -> dict[str, Metric]:
        """What Lightning logs, by short name."""
        found = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "n": self.n}
        return {name: metric for name, metric in found.items() if metric is not None}

    def result(self) -> dict[str, Any]:
        """The figures as plain numbers; call it on every rank. Without any image: n = 0 alone."""
        n = int(self.n.compute())
        if n == 0:
            return {"n": 0}
        n_loss = int(self.n_loss.compute())
        found: dict[str, Any] = {
            "n": n,
            "correct": int(self.correct.compute()),
            "top1": float(self.top1.compute()),
            "loss": float(self.loss.compute()) if n_loss else None,
            "n_loss": n_loss,
        }
        if self.top5 is not None:
            found["top5"] = float(self.top5.compute())
        if self.classes is not None:
            scores = self.classes.compute()  # [C, 5]: tp, fp, tn, fn, support
            found["class_correct"] = scores[:, 0].long().tolist()
            found["class_n"] = scores[:, 4].long().tolist()
        return found

    def reset(self) -> None:
        """Forget everything."""
        for metric in self.children():
            metric.reset()


def metrics_of(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """A `test_result` as records hold it: proportions with interval, loss with its n."""
    if not result or not result.get("n"):
        return None
    found: dict[str, Any] = {"top1": proportion(result["correct"], result["n"])}
    if result.get("top5") is not None:
        found["top5"] = proportion(round(result["top5"] * result["n"]), result["n"])
    loss = result.get("loss")
    found["loss"] = {
        "value": loss if loss is not None and math.isfinite(loss) else None,
        "n": result["n_loss"],
    }
    return found


def class_rows(
    result: dict[str, Any] | None, classes: list[str] | None
) -> list[dict[str, Any]] | None:
    """One row a class: name, n, correct, accuracy and interval (None where there is no image).

    Without a result, None.
    """
    if not result:
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
