"""Callbacks of a run: folder, order of data, clock, progress lines."""

from __future__ import annotations

import csv
import hashlib
import os
import random
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from mmpreproj.analysis.records import write_json
from mmpreproj.training.checkpoints import RunCheckpoint
from mmpreproj.training.runs import CHECKPOINTS, environment, new_run_folder


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
        loggers: list[Logger] = [RunCSVLogger(self.folder, keep=self.resume is not None)]
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
                logger.forget_after(checkpoint["global_step"])

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
            from mmpreproj.analysis.records import read_record

            first = read_record(path)
            first.setdefault("resumed", []).append(facts)
            facts = first
        else:
            (self.folder / "config.yaml").write_text(self.config_text, encoding="utf-8")
        write_json(path, facts)


class RunCSVLogger(CSVLogger):
    """metrics.csv in the run's own folder; a resumed run goes on with the file."""

    def __init__(self, folder: Path, keep: bool) -> None:
        super().__init__(folder, name="", version="")
        if not keep:
            return
        path = folder / "metrics.csv"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        aside = folder / ".metrics.csv.resumed"
        if text:  # Lightning's writer removes the file that it finds
            os.replace(path, aside)
        writer = super().experiment
        if text:
            os.replace(aside, path)
            writer.metrics_keys = sorted(text.splitlines()[0].split(","))

    def forget_after(self, step: int) -> None:
        """Drop what was logged after so many steps: the resumed run does it again.

        A step's own row has the number of steps that are done, an epoch's the number before its
        last step, as Lightning counts.
        """
        path = Path(self.save_dir) / "metrics.csv"
        if not path.is_file():
            return
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names, rows = reader.fieldnames or [], list(reader)
        aside = path.with_name(".metrics.csv.kept")
        with aside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                if int(row["step"]) < step + bool(row.get("train/loss_step")):
                    writer.writerow(row)
        os.replace(aside, path)

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
        torch.default_generator.manual_seed(
            drawn
        )  # torch.manual_seed asks for every kind of device
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
        for name, value in state_dict.items():
            setattr(self, name, value)

    def per_second(self, processes: int = 1) -> float | None:
        """Over all processes; None before the first epoch is through."""
        if self.train_seconds <= 0:
            return None
        return self.items * processes / self.train_seconds


def peak_memory() -> dict[str, int | None]:
    """Peak bytes of this process, and of its GPU where it has one."""
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {"rss": _peak_resident(), "gpu": gpu}


def _peak_resident() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss starts at the peak of the process that started this one
        kib = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if kib:
            return int(kib[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes


class EpochLines(Callback):
    """One plain line an epoch, where a progress bar would fill a log file."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer, pl_module)

    def _tell(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The module adds an epoch's row after the callbacks' epoch end: tell it one hook later.
        if not getattr(self, "_started", False) or not trainer.is_global_zero:
            return
        self._started = False
        row = pl_module.history[-1]
        total = "" if (trainer.max_epochs or -1) < 0 else f"/{trainer.max_epochs}"
        parts = [f"epoch {row['epoch'] + 1}{total}"]
        for name in dict.fromkeys(("train/loss", "val/loss", pl_module.monitor[0], "lr")):
            if row.get(name) is not None:
                parts.append(f"{name} {row[name]:.4g}")
        print("  ".join(parts), flush=True)
