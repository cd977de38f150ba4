"""Callbacks of a run: its checkpoints and folder, the order of data, clock, progress lines."""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from mmpreproj.analysis.records import environment, read_record, write_json
from mmpreproj.files import write_whole

__all__ = ["BestCheckpoint", "Clock", "EpochLines", "LastCheckpoint", "Reproducible", "RunFolder"]
__all__ += ["checkpoint_path", "runs_of"]

CHECKPOINTS = "checkpoints"


def checkpoint_path(folder: Path, which: str) -> Path:
    """Where the "best" or the "last" checkpoint of a run is."""
    return folder / CHECKPOINTS / f"{which}.ckpt"


def runs_of(root: str | os.PathLike[str], name: str) -> Path:
    """The folder below `root` that holds the runs of that name.

    Raises:
        ValueError: if it would not lie below.
    """
    inside = os.path.normpath(name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] in (os.curdir, os.pardir):
        raise ValueError(
            f"run.name={name!r} must name a folder below run.root ({os.fspath(root)}); to keep "
            "runs elsewhere, set run.root"
        )
    return Path(root) / inside


def new_run_folder(root: str | os.PathLike[str], name: str, seed: int | None) -> Path:
    """Make `<root>/<name>/<YYYYmmdd-HHMMSS>-seed<seed>`; a taken name gets a number behind it."""
    stamp = time.strftime("%Y%m%d-%H%M%S") + ("" if seed is None else f"-seed{seed}")
    for attempt in itertools.count(1):
        folder = runs_of(root, name) / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir(parents=True)  # fails where another run, perhaps at this very moment, is
            return folder
        except FileExistsError:
            pass


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


class RunFolder(Callback):
    """Makes the run's folder and sends everything that is written into it.

    Rank zero chooses the folder once the processes can talk to each other, so that all of them
    agree on it however they were started.

    Args:
        root, name, seed: see `new_run_folder`.
        config_text: what config.yaml is to hold.
        resume: the folder of the run that goes on; None starts a new one.
    """

    def __init__(
        self, root: str, name: str, seed: int | None, config_text: str, resume: Path | None = None
    ) -> None:
        runs_of(root, name)  # a wrong name shows at once
        self.root, self.name, self.seed = root, name, seed
        self.config_text = config_text
        self.resume = resume
        self.folder: Path | None = None
        self._held: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.folder is not None:
            return
        folder = self.resume
        if folder is None and trainer.is_global_zero:
            folder = new_run_folder(self.root, self.name, self.seed)
        self.folder = Path(trainer.strategy.broadcast(folder))
        for callback in trainer.callbacks:
            if isinstance(callback, RunCheckpoint):
                callback.dirpath = str((self.folder / CHECKPOINTS).resolve())
        if trainer.is_global_zero:
            self._hold()
            self._write_facts(str(trainer.strategy.root_device), trainer.world_size)
        if trainer.loggers:  # the user's own
            return
        resumed = self.resume is not None and trainer.is_global_zero
        loggers: list[Logger] = [RunCSVLogger(self.folder, resumed)]
        try:
            loggers.append(TensorBoardLogger(self.folder, name="tensorboard", version=""))
        except ModuleNotFoundError:
            pass  # an optional companion: the CSV holds the same figures
        trainer.loggers = loggers

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, RunCSVLogger) and trainer.is_global_zero:
                logger.go_on_after(checkpoint["global_step"])

    def _hold(self) -> None:
        """Raises: ValueError if another process trains in the folder."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        assert self.folder is not None
        self._held = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"another process is training in {self.folder}: stop it, or wait until it ends"
            ) from None
        except OSError:  # a file system without locks
            pass

    def release(self) -> None:
        """Let other processes train in the folder; the end of this one does it too."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _write_facts(self, device: str, processes: int) -> None:
        assert self.folder is not None
        facts = environment(self.seed, device) | {"processes": processes}
        path = self.folder / "environment.json"
        if self.resume is not None and path.is_file():
            first = read_record(path)
            first.setdefault("resumed", []).append(facts)
            facts = first
        else:
            write_whole(self.folder / "config.yaml", self.config_text)
        write_json(path, facts)


class RunCSVLogger(CSVLogger):
    """metrics.csv in the run's own folder; a resumed run goes on with what is in it."""

    def __init__(self, folder: Path, resumed: bool) -> None:
        super().__init__(folder, name="", version="")
        self.before = folder / ".metrics.csv.before"
        if resumed and (folder / "metrics.csv").is_file():  # Lightning's writer would remove it
            os.replace(folder / "metrics.csv", self.before)

    def go_on_after(self, step: int) -> None:
        """Take up what was logged until so many steps: the resumed run does the rest again.

        A step's own row has the number of steps that are done, an epoch's the number before its
        last step, as Lightning counts.
        """
        if self.before.is_file():
            with self.before.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            done = [r for r in rows if int(r["step"]) < step + bool(r.get("train/loss_step"))]
            self.experiment.metrics = done
            self.experiment.save()
            self.before.unlink()

    @property
    def log_dir(self) -> str:
        return os.fspath(self.save_dir)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""


class Reproducible(Callback):
    """Ties a step's noise to (seed, rank, epoch, step), and a resumed run's data to its place.

    Dropout, drop path and mixing draw from the main process's generators, which are seeded anew for
    every step: a run that was stopped, in mid-epoch even, then goes on as the unbroken run did.
    The data module's own order follows (seed, epoch); after a restart the loader is set to the
    right epoch, which Lightning does too late for it, and moved past the batches that were used.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        if not trainer.ckpt_path or loop._data_fetcher is None:
            return
        used = 0
        if loop.restarted_mid_epoch:
            used = loop.epoch_loop.batch_progress.current.ready
            used = 0 if used >= trainer.num_training_batches else used  # stopped at its very end
        epoch = loop.epoch_progress.current.processed
        for loader in loop._combined_loader.flattened:
            for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
        iter(loop._data_fetcher)
        for _ in range(used):
            next(loop._data_fetcher.iterator)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.seed is None:
            return
        key = f"{self.seed} {trainer.global_rank} {trainer.current_epoch} {batch_idx}"
        drawn = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
        random.seed(drawn)
        np.random.seed(drawn)
        torch.default_generator.manual_seed(drawn)  # torch.manual_seed asks every kind of device
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed(drawn)


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
