"""Measure side by side: alternating runs in one process or of whole processes, medians and ratios.

    python tools/benchmark.py step                     # a model with the method against without it
    python tools/benchmark.py step --model video_vit_preproj_tiny --frames 8 --img-size 112
    python tools/benchmark.py probe                    # a frozen probe's step against LoRA's
    python tools/benchmark.py loss                     # a language model's loss, without all logits
    python tools/benchmark.py scoring --lambada FILE   # evaluation against lm-evaluation-harness
    python tools/benchmark.py loading --workers 1 2    # clips a second against other readers
    python tools/benchmark.py loop --peer TRAIN_PY --data FOLDER --workers 1 2
                                                       # our training loop against timm's train.py

Times mean little on a shared machine; the ratios of runs that alternate do.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import benchmark_loading
import benchmark_loss
import benchmark_probe
import benchmark_scoring
import timm
import torch
from measuring import alternate, count_flops, report
from torch import nn

import mmpreproj

TRAIN = Path(__file__).with_name("train.py")


def step(options: argparse.Namespace) -> list[dict[str, object]]:
    """Time of a step with both parts against the same class with neither, beside the FLOP ratio."""
    sizes = {"img_size": options.img_size} if options.img_size else {}
    if options.frames:
        sizes["num_frames"] = options.frames
    sizes |= {"attention": options.attention} if options.attention else {}
    off = {"pre_projection": False, "content_skip": False}
    models = {
        "method": timm.create_model(options.model, **sizes),
        "both parts off": timm.create_model(options.model, **sizes, **off),
    }
    with torch.no_grad():  # at the identity W_down and W_skip are zeros, which may be quicker
        for module in mmpreproj.preproj_modules(models["method"]).values():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)
    size = timm.models.get_model_input_config(models["method"])["input_size"]
    if hasattr(models["method"], "num_frames"):
        size = (size[0], models["method"].num_frames, *size[-2:])
    images = torch.randn(options.batch_size, *size)

    def forward(model: nn.Module) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            model(images)
        return time.perf_counter() - start

    def forward_backward(model: nn.Module) -> float:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        model(images).sum().backward()
        return time.perf_counter() - start

    results = []
    for part in (forward, forward_backward):
        flops = {name: count_flops(part, model) for name, model in models.items()}
        ratio = flops["method"] / flops["both parts off"]
        timed = alternate(
            {name: lambda model=model: part(model) for name, model in models.items()},  # noqa: B023
            options.repeats,
        )
        title = f"{options.model}, batch {options.batch_size}, float32: {part.__name__}"
        results.append(report(title, timed, "seconds") | {"flop_ratio": ratio})
        print(f"  FLOP ratio {ratio:.3f}")
    return results


def loop(options: argparse.Namespace) -> list[dict[str, object]]:
    """Images a second of one training epoch, loading included, by each side's own count."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        link_images(options.data / options.train_split, data / "train", options.images)
        link_images(options.data / options.test_split, data / "val", 20)
        return loop_on(data, options)


def link_images(source: Path, target: Path, n: int) -> None:
    """Links to the first n images of a class-folder tree, spread evenly over its classes."""
    classes = sorted(path for path in source.iterdir() if path.is_dir())
    if not classes:
        raise ValueError(f"no class folders in {source}")
    for folder in classes:
        (target / folder.name).mkdir(parents=True)
        for image in sorted(folder.iterdir())[: -(-n // len(classes))]:
            (target / folder.name / image.name).symlink_to(image.resolve())


def loop_on(data: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    results = []
    for workers in options.workers:
        timed = alternate(
            {
                "mmpreproj": lambda: our_loop(data, options, workers),  # noqa: B023
                "timm train.py": lambda: timm_loop(data, options, workers),  # noqa: B023
            },
            options.repeats,
        )
        title = (
            f"{options.model} at {options.img_size} px, batch {options.batch_size}, "
            f"{workers} workers: training loop"
        )
        results.append(report(title, timed, "images/s"))
    return results


def our_loop(data: Path, options: argparse.Namespace, workers: int) -> float:
    model_args = {"img_size": options.img_size}
    init = {"model": options.model, "model_args": model_args, "label_smoothing": 0.1}
    config = {
        "model": {"class_path": "mmpreproj.training.ImageClassifier", "init_args": init},
        "data": {
            "class_path": "mmpreproj.data.ImageFolderDataModule",
            "init_args": {
                "root": str(data),
                "batch_size": options.batch_size,
                "num_workers": workers,
                "val_fraction": 0.0,
            },
        },
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        run([sys.executable, str(TRAIN), str(path), "--run.test", "false", "--run.root", folder])
        record = next(Path(folder).glob("config/*/record.json"))
        return json.loads(record.read_text(encoding="utf-8"))["training"]["images_per_second"]


def timm_loop(data: Path, options: argparse.Namespace, workers: int) -> float:
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
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("step", help=step.__doc__)
    one.add_argument("--model", default="vit_preproj_base")
    one.add_argument("--batch-size", type=int, default=8)
    one.add_argument("--repeats", type=int, default=15)
    one.add_argument("--img-size", type=int, help="other than the model's")
    one.add_argument("--frames", type=int, help="of a video model, other than its own")
    one.add_argument("--attention", help="of a video model: joint or divided")
    two = parts.add_parser("loop", help=loop.__doc__)
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
    parts_elsewhere = {
        "probe": benchmark_probe,
        "loss": benchmark_loss,
        "scoring": benchmark_scoring,
        "loading": benchmark_loading,
    }
    for module in parts_elsewhere.values():
        module.add_parser(parts)
    options = parser.parse_args()
    mains = {"step": step, "loop": loop, **{k: m.main for k, m in parts_elsewhere.items()}}
    results = mains[options.part](options)
    if options.out:
        facts = {"torch": torch.__version__, "timm": timm.__version__, "results": results}
        options.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
