"""The runs of a study, each a process of its own; they stop with the study, to be resumed."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mmpreproj.studies.study import Run, Study

__all__ = ["run_study"]


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
    launch = functools.partial(_launch, study=study, train=train, root=root, jobs=jobs, tell=tell)
    choosing = study.choosing_runs(arguments)
    failed = launch(f"{study.name}, choosing", choosing) if choosing else []
    for arm in study.arms if choosing else ():
        chosen = study.chosen(arm, root, arguments)
        of_arm = [run for run in choosing if run.arm == arm]
        if chosen is None and all(run.record(root) for run in of_arm):
            tell(f"FAILED: {arm}: none of its candidates has {study.choice.by} in its record")
            failed += of_arm
        if chosen:
            tell(f"{arm}: {study.told(arm, chosen, edges=True)} was best on validation")
    return failed + launch(study.name, study.runs(arguments, root))


def _launch(
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
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    label, metric = next(iter(study.metrics.items()))

    running: list[subprocess.Popen[bytes]] = []
    lock, stopped = threading.Lock(), threading.Event()

    def succeeds(run: Run) -> bool:
        begun = [f for f in run.folders(root) if (f / "checkpoints" / "last.ckpt").is_file()]
        if begun:
            words = ["--resume", str(begun[-1])]
        else:
            words = [*run.arguments, "--seed_everything", str(run.seed)]
            words += ["--run.root", str(root), "--run.name", run.place]
        place = root / run.place
        place.mkdir(parents=True, exist_ok=True)
        log = place / f"seed{run.seed}.log"
        with log.open("ab") as file, lock:
            if stopped.is_set():
                return False
            tell(f"{'resumes' if begun else 'starts'}: {study.name_of(run)} (log: {log})")
            process = subprocess.Popen(
                [*train, *words], stdout=file, stderr=subprocess.STDOUT, env=environment
            )
            running.append(process)
        code, record = process.wait(), run.record(root)
        if code or record is None:
            tell(f"FAILED: {study.name_of(run)} (exit {code}); see {log}")
            return False
        value = metric.of(record)
        told = "not measured" if value is None else format(value, metric.form)
        tell(f"ends: {study.name_of(run)}, {label} {told}")
        return True

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            done = list(pool.map(succeeds, missing))
        except BaseException:  # Ctrl-C or SIGTERM: the runs write a checkpoint and end
            pool.shutdown(wait=False, cancel_futures=True)
            with lock:
                stopped.set()
                for process in running:
                    process.terminate()
            raise
    return [run for run, well in zip(missing, done, strict=True) if not well]
