"""Kill short runs, resume them, and compare each with the unbroken run, to the bit.

    python tools/kill_runs.py image --minutes 3 --seed 1      also: video, text

Runs are killed with SIGKILL, twice each: at every callback hook of Lightning's and every file that
is about to take its name or just has it, at a place where that happens drawn at random; and at
random times. The settings alternate among five that cover all pairs of: workers or none,
accumulation or none, a moving average or none, checkpoints of steps or none. `image`, `video` and
`text` are small versions of the default configs; what else is on the line goes to train.py. The
process is forked after the imports. Compared are weights, optimiser, schedule and history of both
checkpoints, metrics.csv and the record, times aside.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from mmpreproj.training import cli, console, runs

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.max_epochs", "3"]
SHORT += ["--trainer.limit_train_batches", "5", "--trainer.limit_val_batches", "2"]
SHORT += ["--trainer.limit_test_batches", "2", "--trainer.log_every_n_steps", "2"]
SMALL = {
    "image": ["configs/vit.yaml", "--data.batch_size", "16", "--model.model_args.depth", "1"],
    "video": ["configs/video.yaml", "--data.batch_size", "4", "--model.model_args.depth", "1"],
    "text": ["configs/lm.yaml", "--data.batch_size", "4", "--model.model_args.num_hidden_layers"],
}
SMALL["image"] += ["--model.mix.mixup", "0.2"]
SMALL["text"] += ["1", "--data.tokenizer", "bpe:300", "--model.prompt_tokens", "4"]
SETTINGS = ("--data.num_workers={}", "--trainer.accumulate_grad_batches={}")
SETTINGS += ("--model.ema_decay={}", "--run.every_n_steps={}")
VALUES = ((0, 2), (1, 2), ("null", 0.9), ("null", 2))
COVERING = ((0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0))
HOOKS = [name for name in dir(Callback) if name.startswith("on_") and name != "on_exception"]
TIMES = {"run", "name", "seconds", "training", "peak_bytes", "environment"}


class Places(Callback):
    """Counts the places that are passed; at the one of this number the process dies."""

    def __init__(self, kill_at: int | None, list_to: Path | None) -> None:
        self.kill_at, self.list_to, self.passed = kill_at, list_to, []
        for name in HOOKS:
            setattr(self, name, lambda *_, name=name: self.passes(name))
        replace = os.replace

        def watched(source: Any, target: Any) -> None:
            self.passes(f"before {Path(target).name}")
            replace(source, target)
            self.passes(f"after {Path(target).name}")

        os.replace = watched

    def passes(self, place: str) -> None:
        if len(self.passed) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed.append(place)
        if self.list_to is not None:
            with self.list_to.open("a") as file:
                file.write(place + "\n")


def forked(
    arguments: Sequence[str],
    folder: Path,
    kill_at: int | float | None = None,
    list_to: Path | None = None,
) -> int:
    """Run train.py in a process of its own, its output in folder/output.

    Args:
        kill_at: the place of that number, or so many seconds.
        list_to: file for the names of the places.

    Returns: its status.
    """
    if (child := os.fork()) != 0:
        if isinstance(kill_at, float):
            time.sleep(kill_at)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(folder)
        places, build = Places(kill_at, list_to), cli.TrainCLI._instantiate_trainer

        def watched(self: Any, config: Any, callbacks: list[Any]) -> Any:
            return build(self, config, [*callbacks, places])

        cli.TrainCLI._instantiate_trainer = watched
        runs._plots = lambda *_: None  # they take as long as the rest
        cli.main(arguments)
        status = 0
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def result_of(run: Path) -> dict[str, Any]:
    """What a run came to, but for times."""
    found: dict[str, Any] = {}
    for which in ("best", "last"):
        checkpoint = torch.load(run / "checkpoints" / f"{which}.ckpt", weights_only=True)
        own = {"history": checkpoint["mmpreproj"]["history"]}
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            own[key] = checkpoint[key]
        found[which] = own
    with (run / "metrics.csv").open(newline="") as file:
        found["rows"] = list(csv.DictReader(file))
    record = json.loads((run / "record.json").read_text())
    found["record"] = {key: value for key, value in record.items() if key not in TIMES}
    return found


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two results differ, by name."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} items"
        for place, pair in enumerate(zip(one, other, strict=False)):
            yield from differences(*pair, f"{where}[{place}]")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not torch.equal(one, other):
            yield f"{where}: {float((one - other).abs().max())} apart"
    elif one != other and not (one != one and other != other):  # NaN is NaN
        yield f"{where}: {one!r} and {other!r}"


def whole(arguments: Sequence[str], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """(result, places) of the unbroken run."""
    places = folder / "places"
    if status := forked(arguments, folder, list_to=places):
        raise RuntimeError(f"the run ends with {status}: {(folder / 'output').read_text()[-2000:]}")
    return result_of(*folder.glob("runs/*/*")), places.read_text().splitlines()


def broken(arguments: Sequence[str], folder: Path, kills: Sequence[int | float]) -> dict[str, Any]:
    """Result of the run that is killed in each of its starts (see `forked`), and then ends."""
    for kill_at in [*kills, None]:
        resumed = any(folder.glob("runs/*/*/checkpoints/last.ckpt"))
        status = forked([*arguments, *["--resume"] * resumed], folder, kill_at)
        if status not in (0, -signal.SIGKILL):
            told = (folder / "output").read_text()[-2000:]
            raise RuntimeError(f"killed at {kills}, the run ends with {status}: {told}")
        for run in folder.glob("runs/*/*"):
            if not (run / "checkpoints" / "last.ckpt").is_file():  # nothing to resume
                shutil.rmtree(run)
    return result_of(*folder.glob("runs/*/*"))


def main() -> int:
    """Returns 1 if a killed run ended as another than the unbroken one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("what", choices=SMALL)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--times", type=int, default=20, help="how many die at random times")
    parser.add_argument("--seed", type=int, default=0)
    args, more = parser.parse_known_args()
    torch.set_num_threads(1)
    console.quieten()
    config, *small = SMALL[args.what]
    draw, started = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        unbroken = []
        for choice in COVERING:
            settings = [s.format(v[c]) for s, v, c in zip(SETTINGS, VALUES, choice, strict=True)]
            arguments = [str(ROOT / config), *small, *SHORT, *settings, *more]
            folder = Path(temporary) / str(len(unbroken))
            folder.mkdir()
            begun = time.monotonic()
            expected, places = whole(arguments, folder)
            unbroken.append((settings, arguments, expected, places, time.monotonic() - begun))
        names = sorted({name for run in unbroken for name in run[3]})
        plan = [*names, *[None] * args.times]
        draw.shuffle(plan)
        done = wrong = 0
        for number, name in enumerate(plan):
            if time.monotonic() - started > 60 * args.minutes:
                break
            settings, arguments, expected, places, seconds = unbroken[number % len(COVERING)]
            kills: list[int | float] = [draw.uniform(0, seconds) for _ in range(2)]
            if name is not None:
                found = [place for place, passed in enumerate(places) if passed == name]
                kills = [draw.choice(found or range(len(places))), draw.randrange(len(places))]
            folder = Path(temporary) / "broken"
            folder.mkdir()
            try:
                found = list(differences(expected, broken(arguments, folder, kills)))
            except RuntimeError as error:
                found = [str(error)]
            shutil.rmtree(folder)
            done, wrong = done + 1, wrong + bool(found)
            where = ", ".join(
                f"{kill:.2f} s" if isinstance(kill, float) else f"{kill} ({places[kill]})"
                for kill in kills
            )
            print(f"{' '.join(settings)}: killed at {where}: {'; '.join(found[:4]) or 'equal'}")
    seconds = time.monotonic() - started
    print(f"{args.what}: {done} of {len(plan)} runs, {wrong} ended otherwise, {seconds:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
