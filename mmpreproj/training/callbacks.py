"""Callbacks of a run: its checkpoints, the place where it goes on, clock, progress lines."""

from __future__ import annotations

import hashlib
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

__all__ = ["BestCheckpoint", "Clock", "EpochLines", "LastCheckpoint", "Reproducible", "RunTrainer"]
__all__ += ["check_parts"]


# Lightning's own that do not work here, and what to set instead
REFUSED = {
    "BackboneFinetuning": "it needs a module with a `backbone`; set model.freeze_base",
    "BatchSizeFinder": "config and record would tell another batch size; set data.batch_size",
    "GradientAccumulationScheduler": "the schedule would have another length than the run; set "
    "trainer.accumulate_grad_batches",
    "LearningRateFinder": "rates follow model.schedule; set model.optimizer.lr",
    "ModelPruning": "checkpoints do not hold its masks, so that no run goes on with them",
    "SpikeDetection": "Lightning cannot save its state in a checkpoint",
    "StochasticWeightAveraging": "its average would not be tested; set model.ema_decay",
    "WeightAveraging": "its average would not be resumed; set model.ema_decay",
}


def check_parts(trainer: Trainer) -> None:
    """Raises ValueError for a part of Lightning's with which a run would go wrong."""
    for name, why in REFUSED.items():
        if any(isinstance(own, getattr(callbacks, name)) for own in trainer.callbacks):
            raise ValueError(f"trainer.callbacks: {name} does not work here: {why}")
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(
            "trainer.strategy: the processes that it starts would take what they trained with "
            "them; set trainer.strategy: ddp"
        )


class RunTrainer(Trainer):
    """Lightning's, which heeds SIGTERM only where no gradients of a part of an update are held, and
    in all processes behind the same update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._signal_connector._sigterm_notifier_fn = self._note_sigterm

    def _note_sigterm(self, signum: int, _: Any) -> None:
        # Lightning's also sends to the other processes, in the middle of whatever they send
        if not self._signal_connector.received_sigterm and self.strategy.launcher is not None:
            self.strategy.launcher.kill(signum)
        self._signal_connector.received_sigterm = True

    @property
    def received_sigterm(self) -> bool:
        if self.state.fn == TrainerFn.FITTING:
            saves = any(isinstance(callback, LastCheckpoint) for callback in self.callbacks)
            if self.fit_loop._should_accumulate() or (saves and self.world_size > 1):
                return False  # LastCheckpoint stops all processes
        return super().received_sigterm


OWN = ("best_epoch", "best_loss", "best_validation")  # what RunCheckpoint adds to Lightning's


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
        self.best_validation: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            Path(str(self.dirpath)).mkdir(parents=True, exist_ok=True)
        super().setup(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {name: getattr(self, name) for name in OWN}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        for name in OWN:
            setattr(self, name, state.pop(name, getattr(self, name)))

        def here(path: str) -> str:
            return str(Path(str(self.dirpath)) / Path(path).name) if path else path

        state["dirpath"] = self.dirpath  # else Lightning drops the best score of a moved run
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[key] = here(state.get(key, ""))
        state["best_k_models"] = {here(k): v for k, v in state.get("best_k_models", {}).items()}
        super().load_state_dict(state)


class LastCheckpoint(RunCheckpoint):
    """last.ckpt, at the end of every epoch, after every so many updates, and on SIGTERM.

    One that lies between an update and the validation behind it starts with that validation: see
    `Reproducible`.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__("last", every_n_epochs=1, save_on_train_epoch_end=True)
        self.every_n_steps = every_n_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log_step(outputs)  # which it does after the callbacks: the row belongs here
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._save_between(trainer)
        if trainer.world_size > 1 and _can_start_here(trainer):
            told = trainer._signal_connector.received_sigterm
            if trainer.strategy.reduce_boolean_decision(told, all=False):
                raise SIGTERMException

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_global_step_saved = 0  # the one of its last update was without its validation
        super().on_train_epoch_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SIGTERMException):
            self._save_between(trainer)

    def _save_between(self, trainer: Trainer) -> None:
        if _can_start_here(trainer) and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, {})


def _can_start_here(trainer: Trainer) -> bool:
    """Whether a run can go on from here: behind an update, and before the epoch's end."""
    fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    ends = batches._num_ready_batches_reached() or trainer.should_stop
    ends &= not batches._should_check_val_fx(fit._data_fetcher)
    return not (ends or batches._should_accumulate() or trainer.global_step == trainer.max_steps)


