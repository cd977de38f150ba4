"""`tools/predict.py`: what a trained model makes of a person's own pictures, clips or prompts.

predict.py RUN_OR_CHECKPOINT FILE… [--top K] [--out picture.png]     pictures, or clips
predict.py RUN_OR_MODEL PROMPT… [--tokens N] [--temperature X] [--seed S] [--adapter FOLDER]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmpreproj.training.cli import quieten
from mmpreproj.training.module import TrainedModule
from mmpreproj.training.report import print_table
from mmpreproj.training.runs import load_run

DRAWN = 64  # more files than this are listed but not drawn


@torch.no_grad()
def predict(
    module: TrainedModule, data: Any, files: Sequence[str], top: int = 5
) -> tuple[list[dict[str, Any]], list[str]]:
    """The likeliest classes of image files, or of video files for a video model.

    Returns: ([{"file", "image" (PIL, upright RGB) or "frames" (uint8 [T, H, W, 3]), "top": [(class,
    probability), …]}], errors that name the files which could not be read). With several label sets
    "top" is the likeliest of the first, and "sets" has all.
    """
    read = _read_video if module.needs == "clips" else _read_image
    found, errors = [], []
    for file in files:
        try:
            shown, pixels = read(module, data, file)
        except (ValueError, OSError) as error:  # UnreadableImage and UnreadableVideo are among them
            reason = str(error)
            errors.append(reason if str(file) in reason else f"{file}: {reason}")
            continue
        sets = {
            name: _likeliest(scores, classes, top)
            for name, scores, classes in _scores(module, pixels[None].to(module.device))
        }
        found.append({"file": str(file), **shown, "sets": sets, "top": next(iter(sets.values()))})
    return found, errors


def _read_image(module: TrainedModule, data: Any, file: str) -> tuple[dict[str, Any], Any]:
    from mmpreproj.data.image.image_files import EvalTransform, load_image

    config = dict(module.data_config or {})
    transform = data.eval_transform() if data is not None else EvalTransform(config)
    image = load_image(file, 3)
    return {"image": image}, transform(image)


def _read_video(module: TrainedModule, data: Any, file: str) -> tuple[dict[str, Any], Any]:
    if data is None:
        raise ValueError("the checkpoint does not say how its clips were sampled")
    transform = data.eval_transform()
    frames = transform.frames(file)
    return {"frames": frames[len(frames) // 2]}, transform.of_frames(frames)


def _scores(module: TrainedModule, pixels: torch.Tensor) -> list[tuple[str, Any, list[str]]]:
    """(label set, probabilities [K], class names) for each label set."""
    if module.needs == "clips":
        assert module.label_sets is not None
        parts = [part[0].exp() for part in module.log_probabilities(pixels)]
        named = zip(module.label_sets.items(), parts, strict=True)
        return [(name, scores, classes) for (name, classes), scores in named]
    logits = module(pixels)[0].float()
    classes = module.classes or [str(index) for index in range(module.num_classes or 0)]
    return [("class", logits.sigmoid() if module.hparams.bce else logits.softmax(0), classes)]


def _likeliest(scores: torch.Tensor, classes: list[str], top: int) -> list[tuple[str, float]]:
    values, indices = scores.topk(min(top, len(classes)))
    pairs = zip(indices.tolist(), values.tolist(), strict=True)
    return [(classes[index], value) for index, value in pairs]


def predict_main(args: Sequence[str] | None = None) -> int:
    """`predict.py` with these arguments. Returns the exit status: 1 if a file was unreadable."""
    parser = argparse.ArgumentParser(
        "predict.py",
        description="The likeliest classes of your own pictures or clips; prompts continued.",
    )
    parser.add_argument(
        "run", help="a run folder or a .ckpt file; for prompts also a model's name, folder or .gguf"
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="FILE_OR_PROMPT", help="pictures, clips, or texts to continue"
    )
    parser.add_argument("--which", choices=("best", "last"), default="best")
    classes = parser.add_argument_group("pictures and clips")
    classes.add_argument("--top", type=int, default=5, metavar="K", help="classes a file (5)")
    classes.add_argument(
        "--out", default="predictions.png", metavar="PNG", help="where to draw (predictions.png)"
    )
    text = parser.add_argument_group("prompts")
    text.add_argument("--adapter", help="folder of mmpreproj.save or of PEFT, for a model by name")
    text.add_argument("--tokens", type=int, default=60, metavar="N", help="new tokens (60)")
    text.add_argument("--seed", type=int, help="sample with this seed (greedy without)")
    text.add_argument("--temperature", type=float, default=1.0, help="of sampling (1.0)")
    known = parser.parse_args(args)
    if known.top < 1:
        parser.error(f"--top must be 1 or more, found {known.top}")
    if known.tokens < 1:
        parser.error(f"--tokens must be 1 or more, found {known.tokens}")
    quieten()
    if known.adapter is not None or not _is_run(known.run):
        return _continue_with_model(known)
    module, data = load_run(known.run, known.which)
    if module.predicts == "text":
        return _continue(module.evaluated, module.tokenizer, known)
    found, errors = predict(module, data, known.inputs, known.top)
    if found:
        _show(module, found, known.out)
    for error in errors:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1 if errors else 0


def _is_run(path: str) -> bool:
    """Whether it is a run or a checkpoint, not a language model by name, folder or file."""
    place = Path(path)
    if place.is_dir():
        return not (place / "config.json").is_file() and not any(place.glob("*.gguf"))
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not place.parent.is_dir()
    return place.suffix == ".ckpt" or not (
        hub or place.suffix == ".gguf" or path.startswith("package:")
    )


def _continue_with_model(known: argparse.Namespace) -> int:
    from mmpreproj.backbones.lm import load_with_adapter

    loaded = load_with_adapter(known.run, known.adapter)
    return _continue(loaded.model, loaded.tokenizer, known)


def _continue(model: Any, tokenizer: Any, known: argparse.Namespace) -> int:
    from mmpreproj.evaluation.encoding import continue_text

    sampling = {} if known.seed is None else {"temperature": known.temperature}
    for prompt in known.inputs:
        print(continue_text(model, tokenizer, prompt, known.tokens, known.seed, **sampling))
        print(flush=True)
    return 0


def _show(module: TrainedModule, found: list[dict[str, Any]], out: str) -> None:
    label = "score" if module.hparams.bce else "probability"
    several = len(found[0]["sets"]) > 1
    rows = [
        [row["file"] if place == rank == 0 else "", *([name] if several else []), c, f"{value:.2%}"]
        for row in found
        for place, (name, top) in enumerate(row["sets"].items())
        for rank, (c, value) in enumerate(top)
    ]
    columns = ["file", *(["labels"] if several else []), "class", label]
    print_table(f"{module.hparams.model}", columns, rows)
    try:
        from mmpreproj.analysis import plots
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr, flush=True)
        return
    shown = found[:DRAWN]
    names = [Path(row["file"]).name for row in shown]
    title = f"{module.hparams.model}: {label} of the likeliest classes"
    images = [row["frames"] if "frames" in row else row["image"] for row in shown]
    path = plots.predictions(images, names, [row["sets"] for row in shown], out, title)
    more = "" if len(shown) == len(found) else f" (the first {len(shown)} of {len(found)})"
    print(f"drawn{more}: {path}", flush=True)
