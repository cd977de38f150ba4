"""What a trained model makes of your own pictures, clips or prompts.

python tools/predict.py RUN_OR_CHECKPOINT FILE… [--top K] [--out picture.png]
python tools/predict.py RUN_OR_MODEL PROMPT… [--tokens N] [--temperature X] [--seed S]
                        [--adapter FOLDER]
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmpreproj.training import load_run
from mmpreproj.training.console import quieten, run_tool
from mmpreproj.training.runs import print_table

DRAWN = 64  # more files than this are listed but not drawn


def main(args: Sequence[str] | None = None) -> int:
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
        from mmpreproj.backbones.lm import load_with_adapter

        loaded = load_with_adapter(known.run, known.adapter)
        return _continue(loaded.model, loaded.tokenizer, known)
    module, data = load_run(known.run, known.which)
    if module.predicts == "text":
        return _continue(module.evaluated, module.tokenizer, known)
    found, errors = module.predict(data, known.inputs, known.top)
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


def _continue(model: Any, tokenizer: Any, known: argparse.Namespace) -> int:
    from mmpreproj.evaluation.encoding import continue_text

    sampling = {} if known.seed is None else {"temperature": known.temperature}
    for prompt in known.inputs:
        print(continue_text(model, tokenizer, prompt, known.tokens, known.seed, **sampling))
        print(flush=True)
    return 0


def _show(module: Any, found: list[dict[str, Any]], out: str) -> None:
    label = "score" if module.hparams.bce else "probability"
    several = len(found[0]["sets"]) > 1
    rows = [
        [row["file"] if place == rank == 0 else "", *([name] if several else []), c, f"{value:.2%}"]
        for row in found
        for place, (name, top) in enumerate(row["sets"].items())
        for rank, (c, value) in enumerate(top)
    ]
    columns = ["file", *(["labels"] if several else []), "class", label]
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
    path = plots.predictions(images, names, [row["sets"] for row in shown], out, title)
    more = "" if len(shown) == len(found) else f" (the first {len(shown)} of {len(found)})"
    print(f"drawn{more}: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(run_tool(main))
