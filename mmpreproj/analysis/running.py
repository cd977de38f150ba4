"""The runs of a study, each a process of its own; they stop with the study, to be resumed."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from mmpreproj.analysis.study import Run, Study


def run_study(
    study: Study,
    train: Sequence[str],
    root: Path,
    arguments: Sequence[str] = (),
    jobs: int = 1,
    tell: Callable[[str], None] = print,
) -> list[Run]:
    """Train what is missing, each run in a process of its own; return the runs that failed.

    Args:
        train: the command that trains, such as [python, tools/train.py].
        root: where run folders go.
        arguments: settings that every run gets, behind its arm's.
        jobs: runs at once; they share the processor cores.
        tell: takes a line as each run starts and ends.

    Raises: ValueError if an argument would override what the study sets.
    """
    study.check(arguments)
    failed = []
    choosing = study.choosing_runs(arguments)
    if choosing:
        failed = _run_all(f"{study.name}, choosing", choosing, study, train, root, jobs, tell)
        for arm in study.arms:
            chosen = study.chosen(arm, root, arguments)
            missing = [run for run in choosing if run.arm == arm and run.record(root) is None]
            if chosen is None and not missing:
                tell(f"FAILED: {arm}: none of its candidates has {study.choice.by} in its record")
                failed += [run for run in choosing if run.arm == arm]
            if chosen:
                tell(f"{arm}: {study.told(arm, chosen, edges=True)} was best on validation")
    runs = study.runs(arguments, root)
    return failed + _run_all(study.name, runs, study, train, root, jobs, tell)


def _run_all(
    title: str,
    runs: Sequence[Run],
    study: Study,
    train: Sequence[str],
    root: Path,
    jobs: int,
    tell: Callable[[str], None],
) -> list[Run]:
    missing = [run for run in runs if run.record(root) is None]
    tell(f"{title}: {len(runs)} runs, {len(runs) - len(missing)} done, {len(missing)} to do")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    label, figure = next(iter(study.figures.items()))

    def one(run: Run) -> bool:
        begun = [f for f in run.folders(root) if (f / "checkpoints" / "last.ckpt").is_file()]
        if begun:
            words = ["--resume", str(begun[-1])]
        else:
            words = [*run.arguments, "--seed_everything", str(run.seed)]
            words += ["--run.root", str(root), "--run.name", run.place]
        place = root / run.place
        place.mkdir(parents=True, exist_ok=True)
        log = place / f"seed{run.seed}.log"
        tell(f"{'resumes' if begun else 'starts'}: {study.name_of(run)} (log: {log})")
        with log.open("ab") as file:
            code = processes.run([*train, *words], file, environment)
        record = run.record(root)
        done = code == 0 and record is not None
        value = figure.of(record)
        tell(
            f"ends: {study.name_of(run)}, {label} "
            f"{'not measured' if value is None else format(value, figure.form)}"
            if done
            else f"FAILED: {study.name_of(run)} (exit {code}); see {log}"
        )
        return done

    processes = _Processes()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            finished = list(pool.map(one, missing))
        except BaseException:  # Ctrl-C or SIGTERM: the runs write a checkpoint and end
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise
    return [run for run, done in zip(missing, finished, strict=True) if not done]


class _Processes:
    """The processes that run now, so that they can be stopped from another thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def run(self, command: Sequence[str], output: IO[bytes], environment: dict[str, str]) -> int:
        """The exit status; that of SIGTERM where `stop` was called before."""
        with self.lock:
            if self.stopped:
                return 128 + signal.SIGTERM
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
            self.running.add(process)
        code = process.wait()
        with self.lock:
            self.running.discard(process)
        return code

    def stop(self) -> None:
        """End them, and let none start."""
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.terminate()


def train_command() -> list[str]:
    """tools/train.py of the checkout that this package runs from."""
    return [sys.executable, str(Path(__file__).parents[2] / "tools" / "train.py")]
