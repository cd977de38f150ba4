"""Measure side by side: runs that alternate, in one process or of whole processes.

    python tools/benchmark.py step                     # a model with the method against without it
    python tools/benchmark.py step --model video_vit_preproj_tiny --frames 8 --img-size 112
    python tools/benchmark.py profile                  # seconds, operations and bytes by part
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
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from benchmarks import language, loading, profiling, training


def alternate(
    runs: dict[str, Callable[[], Any]], unit: str, repeats: int, warm: bool = False
) -> dict[str, list[float]]:
    """Run each in turn, `repeats` rounds, after one that does not count unless all are warm.

    Gives the seconds of each or, in another unit, what the runs return.
    """
    values: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(int(warm), repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            value = run()
            if round_number:
                seconds = time.perf_counter() - start
                values[name].append(seconds if unit == "seconds" else value)
    return values


def report(title: str, unit: str, values: dict[str, list[float]]) -> dict[str, float]:
    """Print the medians of each; give and print the ratio of the first to each other, by round."""
    first, *others = values
    print(f"\n{title}  ({len(values[first])} rounds, alternating)")
    print(f"  {'':28} {'median':>10} {'min':>10} {'max':>10}  {unit}")
    for name, runs in values.items():
        print(f"  {name:28} {statistics.median(runs):10.3f} {min(runs):10.3f} {max(runs):10.3f}")
    ratios = {}
    for name in others:
        pairs = [a / b for a, b in zip(values[first], values[name], strict=True)]
        ratios[name] = statistics.median(pairs)
        spread = f"[{min(pairs):.3f}, {max(pairs):.3f}]"
        print(f"  {first} / {name}: median ratio {ratios[name]:.3f} {spread}", flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parts = parser.add_subparsers(dest="part", required=True)
    for module in (training, language, loading, profiling):
        module.add_parsers(parts)
    options = parser.parse_args()
    results = []
    # A part yields what is compared: title, unit, runs by name, and facts beside them.
    for result in options.compare(options):
        runs, warm = result["runs"], result.pop("warm", False)
        if isinstance(runs, dict):
            result["runs"] = alternate(runs, result["unit"], options.repeats, warm)
            if options.repeats:
                result["median_ratio"] = report(result["title"], result["unit"], result["runs"])
        results.append(result)
    if options.out:
        facts = {"torch": torch.__version__, "timm": timm.__version__, "results": results}
        options.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
