"""`tools/train.py`: a run from one YAML file, on LightningCLI.

    train.py CONFIG [--key value …]        a new run (`fit` before CONFIG may be left out)
    train.py CONFIG --resume               go on with the newest run of that config
    train.py --resume RUN_FOLDER           go on with that run
    train.py CONFIG --print_config         show all settings and stop

Restart rule: a run goes on from its last checkpoint, in the same folder, with the same config, and
ends as the unbroken run would have, to the bit, wherever it was killed. Settings beside --resume
must be the run's own, as those of a command that is issued again are. Others may be what changes no
weight (`FREE`); between epochs, another number of processes, with batches such that an update is of
as many items; and more epochs or steps, with which also a finished run goes on: from there, its
learning rate is that of the longer run. SIGTERM writes a last checkpoint, once the update that is
under way is done.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import mmpreproj  # noqa: F401 - registers the models with timm
from mmpreproj.analysis.records import read_record, read_yaml
from mmpreproj.messages import about, explain
from mmpreproj.training.callbacks import (
    BestCheckpoint,
    Clock,
    EpochLines,
    LastCheckpoint,
    Reproducible,
    RunTrainer,
    check_parts,
)
from mmpreproj.training.console import quieten
from mmpreproj.training.run_folder import RunFolder, checkpoint_path, runs_of
from mmpreproj.training.runs import finish_run

__all__ = ["RunConfig", "TrainCLI", "find_resumed", "main", "split_arguments"]

# What a resumed run may be given another value of: its weights are the same.
FREE = ("run.test", "run.every_n_steps", "data.num_workers", "trainer.enable_progress_bar")
FREE += ("trainer.log_every_n_steps",)
# ... or where batches are split otherwise: RunFolder sees to it that updates are of as many items
FREE += ("trainer.devices", "trainer.num_nodes", "trainer.accumulate_grad_batches")
FREE += ("data.batch_size", "trainer.strategy")
ENDS = ("trainer.max_epochs", "trainer.max_steps")

REFRESH = 10  # batches from one refresh of the progress bar to the next


@dataclasses.dataclass
class RunConfig:
    """Where a run is kept.

    Args:
        root: folder of all runs; where it is left as it is, trainer.default_root_dir is, if set.
        name: folder of this config's runs; None is the config's path below configs/.
        every_n_steps: write last.ckpt after every so many optimiser steps too, for long epochs.
        test: read the reported split, once, after training.
    """

    root: str = "runs"
    name: str | None = None
    every_n_steps: int | None = None
    test: bool = True


class TrainCLI(LightningCLI):
    """Parses the config and builds module, data and trainer; `train()` then runs them.

    Args:
        args: as on the command line, without the program's name; see `split_arguments`.
        name: of the config, for the run folder.
        resume: run folder to go on with.
    """

    def __init__(self, args: Sequence[str], name: str = "run", resume: Path | None = None) -> None:
        self.config_name, self.resume = name, resume
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=RunTrainer,
            save_config_callback=None,
            seed_everything_default=True,
            trainer_defaults={"enable_model_summary": False, "max_epochs": 10},
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=list(args),
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"prog": "train.py", "allow_abbrev": False, "exit_on_error": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunConfig, "run")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # Lightning's own warns whenever sys.argv is not empty and args are given.
        known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        known.add_argument("-c", "--config", action="append", default=[])
        for path in known.parse_known_args(args)[0].config:
            if Path(path).is_file():
                read_yaml(path)
        with _explained(parser):
            self.config = parser.parse_args(args)
            if self.resume is not None:
                own = parser.parse_args(["--config", os.fspath(self.resume / "config.yaml")])
        self.changed: dict[str, tuple[Any, Any]] = {}  # settings: (the run's own, now)
        if self.resume is not None:
            then, now = _flat(parser, own), _flat(parser, self.config)
            names = sorted(then.keys() | now.keys())
            pairs = {name: (then.get(name), now.get(name)) for name in names}
            self.changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
            self._check_changed()

    def _check_changed(self) -> None:
        """Raises: ValueError, naming the setting, if the run cannot go on with another value."""
        for name, (then, now) in self.changed.items():
            if name in ENDS and isinstance(then, int) and isinstance(now, int) and now > then > 0:
                continue
            if name not in FREE and not name.startswith("trainer.strategy."):
                hint = ", unless more" if name in ENDS else ""
                raise ValueError(
                    f"the run was begun with {name}: {then}, and cannot go on with {now}{hint}; "
                    f"leave --{name} out, or start a new run"
                )

    def instantiate_classes(self) -> None:
        # jsonargparse wraps what a class says about its arguments; say that, not the wrapping.
        with _explained(self.parser):
            super().instantiate_classes()

    @property
    def seed(self) -> int | None:
        """The seed in use; None where seeding is off."""
        seed = self.config.seed_everything
        return None if seed is False else int(seed)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        run, given = self.config.run, self.config.trainer
        root = run.root
        if root == RunConfig.root and given.default_root_dir:
            root = given.default_root_dir
        self.folder = RunFolder(
            root,
            run.name or self.config_name,
            self.seed,
            self.parser.dump(self.config, skip_unset=False),
            self.resume,
            bool(self.changed),
        )
        self.clock, self.best = Clock(), BestCheckpoint(self.model.monitor)
        callbacks = [Reproducible(self.seed), self.clock]
        own = [c for c in self.config_init.trainer.callbacks or [] if isinstance(c, ProgressBar)]
        progress = given.enable_progress_bar
        if progress is None:
            progress = bool(own) or sys.stderr.isatty() or sys.stdout.isatty()
        if not progress:
            callbacks.append(EpochLines())
        elif not own:
            # Every refresh reads the loss off the device, which would hold up each step of a GPU.
            callbacks.append(TQDMProgressBar(refresh_rate=REFRESH))
        if given.enable_checkpointing is not False and not given.fast_dev_run:
            # In this order: last.ckpt then knows which epoch was best, the one that ends included.
            callbacks += [self.best, LastCheckpoint(run.every_n_steps)]
        # Loggers are made with the folder, once all processes know it.
        logger = False if given.logger in (None, True) else self.config_init.trainer.logger
        trainer = self._instantiate_trainer(
            {
                **self.config_init.trainer.as_dict(),
                "callbacks": [self.folder, *(self.config_init.trainer.callbacks or [])],
                "enable_progress_bar": progress,
                "logger": logger,
                "default_root_dir": root,
            },
            callbacks,
        )
        check_parts(trainer)
        return trainer

    def train(self) -> Path:
        """Fit, then test the best weights once, then write the record. Returns the run folder."""
        spec = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
        self.model.run_info = {
            "data": spec["data"],
            "model": {"class_path": spec["model"]["class_path"]},
            "name": self.config.run.name or self.config_name,
            "precision": str(self.trainer.precision),
        }
        try:
            return self._train()
        except Exception:
            if self.resume is None or self.clock.ticked:
                raise
            with about(self.resume, "cannot be resumed"):  # before a step, its files are at fault
                raise
        finally:
            self.folder.release()

    def _train(self) -> Path:
        last = None if self.resume is None else str(checkpoint_path(self.resume, "last"))
        try:
            self.trainer.fit(self.model, self.datamodule, ckpt_path=last, weights_only=True)
            assert self.folder.folder is not None
            watched = self.folder.folder, self.best, self.clock
            test = self.config.run.test
            finish_run(self.trainer, self.model, self.datamodule, *watched, self.seed, test)
        except (KeyboardInterrupt, SystemExit) as stop:
            folder = self.folder.folder
            there = folder is not None and checkpoint_path(folder, "last").exists()
            if there and self.trainer.is_global_zero:
                print(f"\ninterrupted; to go on: {sys.argv[0]} --resume {folder}", flush=True)
            if isinstance(stop, SystemExit) and not stop.code:  # Lightning's, after SIGTERM
                raise SystemExit(128 + signal.SIGTERM) from stop
            raise
        return self.folder.folder


def _flat(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """Settings by their dotted names on the command line."""
    found, parts = {}, [("", yaml.safe_load(parser.dump(config, skip_unset=False)))]
    while parts:
        above, values = parts.pop()
        for key, value in values.items():
            name = above if key == "init_args" else f"{above}.{key}".lstrip(".")
            if isinstance(value, dict) and value:
                parts.append((name, value))
            else:
                found[name] = value
    return found


@contextlib.contextmanager
def _explained(parser: LightningArgumentParser) -> Iterator[None]:
    """Whatever a class makes of a setting is a ValueError that names the setting."""
    try:
        yield
    except (ImportError, MemoryError, OSError):
        raise
    except Exception as error:
        raise ValueError(explain(error, parser)) from error


def split_arguments(args: Sequence[str]) -> tuple[list[str], str | None, bool, str | None]:
    """What LightningCLI does not know taken out of the command line.

    Returns: (arguments for LightningCLI, path of the config, whether to resume, run to resume).

    Raises:
        ValueError: on a subcommand that other tools serve, or --resume without anything to resume.
    """
    args = list(args)
    if args[:1] == ["fit"]:
        args = args[1:]
    if args[:1] and args[0] in ("validate", "test", "predict"):
        raise ValueError(
            f"train.py has no {args[0]!r}: evaluate.py RUN gives the final figures of a run, "
            "predict.py RUN FILE… the classes of pictures"
        )
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--resume", nargs="?", const="")
    found, args = known.parse_known_args(args)
    resume, run = found.resume is not None, found.resume or None
    if run is not None and Path(run).suffix in (".yaml", ".yml"):  # --resume CONFIG
        args, run = [run, *args], None
    if args[:1] and not args[0].startswith("-"):
        args = ["--config", *args]
    known.add_argument("-c", "--config", action="append", default=[])
    configs = known.parse_known_args(args)[0].config
    return args, next(iter(configs), None), resume, run


def find_resumed(args: Sequence[str], config: str | None, run: str | None) -> Path:
    """The run folder that --resume means.

    Raises:
        ValueError: if there is nothing to go by.
        FileNotFoundError: if there is no such run.
    """
    where, _ = _where(args, config)
    if run is None:
        if where.name is None:
            raise ValueError("--resume needs CONFIG (its newest run is resumed) or a run folder")
        folder = newest_run(where.root, where.name)
    else:
        folder = Path(run)
        folder = folder.parent.parent if folder.suffix == ".ckpt" else folder
    for path in (folder / "config.yaml", checkpoint_path(folder, "last")):
        if not path.exists():
            raise FileNotFoundError(f"{folder} cannot be resumed: there is no {path}")
    return folder


def _where(args: Sequence[str], config: str | None) -> tuple[argparse.Namespace, list[str]]:
    """(root and name of the runs that are meant, the settings beside them)."""
    given = read_yaml(Path(config)) if config and Path(config).is_file() else None
    given = given if isinstance(given, dict) else {}
    own, trainer = given.get("run") or {}, given.get("trainer") or {}
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("-c", "--config")
    known.add_argument("--run.root", dest="root", default=own.get("root"))
    known.add_argument("--trainer.default_root_dir", dest="other", default=None)
    name = own.get("name") or (config_name(config) if config else None)
    known.add_argument("--run.name", dest="name", default=name)
    where, others = known.parse_known_args(args)
    where.root = where.root or where.other or trainer.get("default_root_dir") or RunConfig.root
    return where, others


def newest_run(root: str | os.PathLike[str], name: str) -> Path:
    """The newest run folder of a config.

    Raises:
        FileNotFoundError: naming where it looked, if there is none, or the newest has no last
            checkpoint: an older run is not taken in its place.
    """
    parent = runs_of(root, name)
    runs = [path.parent for path in parent.glob("*/config.yaml")]
    if not runs:
        raise FileNotFoundError(f"no run to resume in {parent}")
    newest = max(runs, key=lambda folder: (folder / "config.yaml").stat().st_mtime_ns)
    if not checkpoint_path(newest, "last").exists():
        older = sorted(f.name for f in runs if checkpoint_path(f, "last").exists())
        told = f"; to go on with an older one: --resume {parent / older[-1]}" if older else ""
        raise FileNotFoundError(
            f"the newest run, {newest}, ended before its first checkpoint: start it again{told}"
        )
    return newest


def config_name(path: str) -> str:
    """What the runs of a config are called: its path below the nearest folder `configs`.

    configs/vit.yaml is vit, configs/cifar10/vit.yaml cifar10-vit; elsewhere it is the file's name.
    """
    parts = Path(path).resolve().with_suffix("").parts
    below = len(parts) - 1
    if "configs" in parts[:-1]:
        below = len(parts) - parts[::-1].index("configs")
    return "-".join(parts[below:])


def main(args: Sequence[str] | None = None) -> Path:
    """Run `train.py` with these arguments (None: the command line's). Returns the run folder."""
    quieten()
    args, config, resume, run = split_arguments(sys.argv[1:] if args is None else args)
    if not resume:
        if config is None and not {"--help", "-h", "--print_config"} & {a[:14] for a in args}:
            raise ValueError("which config? train.py CONFIG, such as configs/vit.yaml")
        return TrainCLI(args, config_name(config) if config else "run").train()
    folder = find_resumed(args, config, run)
    _, others = _where(args, config)
    record = folder / "record.json"
    finished = record.is_file() and read_record(record).get("finished")
    if others or not finished:
        own = folder / "config.yaml"
        with about(own, "cannot be gone on with"):
            cli = TrainCLI(["--config", os.fspath(own), *others], folder.parent.name, folder)
        if not finished or cli.changed.keys() & {*ENDS, "run.test"}:
            return cli.train()
    print(f"{folder} is complete already: see {record}", flush=True)
    return folder
