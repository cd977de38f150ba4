"""`tools/evaluate.py`: final figures of a trained model on a test part.

evaluate.py RUN_OR_CHECKPOINT [--which best|last] [--data.root FOLDER] [--data.KEY VALUE …]
evaluate.py RUN_OR_CHECKPOINT --evaluations YAML     other tasks for a language model
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from mmpreproj.analysis.records import read_yaml, write_json
from mmpreproj.data.loaders import Answers
from mmpreproj.training.cli import quieten
from mmpreproj.training.report import print_table
from mmpreproj.training.runs import environment, find_checkpoint, load_run


def split_overrides(words: Sequence[str]) -> dict[str, str]:
    """`--data.KEY VALUE` and `--data.KEY=VALUE` as {KEY: VALUE}.

    Raises:
        ValueError: naming any other word, or a key without a value.
    """
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--data."):
            raise ValueError(f"unknown argument {word!r}; only --data.KEY VALUE may follow")
        key, equals, value = word.removeprefix("--data.").partition("=")
        if not equals:
            if not rest:
                raise ValueError(f"{word} needs a value")
            value = rest.pop(0)
        found[key.removeprefix("init_args.")] = value
    return found


def evaluate(
    path: str,
    which: str = "best",
    overrides: dict[str, Any] | None = None,
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
    module, data = load_run(path, which, overrides)  # type: ignore[arg-type]
    if data is None:
        raise ValueError(f"{path} does not say which data it was trained with")
    if evaluations is not None:
        module.replace_evaluations(evaluations)
    # One process: evaluation is then exact with any data module.
    arguments = {"accelerator": "auto", "devices": 1, **trainer_args}
    if arguments.get("precision") is None:
        arguments["precision"] = _precision(module.loaded["precision"])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(**arguments, **quiet)
    started = time.perf_counter()
    trainer.test(module, data, verbose=False)
    seconds = time.perf_counter() - started
    result = module.test_result
    if not result or not result.get("n"):
        raise ValueError(f"the test part is empty: {Answers(data).describe()}")
    record = {
        **module.facts(),
        "checkpoint": module.loaded,
        "data": Answers(data).describe(),
        "test": module.metrics(result),
        "seconds": seconds,
        "environment": environment(None, str(trainer.strategy.root_device)),
    }
    rows = module.headline(record["test"])
    return record, rows, find_checkpoint(path, which)[1]  # type: ignore[arg-type]


def _precision(of_run: str | None) -> str | None:
    """The run's, where this machine has it."""
    half = of_run is not None and of_run.startswith("16")
    return None if half and not torch.cuda.is_available() else of_run


def _read_evaluations(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    content = read_yaml(Path(path))
    if not isinstance(content, dict) or not all(isinstance(v, dict) for v in content.values()):
        raise ValueError(
            f"{path} must map names to evaluations, such as "
            "lambada: {task: lambada, source: lambada.jsonl}"
        )
    return content


def evaluate_main(args: Sequence[str] | None = None) -> Path:
    """`evaluate.py` with these arguments. Returns the JSON file that it wrote."""
    parser = argparse.ArgumentParser(
        "evaluate.py",
        usage="%(prog)s RUN_OR_CHECKPOINT [--which best|last] [--data.KEY VALUE …]",
        description="Final figures of a trained model on the reported split, with 95 % intervals.",
    )
    parser.add_argument("run", help="a run folder, or a .ckpt file")
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument("--accelerator", default="auto", help="as Lightning's Trainer takes it")
    parser.add_argument("--precision", help="as Lightning's Trainer takes it; default: the run's")
    parser.add_argument("--evaluations", help="YAML of what a language model is evaluated on")
    known, rest = parser.parse_known_args(args)
    quieten()
    options = {"accelerator": known.accelerator, "precision": known.precision}
    options["enable_progress_bar"] = sys.stderr.isatty() or sys.stdout.isatty()
    tasks = _read_evaluations(known.evaluations)
    overrides = split_overrides(rest)
    record, rows, folder = evaluate(known.run, known.which, overrides, tasks, **options)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = f"evaluation-{Path(record['checkpoint']['file']).stem}-{stamp}"
    path, attempt = folder / f"{stem}.json", 1
    while path.exists():
        attempt += 1
        path = folder / f"{stem}-{attempt}.json"
    _print_evaluation(record, rows, path)
    write_json(path, record)
    return path


def _print_evaluation(record: dict[str, Any], headline: list[list[str]], path: Path) -> None:
    test, checkpoint = record["test"], record["checkpoint"]
    loss = test["loss"]
    epoch = 0 if checkpoint["epoch"] is None else checkpoint["epoch"] + 1
    rows = [
        *headline,
        ["loss", "–" if loss["value"] is None else f"{loss['value']:.4f}  n = {loss['n']:,}"],
        ["weights", f"{checkpoint['weights']}, after {epoch} epoch{'' if epoch == 1 else 's'}"],
        ["checkpoint", checkpoint["file"]],
    ]
    per_class = record.get("per_class") or []
    sets = per_class if isinstance(per_class, dict) else {"class": per_class}
    for name, found in sets.items():
        if found:
            columns = [name, "n", "correct", "accuracy", "95 % interval"]
            print_table(f"By {name}", columns, [_class_cells(row) for row in found])
    print_table(f"{record['model']} on {record['data']['name']}", ["", ""], rows)
    print(f"written to {path}", flush=True)


def _class_cells(row: dict[str, Any]) -> list[str]:
    shown = ["–", "–"]
    if row["interval95"] is not None:
        low, high = row["interval95"]
        shown = [f"{row['value']:.2%}", f"[{low:.2%}, {high:.2%}]"]
    return [row["class"], str(row["n"]), str(row["correct"]), *shown]
