"""When a run writes last.ckpt and best.ckpt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor


class RunCheckpoint(ModelCheckpoint):
    """A checkpoint of the run's folder. The folder may have been moved since it was written."""

    def __init__(self, filename: str, **kwargs: Any) -> None:
        super().__init__(
            filename=filename,
            save_top_k=1,
            auto_insert_metric_name=False,
            enable_version_counter=False,
            **kwargs,
        )
        self.best_epoch: int | None = None
        self.best_loss = math.nan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            Path(str(self.dirpath)).mkdir(parents=True, exist_ok=True)
        super().setup(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        own = {"best_epoch": self.best_epoch, "best_loss": self.best_loss}
        return super().state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.best_epoch = state.pop("best_epoch", None)
        self.best_loss = state.pop("best_loss", math.nan)

        def here(path: str) -> str:
            return str(Path(str(self.dirpath)) / Path(path).name) if path else path

        state["dirpath"] = self.dirpath  # else Lightning drops the best score of a moved run
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[key] = here(state.get(key, ""))
        state["best_k_models"] = {here(k): v for k, v in state.get("best_k_models", {}).items()}
        super().load_state_dict(state)


class LastCheckpoint(RunCheckpoint):
    """last.ckpt, at the end of every epoch, or every so many steps.

    The one of epochs is also written when SIGTERM ends the run between two optimiser steps.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.of_epochs = every_n_steps is None
        when = (
            {"every_n_train_steps": every_n_steps}
            if every_n_steps
            else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
        )
        super().__init__("last", **when)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        stopped = isinstance(exception, SIGTERMException) and trainer.training
        if not self.of_epochs or not stopped or trainer.global_step == 0:
            return
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # gradients of a part of a step, which a checkpoint does not hold
        self._save_checkpoint(trainer, self.format_checkpoint_name({}))


class BestCheckpoint(RunCheckpoint):
    """best.ckpt: the best by a figure of validation; of equal ones, the one with the lower loss.

    Args:
        monitor: the figure, and "max" or "min".
    """

    def __init__(self, monitor: tuple[str, str] = ("val/top1", "max")) -> None:
        name, mode = monitor
        super().__init__("best", monitor=name, mode=mode, save_on_train_epoch_end=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        every = trainer.check_val_every_n_epoch
        validated = every is None or (trainer.current_epoch + 1) % every == 0
        if validated and sum(trainer.num_val_batches) > 0:
            super().on_train_epoch_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        loss = float(trainer.callback_metrics.get("val/loss", math.nan))
        better = super().check_monitor_top_k(trainer, current)
        tie = current is not None and self.best_model_score is not None
        if not better and tie and bool(current == self.best_model_score):
            better = loss < self.best_loss
        if better:
            self.best_loss, self.best_epoch = loss, trainer.current_epoch
        return better
