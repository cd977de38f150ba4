"""What the Lightning modules share: recipe, moving average, sums of the loss, history, checkpoints.

A module of a task (ImageClassifier, VideoClassifier, LanguageModel) adds how its model is built,
one step, and what evaluation counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from mmpreproj.attach import preproj_modules
from mmpreproj.backbones import building
from mmpreproj.backbones.modes import exact_frequencies
from mmpreproj.data.loaders import Answers
from mmpreproj.training.metrics import EXACT
from mmpreproj.training.recipe import make_optimizer, make_schedule
from mmpreproj.training.sharding import shard

__all__ = ["TrainedModule", "as_plain"]

SHARDED = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}
GOES_WITH = {"images": "ImageClassifier", "clips": "VideoClassifier", "text": "LanguageModel"}
LOGGED = ("n", "top1", "top5", "loss")


class TrainedModule(LightningModule):
    """Base of the modules that `tools/train.py` trains.

    A subclass keeps its settings with `keep` and sets `optimizer_config` and `schedule_config`; it
    fills `model` in configure_model and calls `start_average` there, calls `count_loss` in its
    training step; evaluation counts by `new_metrics`, `evaluate` and `figures`.
    """

    needs: ClassVar[str] = "images"
    """The kind of batches, as a data module `gives` them: "images", "clips" or "text"."""
    counts: ClassVar[str] = "images"
    """What a batch is counted in, and the speed told in."""
    predicts: ClassVar[str] = "classes"
    """What it makes of a person's input: "classes", of a file, or "text", behind a prompt."""
    monitor: ClassVar[tuple[str, str]] = ("val/top1", "max")
    """What the best checkpoint is chosen by; of equal ones, the one with the lower val/loss."""
    large: ClassVar[bool] = False
    """The tested module itself is reported: a second copy of the weights would not be wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.ema: ModelEmaV3 | None = None
        self.data_config: dict[str, Any] | None = None
        self.run_info: dict[str, Any] = {}  # the tool's: what load_run needs beside the weights
        self.history: list[dict[str, Any]] = []  # one row an epoch, for the learning curves
        self.test_result: dict[str, Any] | None = None
        self.examples: Tensor | None = None  # inputs kept for the skip's strength on activations
        self.loaded: dict[str, Any] = {}
        self._loss_sum: Tensor | None = None  # of the epoch: times n, so that n weighs it
        self._loss_n = 0
        self._logged_step = -1  # the last update that has a row of its own
        self.validation: dict[str, Any] | None = None  # figures of the epoch's last one

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Hold the arguments of __init__ (its locals()) as hyper-parameters, in plain types.

        A checkpoint must load with torch.load(weights_only=True).
        """
        named = {k: as_plain(v) for k, v in settings.items() if k not in ("self", "__class__")}
        self.save_hyperparameters(named, logger=False)

    # ---- what the tools ask of a task -----------------------------------------------------------

    def data_spec(self, init: dict[str, Any]) -> dict[str, Any]:
        """Init arguments of the data module for a loaded run, from those it was trained with."""
        return init

    def adopt(self, data: Any) -> None:
        """Tell a data module that was made for the loaded model what the model takes."""
        data.data_config = dict(self.data_config or {}) or None

    def facts(self) -> dict[str, Any]:
        """Plain facts about this task's model for a record."""
        return {"model": self.hparams.model, "input": self.data_config}

    def metrics(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        """A `test_result` or validation row as records hold it; None where nothing was counted."""
        raise NotImplementedError

    def count(self, batch: Any) -> int:
        """How much a batch of this process is, in what `counts` names."""
        return len(batch[1])

    def headline(self, metrics: dict[str, Any]) -> list[list[str]]:
        """The rows of [label, figure] that sum up `metrics` of the test on the screen."""
        raise NotImplementedError

    def gather(self, folder: Path) -> None:
        """What a task writes of a model that is split over processes: called on each of them."""

    def finish(self, folder: Path | None, reported: TrainedModule | None, data: Any) -> None:
        """What a task shows or writes at the end of a run, beyond record and plots."""

    # ---- the model ------------------------------------------------------------------------------

    def _data(self) -> Any:
        return None if self._trainer is None else getattr(self._trainer, "datamodule", None)

    def check_data(self, data: Any) -> None:
        """Raises ValueError if the data module gives what another module trains on."""
        gives = Answers(data).gives
        if gives not in (None, self.needs):
            name, fit = type(data).__name__, GOES_WITH[gives]
            raise ValueError(f"{name} goes with {fit}, not with {type(self).__name__}")

    def _apply(self, *args: Any, **kwargs: Any) -> TrainedModule:
        with exact_frequencies(self):
            return super()._apply(*args, **kwargs)

    def start_average(self) -> None:
        """Start the moving average of `model`, where one is asked for.

        Raises: ValueError where it cannot work.
        """
        decay = self.hparams.ema_decay
        if decay is None:
            return
        strategy = type(self._trainer and self._trainer.strategy)
        if SHARDED & {base.__name__ for base in strategy.__mro__}:
            raise ValueError(
                f"ema_decay={decay} does not work with {strategy.__name__}, which splits the "
                "weights over processes; set ema_decay: null, or trainer.strategy: ddp"
            )
        half = torch.float16 in {p.dtype for p in self.model.parameters()}
        if half or (self._trainer is not None and self._trainer.precision == "16-true"):
            raise ValueError(
                f"ema_decay={decay} does not work with weights in float16, in which an average "
                "cannot move; set ema_decay: null, or trainer.precision: 16-mixed or bf16-true"
            )
        self.ema = ModelEmaV3(self.model, decay=decay, use_warmup=self.hparams.ema_warmup)
        self.ema.requires_grad_(False)

    def shard_model(self) -> None:
        """Split the weights of `model` over the processes, where the trainer's strategy does."""
        if self._device_mesh is not None:
            shard(self.model, self._device_mesh, str(self._trainer.precision))

    @property
    def evaluated(self) -> nn.Module:
        """The model that evaluation uses: the moving average where there is one."""
        assert self.model is not None, "configure_model has not run"
        return self.model if self.ema is None else self.ema.module

    @property
    def evaluated_weights(self) -> str:
        """ "ema" or "model": whose weights evaluation uses."""
        return "model" if self.ema is None else "ema"

    def set_frozen_modes(self) -> None:
        """Put the frozen parts in eval mode; `train` calls it where the base is frozen."""
        building.set_frozen_modes(self.model)

    def train(self, mode: bool = True) -> TrainedModule:
        """As in torch, but what is frozen stays in eval mode, and so does the moving average."""
        super().train(mode)
        if self.model is not None:
            if mode and self.hparams.freeze_base:
                self.set_frozen_modes()
            if self.ema is not None:
                self.ema.eval()
        return self

    # ---- training -------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.model, self.optimizer_config)
        trainer = self.trainer
        total = trainer.estimated_stepping_batches  # makes the loader, whose length is read below
        batches = trainer.num_training_batches
        per_epoch = 1
        if math.isfinite(batches):
            per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
        schedule = make_schedule(optimizer, self.schedule_config, total, per_epoch)
        if schedule is None:
            return optimizer
        scheduler = {"scheduler": schedule, "interval": "step", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """timm's schedulers take the number of updates done, which a resumed run knows too."""
        scheduler.step_update(num_updates=self.trainer.global_step)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:  # here, not at the batch's end: accumulation steps more rarely
            step = self.trainer.global_step + 1
            self.ema._sr_generator.manual_seed(step)  # of rounding, in bfloat16
            self.ema.update(self.model, step=step)

    def on_fit_start(self) -> None:
        self.train()

    def on_train_start(self) -> None:
        counts = parameter_counts(self.model)
        told = f"{counts['total']:,} parameters, {counts['new']:,} new"
        if counts["trainable"] != counts["total"]:
            told += f", {counts['trainable']:,} trained"
        rank_zero_info(f"{self.hparams.model or self.hparams.model_type}: {told}")

    def count_loss(self, loss: Tensor, n: int, batch_idx: int) -> None:
        """Add a batch's mean loss over n items to the epoch's; show it now and then."""
        # Sums stay on the device: reading a number every step would make the host wait for it.
        seen = loss.detach().to(EXACT) * n
        self._loss_sum = seen if self._loss_sum is None else self._loss_sum + seen
        self._loss_n += n
        if batch_idx % max(1, self.trainer.log_every_n_steps) == 0:
            self.log("loss", loss.detach(), prog_bar=True, logger=False)

    def _losses(self) -> Tensor:
        """Of this process: (the epoch's sum up to here, of how many). Shape: [2]."""
        own = [float(self._loss_sum or 0.0), self._loss_n]
        return torch.tensor(own, dtype=EXACT, device=self.device)

    def _losses_of_all(self) -> list[list[float]]:
        found = [self._losses().tolist()] * self.trainer.world_size
        if len(found) > 1:
            torch.distributed.all_gather_object(found, found[0])
        return found

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The mean over the batches of a window, in an epoch's last, shorter one too."""
        # Lightning has divided by accumulate_grad_batches
        window = self.trainer.accumulate_grad_batches
        rest = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready % window
        if rest and not self.trainer.strategy.handles_gradient_accumulation:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(window / rest)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_step(outputs)

    def log_step(self, outputs: Any) -> None:
        """Log the loss and rate of an update, once, where one is due."""
        trainer, step = self.trainer, self.trainer.global_step
        every = trainer.log_every_n_steps
        due = every and step % every == 0 and step != self._logged_step
        if not due or trainer.fit_loop._should_accumulate():
            return
        self._logged_step = step
        if trainer.is_global_zero:
            values = {"train/loss_step": float(outputs["loss"]), "lr": self.learning_rate()}
            for logger in self.loggers:
                logger.log_metrics(values, step=step)

    def learning_rate(self) -> float:
        """The highest rate among the parameter groups, as of the next update."""
        return max(group["lr"] for group in self.trainer.optimizers[0].param_groups)

    def on_train_epoch_end(self) -> None:
        total = self.trainer.strategy.reduce(self._losses(), reduce_op="sum").tolist()
        self._loss_sum, self._loss_n = None, 0
        n = int(total[1])
        loss = total[0] / n if n else math.nan
        if not math.isfinite(loss):
            rank_zero_warn(f"the training loss of epoch {self.current_epoch} is {loss}")
        values = {"train/loss": loss, "train/n": float(n)}
        self.log_dict(values, sync_dist=True, logger=False)
        for logger in self.loggers:  # not by log_dict: it would come behind the checkpoint
            logger.log_metrics({"epoch": self.current_epoch, **values}, self.global_step - 1)
            logger.save()
        row = {"epoch": self.current_epoch, "lr": self.learning_rate(), "train/n": n}
        row["train/loss"] = loss if math.isfinite(loss) else None
        self.history.append(row | {f"val/{k}": v for k, v in (self.validation or {}).items()})
        self.validation = None

    # ---- evaluation -----------------------------------------------------------------------------

    def new_metrics(self, split: str) -> nn.Module:
        """What the evaluation of "val" or "test" is to count with, as `counted`."""
        raise NotImplementedError

    def evaluate(self, batch: Any, split: str) -> None:
        """Count a batch."""
        raise NotImplementedError

    def figures(self, split: str) -> dict[str, Any]:
        """What was counted, over all processes; "n" is in it."""
        raise NotImplementedError

    def on_validation_epoch_start(self) -> None:
        self.counted = self.new_metrics("val").to(self.device)

    def on_test_epoch_start(self) -> None:
        self.counted = self.new_metrics("test").to(self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        result = self._logged("val")
        if not self.trainer.sanity_checking:
            self.validation = {k: v for k, v in result.items() if not isinstance(v, dict)}

    def on_test_epoch_end(self) -> None:
        self.test_result = self._logged("test")

    def _logged(self, split: str) -> dict[str, Any]:
        result = self.figures(split)
        for name, value in result.items():
            if value is not None and (name in LOGGED or name.startswith("top1_")):
                shown = name in ("top1", "loss")
                self.log(f"{split}/{name}", float(value), prog_bar=shown, sync_dist=True)
        return result

    def replace_evaluations(self, evaluations: Mapping[str, Any]) -> None:
        """Evaluate something else at the test, where the model knows such evaluations.

        Raises: ValueError where it does not.
        """
        raise ValueError(f"evaluations are for language models, not for {type(self).__name__}")

    # ---- checkpoints ----------------------------------------------------------------------------

    def saved_facts(self) -> dict[str, Any]:
        """What `load_facts` needs back, beside the hyper-parameters and the weights."""
        return {}

    def load_facts(self, facts: dict[str, Any]) -> None:
        """Take back what `saved_facts` gave."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        hyper = dict(checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {}))
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = hyper
        checkpoint["mmpreproj"] = {
            "model": {"class_path": f"{type(self).__module__}.{type(self).__qualname__}"},
            "data_config": self.data_config,
            "history": self.history,
            # of an epoch that is under way
            "validation": self.validation,
            "losses": self._losses_of_all(),
            **self.saved_facts(),
            **self.run_info,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.get("mmpreproj") or {}
        self.load_facts(own)
        self.data_config = own.get("data_config") or self.data_config
        self.history = [dict(row) for row in own.get("history") or []]
        self.validation = own.get("validation")
        losses = own.get("losses") or [[own.get("loss_sum") or 0.0, own.get("loss_n", 0)]]
        loss, n = losses[self.global_rank] if self.global_rank < len(losses) else (0.0, 0)
        self._loss_sum, self._loss_n = torch.tensor(loss, dtype=EXACT, device=self.device), n


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """How many parameters there are in all, are trained, and were added, by the method or LoRA."""
    new = sum(p.numel() for m in preproj_modules(model).values() for p in m.parameters())
    new += sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "new": new,
    }


def as_plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, sequences as lists, all the way down."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
