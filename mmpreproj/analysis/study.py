"""A study: some arms, each trained with several seeds, and the table of what came out.

A study is a YAML file. An arm is a set of settings that differ from the config they share:

    config: ../cifar10/vit.yaml       # relative to the study's file
    seeds: [0, 1, 2]
    arms:
      method: {}
      plain: {model.init_args.preproj: null}

Every run writes its own record as it ends. Runs that have one are skipped and broken ones are
resumed, so a study can be stopped and started at will. An arm whose definition changed is a new
arm.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmpreproj.analysis.records import mean_spread, read_record

RECORD = "record.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """One arm with one seed. `place` is the folder, below the root, that holds its run folders."""

    arm: str
    seed: int
    place: str
    arguments: tuple[str, ...]

    def folders(self, root: Path) -> list[Path]:
        """The run folders there are for it, oldest first."""
        return sorted((root / self.place).glob(f"*-seed{self.seed}*"))

    def record(self, root: Path) -> dict[str, Any] | None:
        """The record of the run that finished, if one did."""
        for folder in self.folders(root):
            if (folder / RECORD).is_file():
                record = read_record(folder)
                if record.get("finished"):
                    return record
        return None


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study's file says. Raises ValueError, naming the key, if it does not fit."""

    name: str
    config: Path
    seeds: tuple[int, ...]
    arms: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Study:
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no study {path}")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping) or set(content) != {"config", "seeds", "arms"}:
            found = sorted(content) if isinstance(content, Mapping) else type(content).__name__
            raise ValueError(f"{path} must have the keys config, seeds and arms; it has {found}")
        config = path.parent / str(content["config"])
        if not config.is_file():
            raise ValueError(f"{path}: config={content['config']!r} is no file beside it: {config}")
        seeds = content["seeds"]
        if not isinstance(seeds, list) or not seeds or not all(type(s) is int for s in seeds):
            raise ValueError(f"{path}: seeds must be a list of whole numbers, found {seeds!r}")
        arms = content["arms"]
        if not isinstance(arms, Mapping) or not arms:
            raise ValueError(f"{path}: arms must map names to settings, found {arms!r}")
        wrong = [name for name, settings in arms.items() if not isinstance(settings, Mapping)]
        if wrong:
            raise ValueError(f"{path}: arm {wrong[0]!r} must map keys to values, such as {{}}")
        return cls(path.stem, config, tuple(seeds), {str(k): dict(v) for k, v in arms.items()})

    def runs(self, arguments: Sequence[str] = ()) -> list[Run]:
        """All runs, every arm's first seed before any second: what is missing is spread evenly."""
        return [self._run(arm, seed, arguments) for seed in self.seeds for arm in self.arms]

    def _run(self, arm: str, seed: int, arguments: Sequence[str]) -> Run:
        settings = [
            word
            for key, value in self.arms[arm].items()
            for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
        ]
        definition = json.dumps([self.config.read_text(encoding="utf-8"), settings, *arguments])
        place = f"{self.name}/{arm}-{hashlib.sha256(definition.encode()).hexdigest()[:8]}"
        return Run(arm, seed, place, (str(self.config), *settings, *arguments))


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
    """
    runs = study.runs(arguments)
    missing = [run for run in runs if run.record(root) is None]
    tell(f"{study.name}: {len(runs)} runs, {len(runs) - len(missing)} done, {len(missing)} to do")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}

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
        tell(f"{'resumes' if begun else 'starts'}: {run.arm}, seed {run.seed} (log: {log})")
        with log.open("ab") as file:
            code = subprocess.run(
                [*train, *words], stdout=file, stderr=subprocess.STDOUT, env=environment
            ).returncode
        record = run.record(root)
        done = code == 0 and record is not None
        top1 = _value(record, "test", "top1", "value")
        tell(
            f"ends: {run.arm}, seed {run.seed}, test top-1 "
            f"{'not measured' if top1 is None else format(top1, '.4f')}"
            if done
            else f"FAILED: {run.arm}, seed {run.seed} (exit {code}); see {log}"
        )
        return done

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        finished = list(pool.map(one, missing))
    return [run for run, done in zip(missing, finished, strict=True) if not done]


def summarise(study: Study, root: Path, arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row an arm, from the records there are.

    Each row has: arm, seeds (those measured), missing (seeds without a record), top1 and loss on
    the reported split (mean, sample standard deviation, n of seeds), top1_by_seed, n_test,
    difference to the first arm in top-1 seed by seed, parameters, new_parameters, seconds of
    training, peak_bytes, skip (strength of W_skip by layer, over the seeds).
    """
    runs = study.runs(arguments)
    records = {(run.arm, run.seed): run.record(root) for run in runs}
    first = next(iter(study.arms))
    rows = []
    for arm in study.arms:
        of_arm = {seed: records[arm, seed] for seed in study.seeds if records[arm, seed]}
        top1 = {seed: _value(record, "test", "top1", "value") for seed, record in of_arm.items()}
        reference = {
            seed: _value(records[first, seed], "test", "top1", "value") for seed in study.seeds
        }
        pairs = [
            value - reference[seed]
            for seed, value in top1.items()
            if value is not None and reference[seed] is not None
        ]
        sizes = {_value(record, "test", "top1", "n") for record in of_arm.values()}
        assert len(sizes) <= 1, f"runs of arm {arm} were tested on different numbers: {sizes}"
        one = next(iter(of_arm.values()), None)
        rows.append(
            {
                "arm": arm,
                "seeds": list(of_arm),
                "missing": [seed for seed in study.seeds if seed not in of_arm],
                "top1": mean_spread(top1.values()),
                "top1_by_seed": top1,
                "difference": None if arm == first else mean_spread(pairs),
                "loss": mean_spread(_value(r, "test", "loss", "value") for r in of_arm.values()),
                "n_test": next(iter(sizes), None),
                "parameters": _value(one, "parameters", "total"),
                "new_parameters": _value(one, "parameters", "new"),
                "seconds": mean_spread(
                    _value(record, "training", "seconds") for record in of_arm.values()
                ),
                "peak_bytes": mean_spread(
                    _value(record, "peak_bytes", "rss") for record in of_arm.values()
                ),
                "skip": _skip_by_layer(of_arm.values()),
            }
        )
    return rows


