"""The video classifier as a Lightning module: clips, several views a video, several label sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.analysis.records import proportion
from mmpreproj.data.loaders import Answers
from mmpreproj.training.image_classifier import ImageClassifier
from mmpreproj.training.metrics import (
    EvaluationMetrics,
    Sums,
    class_rows,
    metrics_of,
    percent,
    unreadable_rows,
)

__all__ = ["VideoClassifier", "output_names", "retimed"]

EXAMPLES = 8  # clips kept for the skip's strength on activations
CONTROLS = ("reversed", "shuffled", "still")


class VideoClassifier(ImageClassifier):
    """Trains and evaluates a video model on the clips of the trainer's VideoDataModule.

    Everything that ImageClassifier does, and: clips are [B, C, T, H, W]; a video's test score is
    the mean of the probabilities over its views and crops, and n counts videos; with several label
    sets (what is in the video, which way it moves) the outputs are theirs side by side, the loss is
    the sum of their losses, and "top1" of validation the mean of theirs.

    Args:
        model: timm's name of a video model, or hf:NAME_OR_FOLDER.
        controls: test again with the frames of every clip "reversed", "shuffled" (each clip in an
            order of its own, by a fixed seed), or "still" (the middle frame alone, repeated): what
            the model makes of time.
        keywords: those of ImageClassifier.
    """

    needs = "clips"
    counts = "videos"

    def __init__(
        self,
        model: str = "video_vit_preproj_tiny",
        controls: list[str] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(model=model, **keywords)
        unknown = sorted(set(controls or ()) - set(CONTROLS))
        if unknown:
            raise ValueError(f"controls are {', '.join(CONTROLS)}, found {unknown[0]!r}")
        self.save_hyperparameters({"controls": list(controls or [])}, logger=False)
        self.label_sets: dict[str, list[str]] | None = None

    # ---- label sets -----------------------------------------------------------------------------

    def check_data(self, data: Any) -> None:
        """Raises ValueError if the data module gives what another module trains on."""
        if data is not None and Answers(data).gives != self.needs:
            raise ValueError(
                f"VideoClassifier takes a VideoDataModule, found {type(data).__name__}; for "
                "pictures use ImageClassifier"
            )

    def classes_of(self, data: Any) -> list[str] | None:
        label_sets = Answers(data).label_sets
        if label_sets is None:
            return None
        found = {name: list(classes) for name, classes in label_sets.items()}
        if self.mix_config.enabled and len(found) > 1:
            raise ValueError(
                f"mix: mixed clips have one label set, the data have {', '.join(found)}; set "
                "mix.mixup and mix.cutmix to 0, or train on one"
            )
        self.label_sets = found
        return output_names(found)

    @property
    def sizes(self) -> list[int]:
        """Classes of each label set, in order of the outputs."""
        assert self.label_sets is not None, "configure_model has not run"
        return [len(classes) for classes in self.label_sets.values()]

    def _build(self, num_classes: int) -> None:
        super()._build(num_classes)
        if self.label_sets is None:  # without data: one set
            self.label_sets = {"class": self.classes or [str(i) for i in range(num_classes)]}

    # ---- steps ----------------------------------------------------------------------------------

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        clips, targets = batch
        n = len(targets)
        if self.mixer is not None:
            self.mixer.set_epoch(self.current_epoch)
            shape = clips.shape  # boxes and flips of the mixer are over [B, C, H, W]
            clips, soft = self.mixer(clips.flatten(1, 2), targets[:, 0])
            loss = self.criterion(self.model(clips.reshape(shape)), soft)
        else:
            parts = self.model(clips).split(self.sizes, 1)
            losses = [self.criterion(part, t) for part, t in zip(parts, targets.T, strict=True)]
            loss = torch.stack(losses).sum()
        self.count_loss(loss, n, batch_idx)
        return loss

    def log_probabilities(self, clips: Tensor) -> list[Tensor]:
        """Log of the mean probability over views, of each label set.

        Shape: clips [B, V, C, T, H, W] -> [B, K] each, K the set's classes.
        """
        logits = self.evaluated(clips.flatten(0, 1)).float()
        found = []
        for part in logits.split(self.sizes, 1):
            probability = part.sigmoid() if self.hparams.bce else part.softmax(1)
            found.append(probability.unflatten(0, clips.shape[:2]).mean(1))
        return [(p / p.sum(1, keepdim=True)).clamp_min(1e-30).log() for p in found]

    # ---- evaluation -----------------------------------------------------------------------------

    def new_metrics(self, split: str) -> nn.Module:
        def of_sets(per_class: bool) -> nn.ModuleList:
            return nn.ModuleList(EvaluationMetrics(size, per_class) for size in self.sizes)

        controls = self.hparams.controls if split == "test" else ()
        found = {"as_is": of_sets(split == "test"), **{name: of_sets(False) for name in controls}}
        return nn.ModuleDict(found | {"opposite": Sums(n=0)})  # reversed, and seen the other way

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self._tested = 0

    def evaluate(self, batch: tuple[Tensor, Tensor], split: str) -> None:
        clips, targets = batch
        scores = self.log_probabilities(clips)
        self._count(scores, targets, "as_is")
        if split == "val":
            return
        if self.examples is None:
            self.examples = clips[:EXAMPLES, 0].detach().cpu()
        for name in self.hparams.controls:
            found = self.log_probabilities(retimed(clips, name, self._places(len(clips))))
            self._count(found, targets, name)
            if name == "reversed":
                self._count_opposite(scores, found, targets)
        self._tested += len(targets)

    def _places(self, n: int) -> list[int]:
        """Places in the test split of the batch's n videos, whatever the batches and processes."""
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return [rank + world * (self._tested + i) for i in range(n)]

    def _count(self, scores: list[Tensor], targets: Tensor, name: str) -> None:
        for metric, of_set, target in zip(self.counted[name], scores, targets.T, strict=True):
            metric.update(of_set, target)

    def _count_opposite(self, scores: list[Tensor], back: list[Tensor], targets: Tensor) -> None:
        """How often a clip played backwards is taken for the opposite of what it is taken for."""
        assert self.label_sets is not None
        for place, (name, classes) in enumerate(self.label_sets.items()):
            if opposites := Answers(self._data()).opposites.get(name):
                mapped = torch.tensor([classes.index(opposites[c]) for c in classes])
                forward, backward = scores[place].argmax(1), back[place].argmax(1)
                agree = mapped.to(forward.device)[forward] == backward
                self.counted["opposite"].update(n=(agree & (targets[:, place] >= 0)).sum())

    def figures(self, split: str) -> dict[str, Any]:
        result = self._over_sets("as_is")
        if result["n"] and len(result["sets"]) > 1:
            result |= {f"top1_{name}": found["top1"] for name, found in result["sets"].items()}
        if split == "val":
            return result
        result["controls"] = {name: self._over_sets(name) for name in self.hparams.controls}
        if "reversed" in self.hparams.controls and Answers(self._data()).opposites:
            result["opposite"] = int(self.counted["opposite"].compute()["n"])
        return result

    def _over_sets(self, name: str) -> dict[str, Any]:
        """The figures of each label set, and over them mean top-1 and summed loss."""
        assert self.label_sets is not None
        found = [metric.compute() for metric in self.counted[name]]
        sets = dict(zip(self.label_sets, found, strict=True))
        if not found[0]["n"]:
            return {"n": 0, "sets": sets}
        losses = [figures["loss"] for figures in found]
        return {
            "n": found[0]["n"],
            "top1": sum(figures["top1"] for figures in found) / len(found),
            "loss": None if None in losses else sum(losses),
            "n_loss": found[0]["n_loss"],
            "sets": sets,
        }

    def metrics(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        """One label set: as for images. Several: their mean top-1, and each by its name."""
        if not result or not result.get("n"):
            return None
        sets = result.get("sets")
        if sets is None:  # a row of the history
            found: dict[str, Any] = {"top1": {"value": result["top1"], "n": int(result["n"])}}
            found["loss"] = {"value": result.get("loss"), "n": int(result["n_loss"])}
            return found
        found = {name: metrics_of(figures) for name, figures in sets.items()}
        if len(found) == 1:
            found = next(iter(found.values()))
        else:
            mean = {"value": result["top1"], "n": result["n"], "of": list(found)}
            loss = {"value": result["loss"], "n": result["n_loss"]}
            found = {"top1": mean, "loss": loss, "label_sets": found}
        controls = {k: self.metrics(figures) for k, figures in result.get("controls", {}).items()}
        if "opposite" in result:
            n = next(iter(sets.values()))["n_loss"]
            controls["reversed"] |= {"opposite": proportion(result["opposite"], n)}
        return found | ({"controls": controls} if controls else {})

    def per_class(self) -> Any:
        """Rows of the only label set, or {label set: rows}."""
        sets = (self.test_result or {}).get("sets") or {}
        rows = {
            name: class_rows(figures, (self.label_sets or {}).get(name))
            for name, figures in sets.items()
        }
        return next(iter(rows.values())) if len(rows) == 1 else rows or None

    def headline(self, metrics: dict[str, Any]) -> list[list[str]]:
        rows = [[f"test top-1{label}", percent(f)] for label, f in _accuracies(metrics)]
        rows += unreadable_rows(_accuracies(metrics)[0][1], metrics)
        for name, control in (metrics.get("controls") or {}).items():
            rows += [[f"frames {name}{label}", percent(f)] for label, f in _accuracies(control)]
            if "opposite" in control:
                rows.append(["  taken for the opposite", percent(control["opposite"])])
        return rows

    # ---- predictions ----------------------------------------------------------------------------

    def read(self, data: Any, file: str) -> tuple[dict[str, Any], Tensor]:
        """({"frames": uint8 [T, H, W, 3] of the view in the middle}, the model's input)."""
        if data is None:
            raise ValueError("the checkpoint does not say how its clips were sampled")
        transform = data.eval_transform()
        frames = transform.frames(file)
        return {"frames": frames[len(frames) // 2]}, transform.of_frames(frames)

    def scores(self, pixels: Tensor) -> list[tuple[str, Tensor, list[str]]]:
        assert self.label_sets is not None
        named = zip(self.label_sets.items(), self.log_probabilities(pixels), strict=True)
        return [(name, found[0].exp(), classes) for (name, classes), found in named]

    # ---- checkpoints ----------------------------------------------------------------------------

    def saved_facts(self) -> dict[str, Any]:
        return super().saved_facts() | {"label_sets": self.label_sets}

    def load_facts(self, facts: dict[str, Any]) -> None:
        super().load_facts(facts)
        self.label_sets = self.label_sets or facts.get("label_sets")

    def data_spec(self, init: dict[str, Any]) -> dict[str, Any]:
        # The training mapping: a folder of other classes must not renumber it.
        return {**init, "label_sets": self.label_sets}


def output_names(label_sets: Mapping[str, list[str]]) -> list[str]:
    """A name for each output: the class, behind the name of its set where there are several."""
    if len(label_sets) == 1:
        return list(next(iter(label_sets.values())))
    return [f"{name}: {c}" for name, classes in label_sets.items() for c in classes]


def retimed(clips: Tensor, how: str, seeds: Sequence[int]) -> Tensor:
    """Clips with their frames in another order: see CONTROLS. Shape: [B, V, C, T, H, W], kept.

    Args:
        seeds: of each video's order, where they are shuffled.
    """
    frames = clips.shape[3]
    if how == "reversed":
        return clips.flip(3)
    if how == "still":
        return clips[:, :, :, frames // 2 : frames // 2 + 1].expand_as(clips)
    assert how == "shuffled", how
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    orders = [torch.randperm(frames, generator=draw).to(clips.device) for draw in draws]
    shuffled = zip(clips, orders, strict=True)
    return torch.stack([clip.index_select(2, order) for clip, order in shuffled])


def _accuracies(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    sets: Mapping[str, Any] = metrics.get("label_sets") or {}
    figures: list[tuple[str, Any]] = [(f", {name}", part["top1"]) for name, part in sets.items()]
    return figures or [("", metrics.get("top1"))]
