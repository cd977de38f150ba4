"""`tools/evaluate.py` and `tools/predict.py`: trained models on a test part, and on own pictures.

evaluate.py RUN_OR_CHECKPOINT [--which best|last] [--data.root FOLDER] [--data.KEY VALUE …]
predict.py RUN_OR_CHECKPOINT FILE… [--top K] [--out picture.png]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from mmpreproj.analysis.records import write_json
from mmpreproj.data import UnreadableImage, load_image
from mmpreproj.data.image.transforms import EvalTransform
from mmpreproj.training.cli import quieten
from mmpreproj.training.image import ImageClassifier
from mmpreproj.training.metrics import percent
from mmpreproj.training.report import print_table
from mmpreproj.training.runs import environment, find_checkpoint, load_run

DRAWN = 64  # more pictures than this are listed but not drawn


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
    path: str, which: str = "best", overrides: dict[str, Any] | None = None, **trainer_args: Any
) -> tuple[dict[str, Any], Path]:
    """Test a run's weights on the reported split. Returns (what came out, folder for results).

    Raises:
        FileNotFoundError, ValueError: as `load_run`, and where the data do not fit the model.
    """
    module, data = load_run(path, which, overrides)  # type: ignore[arg-type]
    if data is None:
        raise ValueError(f"{path} does not say which data it was trained with")
    # One process: evaluation is then exact with any data module.
    arguments = {"accelerator": "auto", "devices": 1, **trainer_args}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(**arguments, **quiet)
    started = time.perf_counter()
    trainer.test(module, data, verbose=False)
    seconds = time.perf_counter() - started
    result = module.test_result
    if not result or not result.get("n"):
        raise ValueError(f"the test part is empty: {data.describe()}")
    record = {
        **module.facts(),
        "checkpoint": module.loaded,
        "data": data.describe() if hasattr(data, "describe") else {"name": type(data).__name__},
        "test": module.metrics(result),
        "seconds": seconds,
        "environment": environment(None, str(trainer.strategy.root_device)),
    }
    return record, find_checkpoint(path, which)[1]  # type: ignore[arg-type]


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
    parser.add_argument("--precision", default=None, help="as Lightning's Trainer takes it")
    known, rest = parser.parse_known_args(args)
    quieten()
    options = {"accelerator": known.accelerator, "precision": known.precision}
    options["enable_progress_bar"] = sys.stderr.isatty() or sys.stdout.isatty()
    record, folder = evaluate(known.run, known.which, split_overrides(rest), **options)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = f"evaluation-{Path(record['checkpoint']['file']).stem}-{stamp}"
    path, attempt = folder / f"{stem}.json", 1
    while path.exists():
        attempt += 1
        path = folder / f"{stem}-{attempt}.json"
    _print_evaluation(record, path)
    write_json(path, record)
    return path


def _print_evaluation(record: dict[str, Any], path: Path) -> None:
    test, checkpoint = record["test"], record["checkpoint"]
    loss = test["loss"]
    epoch = 0 if checkpoint["epoch"] is None else checkpoint["epoch"] + 1
    rows = [
        ["top-1 (95 % interval)", percent(test["top1"])],
        ["top-5 (95 % interval)", percent(test.get("top5"))],
        ["loss", "–" if loss["value"] is None else f"{loss['value']:.4f}  n = {loss['n']:,}"],
        ["weights", f"{checkpoint['weights']}, after {epoch} epochs"],
        ["checkpoint", checkpoint["file"]],
        ["written to", str(path)],
    ]
    table = []
    for row in record["per_class"]:
        shown = ["–", "–"]
        if row["interval95"] is not None:
            low, high = row["interval95"]
            shown = [f"{row['value']:.2%}", f"[{low:.2%}, {high:.2%}]"]
        table.append([row["class"], str(row["n"]), str(row["correct"]), *shown])
    print_table("By class", ["class", "n", "correct", "accuracy", "95 % interval"], table)
    print_table(f"{record['model']} on {record['data']['name']}", ["", ""], rows)


@torch.no_grad()
def predict(
    module: ImageClassifier, data: Any, files: Sequence[str], top: int = 5
) -> tuple[list[dict[str, Any]], list[str]]:
    """The likeliest classes of image files.

    Returns: ([{"file", "image" (PIL, upright RGB), "top": [(class, probability), …]}], errors that
    name the files which could not be read).
    """
    config = dict(module.data_config or {})
    transform = data.eval_transform() if data is not None else EvalTransform(config)
    classes = module.classes or [str(index) for index in range(module.num_classes or 0)]
    found, errors = [], []
    for file in files:
        try:
            image = load_image(file, 3)
            pixels = transform(image)
        except (UnreadableImage, OSError) as error:
            reason = str(error)
            errors.append(reason if str(file) in reason else f"{file}: {reason}")
            continue
        logits = module(pixels[None].to(module.device))[0].float()
        scores = logits.sigmoid() if module.hparams.bce else logits.softmax(0)
        values, indices = scores.topk(min(top, len(classes)))
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        found.append(
            {"file": str(file), "image": image, "top": [(classes[i], value) for i, value in pairs]}
        )
    return found, errors


def predict_main(args: Sequence[str] | None = None) -> int:
    """`predict.py` with these arguments. Returns the exit status: 1 if a file was unreadable."""
    parser = argparse.ArgumentParser(
        "predict.py", description="The likeliest classes of your own pictures."
    )
    parser.add_argument("run", help="a run folder, or a .ckpt file")
    parser.add_argument("files", nargs="+", metavar="FILE", help="pictures, of any common format")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="classes a picture (5)")
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument(
        "--out", default="predictions.png", metavar="PNG", help="where to draw (predictions.png)"
    )
    known = parser.parse_args(args)
    if known.top < 1:
        parser.error(f"--top must be 1 or more, found {known.top}")
    quieten()
    module, data = load_run(known.run, known.which)
    found, errors = predict(module, data, known.files, known.top)
    if found:
        label = "score" if module.hparams.bce else "probability"
        rows = [
            [row["file"] if rank == 0 else "", name, f"{value:.2%}"]
            for row in found
            for rank, (name, value) in enumerate(row["top"])
        ]
        print_table(f"{module.hparams.model}", ["file", "class", label], rows)
        _draw(found, known.out, f"{module.hparams.model}: {label} of the likeliest classes")
    for error in errors:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1 if errors else 0


def _draw(found: list[dict[str, Any]], out: str, title: str) -> None:
    try:
        from mmpreproj.analysis.plots import predictions
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr, flush=True)
        return
    shown = found[:DRAWN]
    images = [row["image"] for row in shown]
    names = [Path(row["file"]).name for row in shown]
    path = predictions(images, names, [row["top"] for row in shown], out, title)
    more = "" if len(shown) == len(found) else f" (the first {len(shown)} of {len(found)})"
    print(f"drawn{more}: {path}", flush=True)
