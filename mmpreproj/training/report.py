"""The end of a run: the test, once, on the best weights; record, plots and a short summary."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

import mmpreproj
from mmpreproj.analysis.records import write_json
from mmpreproj.analysis.skip import skip_strength, write_csv
from mmpreproj.backbones import building
from mmpreproj.data.loaders import Answers
from mmpreproj.training.callbacks import Clock, peak_memory
from mmpreproj.training.checkpoints import BestCheckpoint
from mmpreproj.training.module import TrainedModule
from mmpreproj.training.runs import environment, load_run


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
    if not trainer.is_global_zero:
        return
    reported = _reported(chosen["file"], module, test)
    rows = skip_strength(reported.evaluated.float(), module.examples_float()) if reported else []
    values = [row[name] for row in history for name in ("val/n",) if row.get(name)]
    at_best = next((row for row in history if row["epoch"] == chosen["epoch"]), None)
    record = {
        "finished": True,
        "name": folder.parent.name,
        "run": folder.name,
        "seed": seed,
        **module.facts(),
        "data": Answers(data).describe(),
        "checkpoint": {**chosen, "file": chosen["file"] and Path(chosen["file"]).name},
        "test": module.metrics(module.test_result),
        "validation": None
        if at_best is None or not at_best.get("val/n")
        else module.metrics({key[4:]: v for key, v in at_best.items() if key.startswith("val/")}),
        "n": {
            "train": history[-1]["train/n"] if history else None,
            "val": values[-1] if values else None,
            "test": module.test_result["n"] if module.test_result else None,
        },
        "epochs": len(history),
        "updates": updates,
        "training": training,
        "parameters": building.parameter_counts(reported.model) if reported else None,
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
    if file is None or (tested and module.large):
        return module.cpu()
    try:
        return load_run(file)[0]
    except (FileNotFoundError, ValueError):  # a sharded checkpoint, which is a folder
        return None


def _choose(trainer: Trainer, module: TrainedModule, best: BestCheckpoint) -> dict[str, Any]:
    """Which checkpoint is reported, and why."""
    facts: dict[str, Any] = {"weights": module.evaluated_weights}
    monitor, mode = module.monitor
    name = monitor.replace("/", "_")
    if best.best_model_path:
        score = float(best.best_model_score)
        tie = "" if monitor == "val/loss" else ", of equal ones the lowest val/loss"
        return facts | {
            "which": "best",
            "why": f"{'highest' if mode == 'max' else 'lowest'} {monitor}{tie}",
            "epoch": best.best_epoch,
            name: score,
            "file": best.best_model_path,
        }
    why = "there is no validation part, so the last epoch is the best known"
    if sum(trainer.num_val_batches):
        why = "the run ended before its first validation: what it ended with is reported"
    last = [c.best_model_path for c in trainer.checkpoint_callbacks if c is not best]
    return facts | {
        "which": "last",
        "why": why,
        "epoch": len(module.history) - 1 if module.history else None,
        name: None,
        "file": next((path for path in last if path), None),
    }


def _plots(
    folder: Path,
    module: TrainedModule,
    history: list[dict[str, Any]],
    rows: list[dict[str, Any]],
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


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table by rich where it is installed, else by spaces."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        lines = [[c.ljust(w) for c, w in zip(r, widths, strict=True)] for r in [columns, *rows]]
        print("\n".join([title, *("  ".join(line).rstrip() for line in lines)]), flush=True)
        return
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_summary(record: dict[str, Any], folder: Path, headline: list[list[str]]) -> None:
    """What a run came to, on one screen."""
    chosen, training = record["checkpoint"], record["training"]
    epoch = "–" if chosen["epoch"] is None else str(chosen["epoch"] + 1)
    which = f"{chosen['which']} ({chosen['weights']} weights, epoch {epoch} of {record['epochs']})"
    rows = [
        *headline,
        ["weights", which],
        ["parameters", _parameters(record["parameters"])],
        ["training", _training(training)],
        ["run", str(folder)],
    ]
    print_table(f"{record['name']}, seed {record['seed']}", ["", ""], rows)


def _training(training: dict[str, Any]) -> str:
    seconds = f"{training['seconds']:.1f} s"
    speeds = [(k, v) for k, v in training.items() if k.endswith("_per_second") and v is not None]
    return seconds + "".join(f", {v:,.0f} {k.removesuffix('_per_second')}/s" for k, v in speeds)


def _parameters(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "–"
    return f"{counts['total']:,} ({counts['new']:,} new, {counts['trainable']:,} trained)"