def _skip_by_layer(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_layer: dict[int, list[float]] = {}
    for record in records:
        for entry in record.get("skip_strength") or ():
            by_layer.setdefault(entry["layer"], []).append(entry["weight"])
    return [{"layer": layer, **mean_spread(values)} for layer, values in sorted(by_layer.items())]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `summarise` as a Markdown table; what is missing is a dash."""
    head = "| arm | parameters | new | test top-1 | by seed | difference | loss | seconds | n |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        seeds = ", ".join(f"{s}: {_number(v, '.4f')}" for s, v in row["top1_by_seed"].items())
        cells = [
            row["arm"],
            _number(row["parameters"], ",d"),
            _number(row["new_parameters"], ",d"),
            _spread(row["top1"], ".4f"),
            seeds or "–",
            "–" if row["difference"] is None else _spread(row["difference"], "+.4f"),
            _spread(row["loss"], ".3f"),
            _spread(row["seconds"], ".0f"),
            f"{_number(row['n_test'], ',d')} x {len(row['seeds'])} seeds",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(figure: Mapping[str, Any], form: str) -> str:
    if figure["mean"] is None:
        return "–"
    spread = "" if figure["std"] is None else f" ± {format(figure['std'], form.lstrip('+'))}"
    return f"{format(figure['mean'], form)}{spread}"


def _number(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _value(record: Mapping[str, Any] | None, *path: str) -> Any:
    """A figure of a record, or None where a part of the path is missing."""
    found: Any = record
    for key in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def train_command() -> list[str]:
    """tools/train.py of the checkout that this package runs from."""
    return [sys.executable, str(Path(__file__).parents[2] / "tools" / "train.py")]
