"""The image classifier as a Lightning module: any timm model, with or without the method."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.backbones import building
from mmpreproj.data.loaders import Answers
from mmpreproj.messages import listed
from mmpreproj.preproj import PreProjConfig
from mmpreproj.training.metrics import (
    EvaluationMetrics,
    class_rows,
    metrics_of,
    percent,
    unreadable_rows,
)
from mmpreproj.training.recipe import (
    MixConfig,
    Mixer,
    OptimizerConfig,
    ScheduleConfig,
    as_config,
    make_loss,
)
from mmpreproj.training.trained_module import TrainedModule, as_plain

__all__ = ["ImageClassifier"]

EXAMPLES = 32  # evaluation images kept for the skip's strength on activations
OPTIMIZER, SCHEDULE, MIX = OptimizerConfig(), ScheduleConfig(), MixConfig()


class ImageClassifier(TrainedModule):
    """Trains and evaluates a timm model on the images of the trainer's data module.

    Training minimises timm's loss for the settings; evaluation reports top-1, top-5 (above five
    classes) and cross-entropy, each over its n, with the EMA weights where there are any.

    Args:
        model: timm's name of the model, or hf:NAME_OR_FOLDER, an image model of transformers.
        model_args: keywords of the model, such as img_size, drop_path_rate or expansion.
        num_classes: None is the data's; another number than the data's is an error.
        pretrained: start from the weights that timm names.
        weights: start from a local file instead.
        preproj: attach the method with this config (after the weights are loaded); None does not.
        freeze_base: train only the new parameters and the classifier (without the method, only the
            classifier: a linear probe); everything else stays in eval mode.
        optimizer: see OptimizerConfig.
        schedule: see ScheduleConfig.
        mix: see MixConfig.
        label_smoothing: 0 is off.
        bce: binary cross-entropy over the classes, instead of softmax cross-entropy.
        bce_threshold: with bce, soft targets above it become 1 and others 0.
        ema_decay: of the weights' moving average, updated with every optimiser step; None is off.
        ema_warmup: let the decay rise from 0 (timm's ModelEmaV3), for runs that are short for it.
        grad_checkpointing: recompute activations in the backward pass.
        compile: torch.compile the model.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: before training, where the settings do not
            fit the model or the data; the message says what was found and what would work.
    """

    def __init__(
        self,
        model: str = "vit_preproj_tiny",
        model_args: dict[str, Any] | None = None,
        num_classes: int | None = None,
        pretrained: bool = False,
        weights: str | None = None,
        preproj: PreProjConfig | None = None,
        freeze_base: bool = False,
        optimizer: OptimizerConfig = OPTIMIZER,
        schedule: ScheduleConfig = SCHEDULE,
        mix: MixConfig = MIX,
        label_smoothing: float = 0.0,
        bce: bool = False,
        bce_threshold: float | None = None,
        ema_decay: float | None = None,
        ema_warmup: bool = False,
        grad_checkpointing: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer_config = optimizer = as_config(OptimizerConfig, optimizer)
        self.schedule_config = schedule = as_config(ScheduleConfig, schedule)
        self.mix_config = mix = as_config(MixConfig, mix)
        self.preproj_config = preproj = as_config(PreProjConfig, preproj)
        if ema_decay is not None and not 0 < ema_decay < 1:
            raise ValueError(f"ema_decay must be between 0 and 1, or null, found {ema_decay}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), found {label_smoothing}")
        if weights is not None and pretrained:
            raise ValueError(f"give pretrained: true or weights: {weights}, not both")
        building.check_name(model)
        model = building.with_whole_path(model)
        self.keep(locals())
        self.mixer: Mixer | None = None
        self.classes: list[str] | None = None

    # ---- building -------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the model, once, for the classes of the data; tell the data the model's input."""
        data = self._data()
        self.check_data(data)
        classes = self.classes_of(data)
        num_classes = self._resolve_num_classes(classes)
        if self.model is None:
            self._build(num_classes)
        if classes is not None and self.classes is not None and classes != self.classes:
            raise ValueError(
                f"the data's classes are not those the model was trained on, in that order: data "
                f"{listed(classes)}, model {listed(self.classes)}"
            )
        self.classes = classes or self.classes
        if data is not None:
            building.check_kind(self.model, type(data).__name__, Answers(data).gives)
            data.data_config = building.input_config(self.model)
            used = Answers(data).resolved_data_config
            building.check_image_size(self.model, used)
            self.data_config = as_plain(used or data.data_config)  # as checkpoints hold it

    def classes_of(self, data: Any) -> list[str] | None:
        """Names of the model's outputs, as the data have them; None without data."""
        classes = Answers(data).classes
        return None if classes is None else list(classes)

    def _resolve_num_classes(self, classes: list[str] | None) -> int:
        given = self.hparams.num_classes
        if classes is None and given is None:
            raise ValueError("num_classes is not set and there is no data module to take it from")
        if classes is not None and given is not None and given != len(classes):
            raise ValueError(
                f"num_classes={given}, but the data have {len(classes)} classes: "
                f"{listed(classes)}; a new model follows the data, where num_classes is left out"
            )
        return given if given is not None else len(classes or ())

    def _build(self, num_classes: int) -> None:
        h = self.hparams
        # A checkpoint will be loaded over the weights: starting ones are pointless.
        resumes = self._trainer is not None and self._trainer.ckpt_path is not None
        model = building.build_model(
            h.model,
            num_classes,
            h.model_args,
            pretrained=h.pretrained and not resumes,
            weights=None if resumes else h.weights,
            preproj=self.preproj_config,
        )
        if h.freeze_base:
            building.freeze(model)
            own = {"image_weights", "checkpoint_path"} & {*(h.model_args or ())}
            if self._trainer is not None and not (h.pretrained or h.weights or own or resumes):
                warnings.warn(
                    f"freeze_base freezes random weights of {h.model}: give pretrained: true, or "
                    "weights",
                    stacklevel=2,
                )
        if h.grad_checkpointing:
            if not hasattr(model, "set_grad_checkpointing"):
                raise ValueError(f"grad_checkpointing: {h.model} does not support it")
            model.set_grad_checkpointing(True)
        self.model = model
        self.start_average()
        self.shard_model()
        if h.compile:
            model.compile()
        h.num_classes = num_classes
        mixed = self.mix_config.enabled
        self.mixer = Mixer(self.mix_config, num_classes, h.label_smoothing) if mixed else None
        self.criterion = make_loss(mixed, h.label_smoothing, h.bce, h.bce_threshold)
        self.train(self.training)

    @property
    def num_classes(self) -> int | None:
        """Classes that the model tells apart; None before it is built."""
        return self.hparams.num_classes

    def forward(self, images: Tensor) -> Tensor:
        """Shape: images [B, C, H, W] -> logits [B, num_classes]; in eval mode by `evaluated`."""
        return (self.model if self.training else self.evaluated)(images)

    # ---- training -------------------------------------------------------------------------------

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        n = len(targets)
        if self.mixer is not None:
            self.mixer.set_epoch(self.current_epoch)  # a resumed epoch has no start
            images, targets = self.mixer(images, targets)
        loss = self.criterion(self.model(images), targets)
        self.count_loss(loss, n, batch_idx)
        return loss

    # ---- evaluation -----------------------------------------------------------------------------

    def new_metrics(self, split: str) -> nn.Module:
        return EvaluationMetrics(self.num_classes, per_class=split == "test")

    def evaluate(self, batch: tuple[Tensor, Tensor], split: str) -> None:
        images, targets = batch
        if self.examples is None:
            self.examples = images[:EXAMPLES].detach().cpu()
        self.counted.update(self.evaluated(images), targets)

    def figures(self, split: str) -> dict[str, Any]:
        return self.counted.compute()

    # ---- predictions ----------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self, data: Any, files: Sequence[str], top: int = 5
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The likeliest classes of files of a person's own.

        Args:
            data: the data module that `load_run` gave; None: as the model's configuration says.

        Returns: ([{"file", what `read` shows of it, "sets": {label set: [(class, probability), …]},
        "top": the first of them}], errors that name the files which could not be read).
        """
        found, errors = [], []
        for file in files:
            try:
                shown, pixels = self.read(data, file)
            except (ValueError, OSError) as error:  # an unreadable image or video is among them
                reason = str(error)
                errors.append(reason if str(file) in reason else f"{file}: {reason}")
                continue
            sets = {}
            for name, scores, classes in self.scores(pixels[None].to(self.device)):
                likeliest = zip(*scores.topk(min(top, len(classes))), strict=True)
                sets[name] = [(classes[index], float(score)) for score, index in likeliest]
            first = next(iter(sets.values()))
            found.append({"file": str(file), **shown, "sets": sets, "top": first})
        return found, errors

    def read(self, data: Any, file: str) -> tuple[dict[str, Any], Tensor]:
        """({"image": upright RGB, PIL}, the model's input for it)."""
        from mmpreproj.data.image.image_files import eval_transform, load_image

        own = self.data_config or {}
        transform = eval_transform(own) if data is None else data.eval_transform()
        image = load_image(file, 3)
        return {"image": image}, transform(image)

    def scores(self, pixels: Tensor) -> list[tuple[str, Tensor, list[str]]]:
        """(label set, probabilities [K], class names) of one input, for each label set."""
        logits = self(pixels)[0].float()
        classes = self.classes or [str(index) for index in range(self.num_classes or 0)]
        return [("class", logits.sigmoid() if self.hparams.bce else logits.softmax(0), classes)]

    # ---- checkpoints and records ----------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        # The checkpoint's own weights replace those it started from: nothing is fetched again.
        hyper = checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]
        started = {key: hyper.get(key) for key in ("pretrained", "weights")}
        hyper.update(pretrained=False, weights=None)
        checkpoint["mmpreproj"]["started_from"] = started

    def saved_facts(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def load_facts(self, facts: dict[str, Any]) -> None:
        saved = facts.get("classes")
        if saved and self.classes and list(saved) != self.classes:
            raise ValueError(
                f"the checkpoint's classes are {listed(saved)}, the data's {listed(self.classes)}"
            )
        self.classes = saved or self.classes

    def data_spec(self, init: dict[str, Any]) -> dict[str, Any]:
        # The training mapping: a folder of other classes must not renumber it.
        return {**init, "classes": self.classes} if "classes" in init else init

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"per_class": self.per_class()}

    def per_class(self) -> Any:
        """Rows of the test by class, for a record; None before it."""
        return class_rows(self.test_result, self.classes)

    def metrics(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        return metrics_of(result)

    def headline(self, metrics: dict[str, Any]) -> list[list[str]]:
        top1, top5 = metrics.get("top1"), metrics.get("top5")
        rows = [["test top-1 (95 % interval)", percent(top1)], ["test top-5", percent(top5)]]
        return rows + unreadable_rows(top1, metrics)
