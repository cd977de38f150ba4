"""A run's folder: its lock, its facts, its metrics.csv."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.trainer.states import TrainerFn

from mmpreproj.analysis.records import environment, read_record, write_json
from mmpreproj.files import remove_abandoned, write_whole
from mmpreproj.training.callbacks import RunCheckpoint

__all__ = ["CHECKPOINTS", "RunFolder", "checkpoint_path", "runs_of"]

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


class RunFolder(Callback):
    """Makes the run's folder and sends everything that is written into it.

    Rank zero chooses the folder once the processes can talk to each other, so that all of them
    agree on it however they were started.

    Args:
        root, name, seed: see `new_run_folder`.
        config_text: what config.yaml is to hold.
        resume: the folder of the run that goes on; None starts a new one.
        extended: it goes on with other settings than it began with.
    """

    def __init__(
        self,
        root: str,
        name: str,
        seed: int | None,
        config_text: str,
        resume: Path | None = None,
        extended: bool = False,
    ) -> None:
        runs_of(root, name)  # a wrong name shows at once
        self.root, self.name, self.seed = root, name, seed
        self.config_text = config_text
        self.resume, self.extended = resume, extended
        self.folder: Path | None = None
        self.split: dict[str, int | None] = {}  # of an update's items
        self.split_anew = False
        self._held: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.folder is not None:
            return
        folder = self.resume
        if folder is None and trainer.is_global_zero:
            folder = new_run_folder(self.root, self.name, self.seed)
        self.folder = Path(trainer.strategy.broadcast(folder))
        self._check_batches(trainer)
        for callback in trainer.callbacks:
            if isinstance(callback, RunCheckpoint):
                callback.dirpath = str((self.folder / CHECKPOINTS).resolve())
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not the user's own
            trainer.strategy.checkpoint_io = WholeCheckpoints()
        if trainer.is_global_zero:
            self._hold()
            for place in (self.folder, self.folder / CHECKPOINTS):
                remove_abandoned(place)
            self._write_facts(str(trainer.strategy.root_device))
        if trainer.loggers:  # the user's own
            return
        loggers: list[Logger] = [RunCSVLogger(self.folder)]
        try:
            loggers.append(TensorBoardLogger(self.folder, name="tensorboard", version=""))
        except ModuleNotFoundError:
            pass  # an optional companion: the CSV holds the same figures
        trainer.loggers = loggers

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, RunCSVLogger) and trainer.is_global_zero:
                logger.save()  # before the checkpoint, which says how many rows there are
                checkpoint["metrics_rows"] = logger.experiment.n_rows

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:  # the test reads the best checkpoint
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        if self.split_anew and progress["processed"] < progress["ready"]:
            raise ValueError("its last checkpoint lies within an epoch, and needs its own batches")
        if self.extended:  # the schedule's length is one of what was saved
            checkpoint["lr_schedulers"] = []
        for logger in trainer.loggers:
            if isinstance(logger, RunCSVLogger) and trainer.is_global_zero:
                logger.experiment.go_on_after(checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.extended:
            for config in trainer.lr_scheduler_configs:
                pl_module.lr_scheduler_step(config.scheduler, None)

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
            os.register_at_fork(after_in_child=self.release)  # workers may outlive this process
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

    def _check_batches(self, trainer: Trainer) -> None:
        """Raises: ValueError if an update would be of another number of items than those before."""
        size = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
        self.split = {"processes": trainer.world_size, "batch_size": size}
        self.split["accumulated"] = trainer.accumulate_grad_batches
        path = self.folder / "environment.json"
        if self.resume is None or not path.is_file():
            return
        first = read_record(path)
        then = {name: first.get(name) for name in self.split}
        if None in (*then.values(), size):  # of an older version, or a data module of one's own
            same = then["processes"] in (None, trainer.world_size)
        else:
            self.split_anew = then != self.split
            same = math.prod(then.values()) == math.prod(self.split.values())
        if not same:
            raise ValueError(
                f"an update is of {_told(then)}, and here would be of {_told(self.split)}; set "
                "trainer.devices, data.batch_size or trainer.accumulate_grad_batches so that it "
                "is of equally many items"
            )

    def _write_facts(self, device: str) -> None:
        assert self.folder is not None
        facts = environment(self.seed, device) | self.split
        path, record = self.folder / "environment.json", self.folder / "record.json"
        if self.resume is None or not path.is_file() or self.extended:
            write_whole(self.folder / "config.yaml", self.config_text)
        if self.extended and record.is_file():
            write_json(record, read_record(record) | {"finished": False})
        if self.resume is not None and path.is_file():
            first = read_record(path)
            first.setdefault("resumed", []).append(facts)
            facts = first
        write_json(path, facts)


def _told(split: dict[str, Any]) -> str:
    return f"{split['processes']} x {split['batch_size']} x {split['accumulated']} items"


class WholeCheckpoints(TorchCheckpointIO):
    """Checkpoints that are whole or as they were before, on any file system and a full disk.

    (Lightning's go through $TMPDIR, and are copied over the old one where that lies elsewhere.)
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Raises: OSError, naming `path`."""
        if "://" in str(path):  # no file of this machine
            return super().save_checkpoint(checkpoint, path, storage_options)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(path, buffer.getbuffer())


class RunCSVLogger(CSVLogger):
    """metrics.csv in the run's own folder; a resumed run goes on with what is in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="", version="")

    @property
    def experiment(self) -> Rows:
        if self._experiment is None:
            self._experiment = Rows(self.log_dir)
        return self._experiment

    @property
    def log_dir(self) -> str:
        return os.fspath(self.save_dir)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml holds them."""


class Rows(ExperimentWriter):
    """Lightning's writer, which leaves a file that is there, and has a new header whole or not."""

    n_rows = 0

    def _check_log_dir_exists(self) -> None:
        """Lightning's removes what is there."""

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        super().log_metrics(metrics_dict, step)
        self.n_rows += 1

    def go_on_after(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was logged until the checkpoint: the resumed run does the rest again."""
        rows, n = self._read(), checkpoint.get("metrics_rows")
        if n is None:  # of an older version: a step's own row has the number of steps done, an
            # epoch's the number before its last step, as Lightning counts
            until = checkpoint["global_step"]
            done = [r for r in rows if int(r["step"]) < until + bool(r.get("train/loss_step"))]
        else:
            done = rows[:n]
        self.metrics_keys = list(rows[0]) if rows else []
        self.n_rows = len(done)
        if rows:
            self._write(self.metrics_keys, done)

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._write(fieldnames, self._read())

    def _read(self) -> list[dict[str, str]]:
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # a process that was killed may have left a part of a row
        return list(csv.DictReader(line for line in lines if line.endswith("\n")))

    def _write(self, fieldnames: list[str], rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.metrics_file_path, text.getvalue())
