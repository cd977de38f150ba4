"""What a trained model makes of your own pictures, clips or prompts.

python tools/predict.py RUN_OR_ADAPTER FILE_OR_FOLDER… [--top K] [--out picture.png]
python tools/predict.py RUN_OR_MODEL_OR_ADAPTER PROMPT… [--tokens N] [--temperature X] [--seed S]
                        [--adapter FOLDER]
Both take --device, --dtype and --table predictions.csv (or .jsonl). An adapter names its base.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

import mmpreproj
from mmpreproj.backbones.building import input_config
from mmpreproj.data.video.video_lists import EXTENSIONS
from mmpreproj.folders import read_folder
from mmpreproj.training import ImageClassifier, load_run
from mmpreproj.training.console import print_table, quieten, run_tool
from mmpreproj.training.per_file import write_table

DRAWN = 64  # more files than this are listed but not drawn


def main(args: Sequence[str] | None = None) -> int:
    """`predict.py` with these arguments. Returns the exit status: 1 if a file was unreadable."""
    parser = argparse.ArgumentParser(
        "predict.py",
        description="The likeliest classes of your own pictures or clips; prompts continued.",
    )
    parser.add_argument(
        "run",
        help="a run folder, a .ckpt file or an adapter folder; for prompts also a model's name, "
        "folder or .gguf",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="FILE_OR_PROMPT",
        help="pictures, clips, folders of them, or texts to continue",
    )
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:1, mps …")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--table", type=Path, help="also write FILE.csv or FILE.jsonl")
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
    adapter = _adapter(known.run)
    if known.adapter is not None or adapter == "text" or not (adapter or _is_run(known.run)):
        from mmpreproj.backbones.lm import load_with_adapter

        loaded = load_with_adapter(known.run, known.adapter, known.dtype)
        return _continue(loaded.model.to(known.device), loaded.tokenizer, known)
    module, data = (_classifier(known.run), None) if adapter else load_run(known.run, known.which)
    module.to(known.device)
    half = None if known.dtype == "float32" else getattr(torch, known.dtype)
    with torch.autocast(torch.device(known.device).type, half, enabled=half is not None):
        if module.predicts == "text":
            return _continue(module.evaluated, module.tokenizer, known)
        found, errors = module.predict(data, _files(known.inputs), known.top)
    if found:
        _show(module, found, known)
    for error in errors:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1 if errors else 0


def _files(inputs: Sequence[str]) -> list[str]:
    """The files, and those below the folders among them: pictures and clips, in order of name.

    Raises:
        FileNotFoundError: for a folder without any.
    """
    kinds = {*IMG_EXTENSIONS, *EXTENSIONS}
    files = []
    for given in inputs:
        found = [given]
        if Path(given).is_dir():
            below = sorted(path for path in Path(given).rglob("*") if path.is_file())
            found = [str(path) for path in below if path.suffix.lower() in kinds]
            if not found:
                raise FileNotFoundError(f"{given} holds no pictures or clips")
        files += found
    return files


def _adapter(path: str) -> str | None:
    """What an adapter folder is for, "text" or "pictures"; None where it is no such folder."""
    if Path(path, "config.json").is_file():
        return None
    if Path(path, "preproj.json").is_file():
        architecture = str(read_folder(Path(path)).base.get("architecture"))
        return "text" if architecture.endswith("ForCausalLM") else "pictures"
    return "text" if Path(path, "adapter_config.json").is_file() else None


def _classifier(folder: str) -> ImageClassifier:
    """The image model of timm that an adapter folder and its base make; its classes are numbers."""
    model = mmpreproj.from_pretrained(folder)
    name = read_folder(Path(folder)).base["name"]
    if not hasattr(model, "pretrained_cfg"):
        raise ValueError(f"{folder} goes onto {name}, which is neither a language model nor timm's")
    module = ImageClassifier(name, num_classes=model.num_classes)
    module.model, module.data_config = model, input_config(model)
    return module.eval()


def _is_run(path: str) -> bool:
    """Whether it is a run or a checkpoint, not a language model by name, folder or file."""
    place = Path(path)
    if place.is_dir():
        return not (place / "config.json").is_file() and not any(place.glob("*.gguf"))
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not place.parent.is_dir()
    return place.suffix == ".ckpt" or not (
        hub or place.suffix == ".gguf" or path.startswith("package:")
    )


def _continue(model: Any, tokenizer: Any, known: argparse.Namespace) -> int:
    from mmpreproj.evaluation.encoding import continue_text

    sampling = {} if known.seed is None else {"temperature": known.temperature}
    rows = []
    for prompt in known.inputs:
        text = continue_text(model, tokenizer, prompt, known.tokens, known.seed, **sampling)
        print(f"{text}\n", flush=True)
        rows.append({"prompt": prompt, "text": text})
    _write(known.table, rows)
    return 0


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        print(f"written to {write_table(path, rows)}", flush=True)


def _show(module: Any, found: list[dict[str, Any]], known: argparse.Namespace) -> None:
    label = "score" if module.hparams.bce else "probability"
    several = len(found[0]["sets"]) > 1
    rows = [
        [row["file"] if place == rank == 0 else "", *([name] if several else []), c, f"{value:.2%}"]
        for row in found
        for place, (name, top) in enumerate(row["sets"].items())
        for rank, (c, value) in enumerate(top)
    ]
    columns = ["file", *(["labels"] if several else []), "class", label]
    table = [
        {"file": row["file"], "labels": name, "rank": rank, "class": c, label: value}
        for row in found
        for name, top in row["sets"].items()
        for rank, (c, value) in enumerate(top, 1)
    ]
    _write(known.table, table)
    print_table(module.hparams.model, rows, columns)
    try:
        from mmpreproj.analysis import plots
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr, flush=True)
        return
    shown = found[:DRAWN]
    names = [Path(row["file"]).name for row in shown]
    title = f"{module.hparams.model}: {label} of the likeliest classes"
    images = [row["frames"] if "frames" in row else row["image"] for row in shown]
    path = plots.predictions(images, names, [row["sets"] for row in shown], known.out, title)
    more = "" if len(shown) == len(found) else f" (the first {len(shown)} of {len(found)})"
    print(f"drawn{more}: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(run_tool(main))
