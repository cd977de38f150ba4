"""A run at its end (test, record, plots), and after it (its model loaded back, and evaluated)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, Trainer

import mmpreproj
from mmpreproj.analysis.records import environment, peak_memory, write_json
from mmpreproj.analysis.skip import skip_strength, write_csv
from mmpreproj.backbones.modes import is_sharded
from mmpreproj.data.loaders import Answers
from mmpreproj.messages import about, explain, listed
from mmpreproj.training.callbacks import BestCheckpoint, Clock
from mmpreproj.training.console import print_table
from mmpreproj.training.run_folder import CHECKPOINTS, checkpoint_path
from mmpreproj.training.sharding import read_checkpoint
from mmpreproj.training.trained_module import TrainedModule, parameter_counts

__all__ = ["evaluate", "finish_run", "load_run"]

Which = Literal["best", "last"]


def find_checkpoint(path: str | os.PathLike[str], which: Which = "best") -> tuple[Path, Path]:
    """(checkpoint, folder that results go to) of a run folder or a .ckpt file.

    A run without a best checkpoint (it had no validation) gives its last, which then is its best.

    Raises:
        FileNotFoundError: naming what is missing.
        ValueError: if `which` is neither.
    """
    path = Path(path)
    if which not in ("best", "last"):
        raise ValueError(f"which must be best or last, found {which!r}")
    if path.is_dir() and path.suffix != ".ckpt":  # a sharded checkpoint is a folder, too
        for file in (checkpoint_path(path, which), checkpoint_path(path, "last")):
            if file.exists():
                return file, path
        raise FileNotFoundError(
            f"{path} is no run folder, or has not finished an epoch: there is no "
            f"{checkpoint_path(path, which)}"
        )
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such run folder or checkpoint")
    return path, path.parent.parent if path.parent.name == CHECKPOINTS else path.parent


def load_run(
    path: str | os.PathLike[str],
    which: Which = "best",
    overrides: Mapping[str, Any] | None = None,
) -> tuple[TrainedModule, LightningDataModule | None]:
    """The trained model of a run, in eval mode on the CPU, and its data module, not set up yet.

    Nothing but the checkpoint is read, and no code in it is run. `module.loaded` says which file,
    epoch, step and weights (EMA or not) it is.

    Args:
        path: a run folder, or a .ckpt file wherever it lies.
        which: which checkpoint of a folder.
        overrides: init arguments of the data module to replace, such as {"root": "my/images"}.

    Returns:
        (module, data module); the latter None if the checkpoint does not say what it was.

    Raises:
        FileNotFoundError: if there is no such run.
        ValueError: if the file is no checkpoint of ours, or an override does not fit.
    """
    file, _ = find_checkpoint(path, which)
    with about(file, "is not a checkpoint of mmpreproj.training"):
        checkpoint = read_checkpoint(file)
        own, hyper = checkpoint["mmpreproj"], checkpoint["hyper_parameters"]
        class_path, spec = own["model"]["class_path"], own.get("data")
    with about(file, "cannot be loaded"):
        module = _trusted_class(class_path, TrainedModule)(**{**hyper, "compile": False})
        module.on_load_checkpoint(checkpoint)
        module.configure_model()
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        module.eval()
        module.loaded = {
            "file": str(file),
            "which": which if Path(path) != file else None,
            "weights": module.evaluated_weights,
            # The last epoch that was finished; a checkpoint's own number counts a begun one too.
            "epoch": module.history[-1]["epoch"] if module.history else None,
            "step": checkpoint["global_step"],
            "precision": own.get("precision"),
        }
    if spec is not None:
        with about(file, "does not give its data"):
            return module, make_data(spec, module, overrides or {})
    if overrides:
        raise ValueError(f"{file} does not say which data module it was trained with")
    return module, None


def make_data(
    spec: Mapping[str, Any], module: TrainedModule, overrides: Mapping[str, Any]
) -> LightningDataModule:
    """A data module from {"class_path", "init_args"}, with the model's classes and input."""
    from jsonargparse import ArgumentError, ArgumentParser

    kind = _trusted_class(spec["class_path"], LightningDataModule)
    path = f"{kind.__module__}.{kind.__qualname__}"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    init = module.data_spec(dict(spec.get("init_args") or {}))
    arguments = [f"--data.{key}={value}" for key, value in overrides.items()]
    try:
        with _importing_none_of(init):
            parser.set_defaults({"data": {"class_path": path, "init_args": init}})
            config = parser.parse_args(arguments)
        data = parser.instantiate(config).data
    except (ArgumentError, ValueError, TypeError) as error:
        raise ValueError(f"data of the run: {explain(error, parser)}") from error
    module.adopt(data)
    return data


