"""What training pictures and clips costs: a step with the method, and the loop around it."""

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import mmpreproj

TRAIN = Path(__file__).parents[1] / "train.py"


def add_parsers(parts: "argparse._SubParsersAction") -> None:
    one = parts.add_parser("step", help=step.__doc__)
    one.set_defaults(compare=step)
    one.add_argument("--model", default="vit_preproj_base")
    one.add_argument("--batch-size", type=int, default=8)
    one.add_argument("--repeats", type=int, default=15)
    one.add_argument("--img-size", type=int, help="other than the model's")
    one.add_argument("--frames", type=int, help="of a video model, other than its own")
    one.add_argument("--attention", help="of a video model: joint or divided")
    two = parts.add_parser("loop", help=loop.__doc__)
    two.set_defaults(compare=loop)
    two.add_argument("--peer", type=Path, required=True, help="train.py of timm's repository")
    two.add_argument("--data", type=Path, required=True, help="a class-folder tree")
    two.add_argument("--train-split", default="train")
    two.add_argument("--test-split", default="test")
    two.add_argument("--model", default="vit_tiny_patch16_224")
    two.add_argument("--img-size", type=int, default=64)
    two.add_argument("--batch-size", type=int, default=64)
    two.add_argument("--images", type=int, default=4000, help="in the epoch")
    two.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    two.add_argument("--repeats", type=int, default=5)


def step(options: argparse.Namespace) -> Iterator[dict]:
    """Time of a step with both parts against the same class with neither, beside the FLOP ratio."""
    given = {"img_size": options.img_size, "num_frames": options.frames}
    given = {k: v for k, v in (given | {"attention": options.attention}).items() if v}
    off = {"pre_projection": False, "content_skip": False}
    models = {
        "method": timm.create_model(options.model, **given),
        "both parts off": timm.create_model(options.model, **given, **off),
    }
    with torch.no_grad():  # at the identity W_down and W_skip are zeros, which may be quicker
        for module in mmpreproj.preproj_modules(models["method"]).values():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)
    size = timm.models.get_model_input_config(models["method"])["input_size"]
    if hasattr(models["method"], "num_frames"):
        size = (size[0], models["method"].num_frames, *size[-2:])
    images = torch.randn(options.batch_size, *size)

    def forward(model: nn.Module) -> None:
        with torch.no_grad():
            model(images)

    def forward_backward(model: nn.Module) -> None:
        model(images).sum().backward()
        model.zero_grad(set_to_none=True)

    for part in (forward, forward_backward):
        runs = {name: functools.partial(part, model) for name, model in models.items()}
        flops = {}
        for name, run in runs.items():
            with FlopCounterMode(display=False) as counter:
                run()
            flops[name] = counter.get_total_flops()
        ratio = flops["method"] / flops["both parts off"]
        title = f"{options.model}, batch {options.batch_size}, float32: {part.__name__}"
        print(f"{title}: FLOP ratio {ratio:.3f}")
        yield {"title": title, "unit": "seconds", "runs": runs, "flop_ratio": ratio}


def loop(options: argparse.Namespace) -> Iterator[dict]:
    """Images a second of one training epoch, loading included, by each side's own count."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        link_images(options.data / options.train_split, data / "train", options.images)
        link_images(options.data / options.test_split, data / "val", 20)
        what = f"{options.model} at {options.img_size} px, batch {options.batch_size}"
        for workers in options.workers:
            yield {
                "title": f"{what}, {workers} workers: training loop",
                "unit": "images/s",
                "runs": {
                    "mmpreproj": functools.partial(our_rate, data, options, workers),
                    "timm train.py": functools.partial(timm_rate, data, options, workers),
                },
            }


def link_images(source: Path, target: Path, n: int) -> None:
    """Links to the first n images of a class-folder tree, spread evenly over its classes."""
    classes = sorted(path for path in source.iterdir() if path.is_dir())
    if not classes:
        raise ValueError(f"no class folders in {source}")
    for folder in classes:
        (target / folder.name).mkdir(parents=True)
        for image in sorted(folder.iterdir())[: -(-n // len(classes))]:
            (target / folder.name / image.name).symlink_to(image.resolve())


def our_rate(data: Path, options: argparse.Namespace, workers: int) -> float:
    init = {"model": options.model, "model_args": {"img_size": options.img_size}}
    read = {"root": str(data), "batch_size": options.batch_size, "num_workers": workers}
    config = {
        "model": {
            "class_path": "mmpreproj.training.ImageClassifier",
            "init_args": init | {"label_smoothing": 0.1},
        },
        "data": {
            "class_path": "mmpreproj.data.ImageFolderDataModule",
            "init_args": read | {"val_fraction": 0.0},
        },
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        run([sys.executable, str(TRAIN), str(path), "--run.test", "false", "--run.root", folder])
        record = next(Path(folder).glob("config/*/record.json"))
        return json.loads(record.read_text(encoding="utf-8"))["training"]["images_per_second"]


def timm_rate(data: Path, options: argparse.Namespace, workers: int) -> float:
    classes = len(list((data / "train").iterdir()))
    with tempfile.TemporaryDirectory() as folder:
        output = run(
            [sys.executable, str(options.peer), "--data-dir", str(data), "--val-split", "val"]
            + ["--model", options.model, "--img-size", str(options.img_size)]
            + ["--batch-size", str(options.batch_size), "--workers", str(workers)]
            + ["--opt", "adamw", "--lr", "1e-3", "--weight-decay", "0.05", "--warmup-epochs", "0"]
            + ["--model-kwargs", f"img_size={options.img_size}"]
            + ["--num-classes", str(classes), "--epochs", "1", "--device", "cpu"]
            + ["--output", folder]
        )
    # The last such line of the epoch; its mean is in brackets: "… 0.1s, 900.0/s (0.1s, 880.0/s) …"
    rates = re.findall(r"Train:.*?\(\s*[\d.]+s,\s*([\d.]+)/s\)", output)
    if not rates:
        raise RuntimeError(f"no rate in what {options.peer} printed: {output[-2000:]}")
    return float(rates[-1])


def run(command: list[str]) -> str:
    """What a command printed. Raises RuntimeError, with its last lines, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr
