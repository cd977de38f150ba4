"""Final figures of a trained model on the reported split, with 95 % intervals.

python tools/evaluate.py RUN_OR_CHECKPOINT [--which best|last] [--files] [--data.KEY VALUE …]
python tools/evaluate.py RUN_OR_CHECKPOINT --evaluations YAML  other tasks for a language model
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmpreproj.analysis.records import read_yaml, write_json
from mmpreproj.training.console import print_table, quieten, run_tool
from mmpreproj.training.per_file import PerFile
from mmpreproj.training.runs import evaluate


def split_overrides(words: Sequence[str]) -> dict[str, str]:
    """`--data.KEY VALUE` and `--data.KEY=VALUE` as {KEY: VALUE}.

    Raises:
        ValueError: naming any other word, or a key without a value.
    """
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("--data."):
            raise ValueError(f"unknown argument {word!r}; only --data.KEY VALUE may follow")
        key, equals, value = word.removeprefix("--data.").partition("=")
        given = value if equals else next(rest, None)
        if given is None:
            raise ValueError(f"{word} needs a value")
        found[key.removeprefix("init_args.")] = given
    return found


def main(args: Sequence[str] | None = None) -> Path:
    """`evaluate.py` with these arguments. Returns the JSON file that it wrote."""
    parser = argparse.ArgumentParser(
        "evaluate.py",
        usage="%(prog)s RUN_OR_CHECKPOINT [--which best|last] [--data.KEY VALUE …]",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("run", help="a run folder, or a .ckpt file")
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument("--accelerator", default="auto", help="as Lightning's Trainer takes it")
    parser.add_argument("--precision", help="as Lightning's Trainer takes it; default: the run's")
    parser.add_argument("--evaluations", help="YAML of what a language model is evaluated on")
    parser.add_argument(
        "--files",
        action="store_true",
        help="also write a table of all files, and one of confusions",
    )
    known, rest = parser.parse_known_args(args)
    quieten()
    options = {"accelerator": known.accelerator, "precision": known.precision}
    options["enable_progress_bar"] = sys.stderr.isatty() or sys.stdout.isatty()
    tasks = _read_evaluations(known.evaluations)
    overrides = split_overrides(rest)
    per_file = PerFile()
    if known.files:
        options["callbacks"] = [per_file]
    record, rows, folder = evaluate(known.run, known.which, overrides, tasks, **options)
    stem = f"evaluation-{Path(record['checkpoint']['file']).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, attempt = folder / f"{stem}.json", 1
    while path.exists():
        attempt += 1
        path = folder / f"{stem}-{attempt}.json"
    _print_evaluation(record, rows, path)
    write_json(path, record)
    for table in per_file.write(path.with_suffix("")):
        print(f"written to {table}", flush=True)
    return path


def _read_evaluations(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    content = read_yaml(path)
    if not all(isinstance(value, dict) for value in content.values()):
        raise ValueError(
            f"{path} must map names to evaluations, such as "
            "lambada: {task: lambada, source: lambada.jsonl}"
        )
    return content


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
            print_table(f"By {name}", [_class_cells(row) for row in found], columns)
    print_table(f"{record['model']} on {record['data']['name']}", rows)
    print(f"written to {path}", flush=True)


def _class_cells(row: dict[str, Any]) -> list[str]:
    shown = ["–", "–"]
    if row["interval95"] is not None:
        low, high = row["interval95"]
        shown = [f"{row['value']:.2%}", f"[{low:.2%}, {high:.2%}]"]
    return [row["class"], str(row["n"]), str(row["correct"]), *shown]


if __name__ == "__main__":
    sys.exit(run_tool(main))