def _trusted_class(path: str, base: type) -> type:
    """The class of that name, if it is of this package or imported already: a checkpoint must not
    be able to make Python import code.

    Older checkpoints name the file that a class of this package was in (mmpreproj.training.image):
    such a class is looked for in its room, whatever files that has now.
    """
    module, _, name = path.rpartition(".")
    owner = sys.modules.get(module)
    if module.split(".")[0] == "mmpreproj":
        owner = importlib.import_module(".".join(module.split(".")[:2]))
        owner = owner if hasattr(owner, name) else importlib.import_module(module)
    found = getattr(owner, name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(
            f"the checkpoint names {path}, which is no {base.__name__} that is imported already; "
            f"import {module} first if you trust it"
        )
    return found


@contextlib.contextmanager
def _importing_none_of(settings: Any) -> Iterator[None]:
    """Python does not import modules that are named in the settings, and are not imported already.

    A parser of settings takes any of them for the path of a class, where a class may stand.
    """
    named, values = set(), [settings]
    while values:
        value = values.pop()
        if isinstance(value, str):
            named.add(value.partition(".")[0])
        elif isinstance(value, Mapping | list | tuple):
            values.extend(value.values() if isinstance(value, Mapping) else value)
    refused = named - set(sys.modules)

    class Refusing(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name in refused:
                raise ImportError(f"the checkpoint names {name}; import it first if you trust it")

    finder = Refusing()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def evaluate(
    path: str,
    which: Which = "best",
    overrides: Mapping[str, Any] | None = None,
    evaluations: Mapping[str, Any] | None = None,
    **trainer_args: Any,
) -> tuple[dict[str, Any], list[list[str]], Path]:
    """Test a run's weights on the reported split.

    Args:
        path, which, overrides: see `load_run`.
        evaluations: of a language model, in place of its config's: see EvaluationConfig.
        trainer_args: for Lightning's Trainer; without a precision among them, it is the run's.

    Returns: (what came out, the rows [label, figure] that sum it up, folder for results).

    Raises:
        FileNotFoundError, ValueError: as `load_run`, and where the data do not fit the model.
    """
    module, data = load_run(path, which, overrides)
    if data is None:
        raise ValueError(f"{path} does not say which data it was trained with")
    if evaluations is not None:
        module.replace_evaluations(evaluations)
    # One process: evaluation is then exact with any data module.
    arguments = {"accelerator": "auto", "devices": 1, **trainer_args}
    if arguments.get("precision") is None:
        precision = module.loaded["precision"]
        half = precision is not None and precision.startswith("16")
        arguments["precision"] = None if half and not torch.cuda.is_available() else precision
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(**arguments, **quiet)
    started = time.perf_counter()
    trainer.test(module, data, verbose=False)
    seconds = time.perf_counter() - started
    if not module.test_result or not module.test_result.get("n"):
        raise ValueError(f"the test split is empty: {Answers(data).describe()}")
    record = {
        **module.facts(),
        "checkpoint": module.loaded,
        "data": Answers(data).describe(),
        "test": module.metrics(module.test_result),
        "seconds": seconds,
        "environment": environment(None, str(trainer.strategy.root_device)),
    }
    return record, module.headline(record["test"]), find_checkpoint(path, which)[1]


def finish_run(
    trainer: Trainer,
    module: TrainedModule,
    data: LightningDataModule,
    folder: Path,
    best: BestCheckpoint,
    clock: Clock,
    seed: int | None,
    test: bool = True,
) -> None:
    """Test the best weights of a run that has been fitted; write and print what came out.

    Called on every process; only rank zero writes.

    Args:
        best, clock: the callbacks that watched the run.
        test: read the reported split.
    """
    chosen = _choose(trainer, module, best)
    # The test loads the best checkpoint, with the clock and the history as they were at its epoch;
    # what is told is the whole run.
    training = {
        "seconds": clock.seconds,
        "train_seconds": clock.train_seconds,
        f"{module.counts}_per_second": clock.per_second(trainer.world_size),
        "processes": trainer.world_size,
    }
    history, updates = module.history, trainer.global_step
    test = test and Answers(data).has_split("test")
    if test:
        trainer.test(module, data, ckpt_path=chosen["file"], weights_only=True, verbose=False)
        module.history = history
    Answers(data).gather_bad_files()
    if is_sharded(module):
        module.gather(folder)
    if not trainer.is_global_zero:
        return
    reported = _reported(chosen["file"], module, test)
    examples = module.examples
    if examples is not None and examples.is_floating_point():  # of a model in half precision
        examples = examples.float()
    rows = skip_strength(reported.evaluated.float(), examples) if reported else []
    validated = [row["val/n"] for row in history if row.get("val/n")]
    at_best = best.best_validation
    if at_best is None:  # the checkpoint does not tell
        row = next((row for row in history if row["epoch"] == chosen["epoch"]), {})
        at_best = {key[4:]: value for key, value in row.items() if key.startswith("val/")}
    record = {
        "finished": True,
        "name": folder.parent.name,
        "run": folder.name,
        "seed": seed,
        **module.facts(),
        "data": Answers(data).describe(),
        "checkpoint": {**chosen, "file": chosen["file"] and Path(chosen["file"]).name},
        "test": module.metrics(module.test_result),
        "validation": module.metrics(at_best),
        "diverged": _diverged(history, module.test_result),
        "n": {
            "train": history[-1]["train/n"] if history else None,
            "val": validated[-1] if validated else None,
            "test": module.test_result["n"] if module.test_result else None,
        },
        "epochs": len(history),
        "updates": updates,
        "training": training,
        "parameters": parameter_counts(reported.model) if reported else None,
        "peak_bytes": peak_memory(),
        "skip_strength": rows,
        "environment": environment(seed, str(trainer.strategy.root_device)),
        "mmpreproj": mmpreproj.__version__,
    }
    write_json(folder / "record.json", record)
    _plots(folder, module, history, rows)
    module.finish(folder, reported, data)
    print_summary(record, folder, module.headline(record["test"] or {}))


def _reported(file: str | None, module: TrainedModule, tested: bool) -> TrainedModule | None:
    """The model whose figures are reported, whole and on the CPU, however training split it.

    Args:
        file: the checkpoint that was chosen; None: there is none, the weights are as they are.
        tested: the test has loaded that checkpoint into the module.
    """
    if is_sharded(module):  # a checkpoint that is a folder may be more than one process can hold
        return load_run(file)[0] if file and Path(file).is_file() else None
    if file is None or (tested and module.large):
        return module.cpu()
    return load_run(file)[0]


def _choose(trainer: Trainer, module: TrainedModule, best: BestCheckpoint) -> dict[str, Any]:
    """Which checkpoint is reported, and why."""
    monitor, mode = module.monitor
    found: dict[str, Any] = {"weights": module.evaluated_weights, monitor.replace("/", "_"): None}
    if best.best_model_path:
        tie = "" if monitor == "val/loss" else ", of equal ones the lowest val/loss"
        return found | {
            "which": "best",
            "why": f"{'highest' if mode == 'max' else 'lowest'} {monitor}{tie}",
            "epoch": best.best_epoch,
            monitor.replace("/", "_"): float(best.best_model_score),
            "file": best.best_model_path,
        }
    why = "there is no validation split, so the last epoch is the best known"
    if sum(trainer.num_val_batches):
        why = "the run ended before its first validation: what it ended with is reported"
    last = [c.best_model_path for c in trainer.checkpoint_callbacks if c is not best]
    return found | {
        "which": "last",
        "why": why,
        "epoch": len(module.history) - 1 if module.history else None,
        "file": next((path for path in last if path), None),
    }


def _diverged(history: list[dict[str, Any]], tested: dict[str, Any] | None) -> str | None:
    """Which losses are no finite numbers; None where all are."""
    epochs = [row["epoch"] + 1 for row in history if row["train/loss"] is None]
    found = [f"training, epoch {listed(epochs)}"] * bool(epochs)
    found += ["test"] * (not math.isfinite((tested or {}).get("loss") or 0))
    return f"losses that are no finite numbers: {'; '.join(found)}" if found else None


def _plots(
    folder: Path, module: TrainedModule, history: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> None:
    if rows:
        write_csv(folder / "skip_strength.csv", rows)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: they need matplotlib (pip install matplotlib)", flush=True)
        return
    from mmpreproj.analysis import plots

    title = f"{folder.parent.name} / {folder.name}"
    plots.learning_curves(history, folder / "learning_curves.png", title)
    if rows:
        n = None if module.examples is None else len(module.examples)
        path = folder / "skip_strength.png"
        plots.skip_by_layer(rows, path, f"Content skip by layer: {title}", n)


def print_summary(record: dict[str, Any], folder: Path, headline: list[list[str]]) -> None:
    """What a run came to, on one screen."""
    chosen, training, counts = (record[key] for key in ("checkpoint", "training", "parameters"))
    epoch = "–" if chosen["epoch"] is None else chosen["epoch"] + 1
    of = f"{chosen['weights']} weights, epoch {epoch} of {record['epochs']}"
    parameters = "–"
    if counts is not None:
        new, trained = f"{counts['new']:,} new", f"{counts['trainable']:,} trained"
        parameters = f"{counts['total']:,} ({new}, {trained})"
    told = f"{training['seconds']:.1f} s"
    for name, speed in training.items():
        if name.endswith("_per_second") and speed is not None:
            told += f", {speed:,.0f} {name.removesuffix('_per_second')}/s"
    rows = [["weights", f"{chosen['which']} ({of})"], ["parameters", parameters]]
    rows = [*headline, *rows, ["training", told], ["run", str(folder)]]
    if record["diverged"]:
        rows.insert(0, ["DIVERGED", record["diverged"]])
    print_table(f"{record['name']}, seed {record['seed']}", rows)