class BestCheckpoint(RunCheckpoint):
    """best.ckpt: the best by a figure of validation; of equal ones, the one with the lower loss.

    It holds the weights that were validated: those of a validation inside an epoch are saved at
    once, those of one behind its last batch with the epoch.

    Args:
        monitor: the figure, and "max" or "min".
    """

    def __init__(self, monitor: tuple[str, str] = ("val/top1", "max")) -> None:
        name, mode = monitor
        super().__init__("best", monitor=name, mode=mode, save_on_train_epoch_end=True)
        self._waits = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._validation = pl_module.validation
        self._waits = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if not self._waits:
            self._save_if_best(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._waits:
            self._save_if_best(trainer)
        self._waits = False

    def _save_if_best(self, trainer: Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        loss = float(trainer.callback_metrics.get("val/loss", math.inf))
        loss = math.inf if math.isnan(loss) else loss
        better = super().check_monitor_top_k(trainer, current)
        tie = current is not None and self.best_model_score is not None
        if not better and tie and bool(current == self.best_model_score):
            better = loss < self.best_loss
        if better:
            self.best_loss, self.best_epoch = loss, trainer.current_epoch
            self.best_validation = self._validation
        return better


class Reproducible(Callback):
    """Ties a step's noise to (seed, rank, epoch, step), and a resumed run to its place.

    Dropout, drop path and mixing draw from the main process's generators, which are seeded anew for
    every step, and between two, where batches go to the device: a run that was stopped, in
    mid-epoch even, then goes on as the unbroken run did. The data module's own order follows (seed,
    epoch); after a restart the loader is set to the right epoch, which Lightning does too late for
    it, and moved past the batches that were used.

    Lightning leaves out the validation behind a checkpoint's batch, counts that batch's epoch as
    done, and begins an epoch twice with max_steps. So what it counts is set to what it was.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["stopped_early"] = trainer.should_stop

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        trainer.should_stop = checkpoint.get("stopped_early", False)
        loops = checkpoint["loops"]["fit_loop"]
        epoch, batch = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        val = loops["epoch_loop.val_loop.batch_progress"]
        # saved before the hooks of the batch were through, or in the validation behind it
        validates = batch["current"]["completed"] < batch["current"]["processed"]
        validates |= val["current"]["ready"] > 0 and not val["is_last_batch"]
        over = epoch["current"]["processed"] == epoch["current"]["ready"]
        for part in ("current", "total"):
            _settle(batch[part], 0 if over and part == "current" else batch[part]["ready"])
            if over:
                _settle(epoch[part], epoch[part]["ready"])
            _settle(val[part], 0)
        batch["is_last_batch"] &= not over
        if validates and not over:
            val["total"].update(ready=1, started=1)  # Lightning's mark of a begun validation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if not trainer.ckpt_path or loop._data_fetcher is None:
            return
        batches, used, validates = loop.epoch_loop, 0, False
        if loop.restarted_mid_epoch:
            validates = batches._should_check_val_fx(loop._data_fetcher)
            used = batches.batch_progress.current.ready
            if validates and batches._num_ready_batches_reached():
                used = 0  # the epoch ends without another
        else:
            for part in (loop, batches, batches.val_loop):
                part._restarting = False
        # of the loggers' steps: one is added behind a validation, whether it is done again or not
        batches._batches_that_stepped = trainer.global_step - validates
        epoch = loop.epoch_progress.current.processed
        for loader in loop._combined_loader.flattened:
            for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
        iter(loop._data_fetcher)
        for _ in range(used):
            next(loop._data_fetcher.iterator)
        self._seed(trainer, "before", batches.batch_progress.current.ready)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seed(trainer, "before", 0)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._seed(trainer, "in", batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seed(trainer, "before", batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._seed(trainer, "before", trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _seed(self, trainer: Trainer, when: str, batch_idx: int) -> None:
        if self.seed is None:
            return
        key = f"{self.seed} {trainer.global_rank} {trainer.current_epoch} {batch_idx}"
        key += "" if when == "in" else f" {when}"
        drawn = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
        random.seed(drawn)
        np.random.seed(drawn)
        torch.default_generator.manual_seed(drawn)  # torch.manual_seed asks every kind of device
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.manual_seed(drawn)


def _settle(progress: dict[str, int], n: int) -> None:
    """So many are done, and none is under way."""
    progress.update(dict.fromkeys(progress, n))


class Clock(Callback):
    """Seconds of training (validation beside it, the test not in it) and how much a second.

    It goes on where it was in a resumed run. A second of waiting for data is one of training.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # all of fit
        self.train_seconds = 0.0  # of it, training epochs without validation
        self.items = 0  # read by this process in those, in what the module counts
        self.ticked = False  # whether a batch of this process has been trained on
        self._fit = self._epoch = self._val = 0.0
        self._running = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit = self._epoch = time.perf_counter()
        self._running = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch, self._val = time.perf_counter(), 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ticked = True
        self.items += pl_module.count(batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._val_start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._val += time.perf_counter() - self._val_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = time.perf_counter()
        self.train_seconds += now - self._epoch - self._val
        self.seconds += now - self._fit
        self._fit = self._epoch = now
        self._val = 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.perf_counter() - self._fit
        self._running = False

    def state_dict(self) -> dict[str, Any]:
        # In mid-epoch too: what has passed of the epoch counts, as its items do.
        now = time.perf_counter()
        since = (now - self._fit, now - self._epoch - self._val) if self._running else (0.0, 0.0)
        return {
            "seconds": self.seconds + since[0],
            "train_seconds": self.train_seconds + since[1],
            "items": self.items,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("seconds", "train_seconds", "items"):
            setattr(self, name, state_dict[name])

    def per_second(self, processes: int = 1) -> float | None:
        """Over all processes; None before the first epoch is through."""
        return self.items * processes / self.train_seconds if self.train_seconds > 0 else None


class EpochLines(Callback):
    """One plain line an epoch, where a progress bar would fill a log file."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._told = len(pl_module.history)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The module adds an epoch's row after the callbacks' epoch end: tell it one hook later.
        rows = pl_module.history[self._told :] if trainer.is_global_zero else []
        self._told = len(pl_module.history)
        for row in rows:
            total = "" if (trainer.max_epochs or -1) < 0 else f"/{trainer.max_epochs}"
            words = [f"epoch {row['epoch'] + 1}{total}"]
            for name in dict.fromkeys(("train/loss", "val/loss", pl_module.monitor[0], "lr")):
                if row.get(name) is not None:
                    words.append(f"{name} {row[name]:.4g}")
            print("  ".join(words), flush=True)

    on_train_end = on_train_epoch_start
