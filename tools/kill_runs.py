"""Kill short runs at their hooks, resume them, and compare each with the unbroken run, to the bit.

    python tools/kill_runs.py image --every 10        every 10th hook of three epochs
    python tools/kill_runs.py text --kills 20 --seed 1    20 places drawn at random

A place is a callback hook of Lightning's, or a file about to take its name or just having it. The
process is forked after the imports and kills itself there with SIGKILL. `image`, `video` and `text`
are small versions of the default configs; what else is on the line goes to train.py, such as
--run.every_n_steps 4. Compared are weights, optimiser, schedule and history of both checkpoints,
metrics.csv and the record, times aside.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
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

from mmpreproj.training import cli

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.max_epochs", "3"]
SHORT += ["--trainer.limit_train_batches", "5", "--trainer.limit_val_batches", "2"]
SHORT += ["--trainer.limit_test_batches", "2", "--trainer.log_every_n_steps", "2"]
SMALL = {
    "image": ["configs/vit.yaml", "--data.batch_size", "16", "--model.model_args.depth", "1"],
    "video": ["configs/video.yaml", "--data.batch_size", "4", "--model.model_args.depth", "1"],
    "text": ["configs/lm.yaml", "--data.batch_size", "4", "--model.model_args.num_hidden_layers"],
}
SMALL["image"] += ["--model.mix.mixup", "0.2", "--model.ema_decay", "0.9"]
SMALL["text"] += ["1", "--data.tokenizer", "bpe:300", "--model.prompt_tokens", "4"]
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
    arguments: Sequence[str], folder: Path, kill_at: int | None = None, list_to: Path | None = None
) -> int:
    """Run train.py in a process of its own, its output in folder/output. Returns: its status."""
    if (child := os.fork()) != 0:
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
        cli.main(arguments)
        status = 0
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def result(folder: Path) -> dict[str, Any]:
    """What the only run below a folder came to, but for times."""
    (run,) = folder.glob("runs/*/*")
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
    return result(folder), places.read_text().splitlines()


def broken(arguments: Sequence[str], folder: Path, kills: Sequence[int]) -> dict[str, Any]:
    """Result of the run that is killed at a place of each of its starts, and then ends."""
    for kill_at in [*kills, None]:
        resumed = any(folder.glob("runs/*/*/checkpoints/last.ckpt"))
        if status := forked([*arguments, *["--resume"] * resumed], folder, kill_at):
            if kill_at is None or status != -signal.SIGKILL:
                told = (folder / "output").read_text()[-2000:]
                raise RuntimeError(f"killed at {kills}, the run ends with {status}: {told}")
            for run in folder.glob("runs/*/*"):  # died before there was anything to resume
                if not (run / "checkpoints" / "last.ckpt").is_file():
                    os.system(f"rm -r '{run}'")
    return result(folder)


def main() -> int:
    """Returns 1 if a killed run ended as another than the unbroken one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("what", choices=SMALL)
    parser.add_argument("--every", type=int, default=10, help="kill at every so manieth place")
    parser.add_argument("--kills", type=int, help="or at so many, drawn at random, twice each")
    parser.add_argument("--seed", type=int, default=0)
    args, more = parser.parse_known_args()
    torch.set_num_threads(1)
    cli.quieten()
    config, *small = SMALL[args.what]
    arguments = [str(ROOT / config), *small, *SHORT, *more]
    started, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as temporary:
        unbroken = Path(temporary) / "whole"
        unbroken.mkdir()
        expected, places = whole(arguments, unbroken)
        plan = [[place] for place in range(0, len(places), args.every)]
        if args.kills:
            draw = random.Random(args.seed)
            plan = [draw.choices(range(len(places)), k=2) for _ in range(args.kills)]
        for kills in plan:
            folder = Path(temporary) / "-".join(map(str, kills))
            folder.mkdir()
            try:
                found = list(differences(expected, broken(arguments, folder, kills)))
            except RuntimeError as error:
                found = [str(error)]
            wrong += bool(found)
            names = ", ".join(f"{place} ({places[place]})" for place in kills)
            print(f"killed at {names}: {'; '.join(found[:4]) or 'equal'}", flush=True)
            os.system(f"rm -r '{folder}'")
    seconds = time.monotonic() - started
    print(f"{len(plan)} runs, {len(places)} places, {wrong} ended otherwise, {seconds:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
