"""What a test says of every file: tables of predictions, and of classes taken for others."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from mmpreproj.data.targets import decode
from mmpreproj.files import write_whole
from mmpreproj.training.metrics import EvaluationMetrics

__all__ = ["PerFile", "write_table"]


class PerFile(Callback):
    """Keeps the scores of a test on one process, for tables of it.

    Nothing is kept where what is tested has no classes, as text.
    """

    def on_test_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx:
            return
        counted = module.counted
        sets = counted["as_is"] if isinstance(counted, torch.nn.ModuleDict) else [counted]
        self.classes = getattr(module, "label_sets", None)
        if self.classes is None:
            self.classes = {"class": getattr(module, "classes", None)}
        self.kept = {
            name: metric
            for name, metric in zip(self.classes, sets, strict=False)
            if isinstance(metric, EvaluationMetrics)
        }
        for metric in self.kept.values():
            metric.kept = []
        self.name_of = getattr(trainer.test_dataloaders.dataset, "name", str)
        self.sigmoid = bool(module.hparams.get("bce"))

    def write(self, stem: Path) -> list[Path]:
        """Per label set STEM[-SET].files.csv (file, true and predicted class, probability) and
        STEM[-SET].confusion.csv (a row a true class, a column a predicted one).

        An unreadable file is predicted as nothing, and stands in no column.
        """
        written = []
        for name, metric in getattr(self, "kept", {}).items():
            rows, table = self._tables(name, metric.kept or [])
            of_set = Path(f"{stem}-{name}") if len(self.kept) > 1 else stem
            written += [
                write_table(Path(f"{of_set}.files.csv"), rows),
                write_table(Path(f"{of_set}.confusion.csv"), table),
            ]
        return written

    def _tables(
        self, name: str, kept: Iterable[tuple[Tensor, Tensor]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        logits, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
        true, readable, counted = (part.tolist() for part in decode(targets))
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(1)
        best, chosen = (part.tolist() for part in scores.max(1))
        classes = self.classes[name] or [str(index) for index in range(logits.shape[1])]
        taken = [[0] * len(classes) for _ in classes]
        rows = []
        for place in (place for place, counts in enumerate(counted) if counts):
            read = readable[place]
            if read:
                taken[true[place]][chosen[place]] += 1
            rows.append(
                {
                    "file": self.name_of(place),
                    "true": classes[true[place]],
                    "predicted": classes[chosen[place]] if read else None,
                    "probability": best[place] if read else None,
                    "correct": int(read and true[place] == chosen[place]),
                }
            )
        table = [
            {"true": of, **dict(zip(classes, counts, strict=True))}
            for of, counts in zip(classes, taken, strict=True)
        ]
        return rows, table


def write_table(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    """Rows as JSON lines where the path ends in .jsonl, and as CSV otherwise."""
    if path.suffix == ".jsonl":
        return write_whole(path, "".join(json.dumps(dict(row)) + "\n" for row in rows))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_whole(path, text.getvalue())
