"""A study: some arms, each trained with several seeds.

A study is a YAML file. An arm is a set of settings that differ from the config they share:

    config: ../probe.yaml             # relative to the study's file
    seeds: [0, 1, 2]
    settings: {data.init_args.train: data/brown.txt}          # of all arms
    arms:
      base: {trainer.max_steps: 0}
      method: {model.init_args.optimizer.lr: {choose: [1e-4, 3e-4, 1e-3]}}
    choose:                           # only where an arm leaves something to choose
      seed: 0
      settings: {data.init_args.max_train_tokens: 60000}    # of the runs that choose
      by: validation.loss.value       # of their records; the lowest wins (goal: max, the highest)
    figures:                          # what the table shows; the first one is also drawn
      LAMBADA accuracy: {path: test.tasks.lambada.accuracy.value, form: .3f}
      held-out ppl: {path: test.perplexity.token.value, form: .2f}
    frontier: {learned: held-out ppl, kept: [LAMBADA accuracy]}    # a picture of the candidates

Where an arm has `choose`, every combination of its candidates is run once, and what was best on
validation is trained with the seeds. Every run writes its own record as it ends. Runs that have one
are skipped and broken ones are resumed, so a study can be stopped and started at will. An arm whose
definition changed is a new arm.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mmpreproj.analysis.records import read_record

RECORD = "record.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """One arm with one seed. `place` is the folder, below the root, that holds its run folders.

    `candidate` is what it tries, in a run that chooses; `chosen`, in others, what was chosen.
    """

    arm: str
    seed: int
    place: str
    arguments: tuple[str, ...]
    candidate: dict[str, Any] | None = None
    chosen: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """What a person calls it."""
        tried = "" if self.candidate is None else f", {told(self.candidate)}"
        return f"{self.arm}{tried}, seed {self.seed}"

    def folders(self, root: Path) -> list[Path]:
        """The run folders there are for it, oldest first."""
        found = (root / self.place).glob(f"*-seed{self.seed}*")
        ours = re.compile(rf".*-seed{self.seed}(-\d+)?")  # seed 1 is not seed 10
        return sorted(folder for folder in found if ours.fullmatch(folder.name))

    def record(self, root: Path) -> dict[str, Any] | None:
        """The record of the run that finished, if one did."""
        for folder in self.folders(root):
            if (folder / RECORD).is_file():
                record = read_record(folder)
                if record.get("finished"):
                    return record
        return None


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of the records: where it stands (dots between keys), and how it is printed."""

    path: str
    form: str = ".4f"

    def of(self, record: Mapping[str, Any] | None) -> Any:
        """Its value in a record; None where it is missing."""
        return value_at(record, *self.path.split("."))


FIGURES = {
    "test top-1": Figure("test.top1.value"),
    "loss": Figure("test.loss.value", ".3f"),
}
KEYS = {"config", "seeds", "arms"}
OPTIONAL = {"settings", "choose", "figures", "frontier"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """How what an arm leaves open is chosen: see the top of this file."""

    by: str
    seed: int = 0
    goal: str = "min"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.goal not in ("min", "max"):
            raise ValueError(f"choose.goal must be min or max, found {self.goal!r}")
        if not self.by.startswith("validation."):
            raise ValueError(
                f"choose.by must be a figure of the validation part, such as "
                f"validation.loss.value, found {self.by!r}: what is reported must not choose"
            )

    def best(self, values: Sequence[float | None]) -> int | None:
        """Which of the values is best, the first of equals; None if there is none.

        A run without the figure, such as one that diverged, is never the best.
        """
        known = {i: v for i, v in enumerate(values) if v is not None and math.isfinite(v)}
        if not known:
            return None
        return min(known, key=lambda i: known[i] if self.goal == "min" else -known[i])


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Which figures the picture of all candidates has: one on the x axis, others on y axes."""

    learned: str
    kept: list[str]


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study's file says. Raises ValueError, naming the key, if it does not fit."""

    name: str
    config: Path
    seeds: tuple[int, ...]
    arms: dict[str, dict[str, Any]]
    choice: Choice | None = None
    figures: dict[str, Figure] = dataclasses.field(default_factory=lambda: dict(FIGURES))
    frontier: Frontier | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Study:
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no study {path}")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from error
        keys = set(content) if isinstance(content, Mapping) else set()
        if not KEYS <= keys or keys - KEYS - OPTIONAL:
            found = sorted(content) if isinstance(content, Mapping) else type(content).__name__
            raise ValueError(
                f"{path} must have the keys config, seeds and arms, and may have "
                f"{', '.join(sorted(OPTIONAL))}; it has {found}"
            )
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
        try:
            choice = Choice(**content["choose"]) if "choose" in content else None
            drawn = Frontier(**content["frontier"]) if "frontier" in content else None
            named = content.get("figures") or {}
            if not isinstance(named, Mapping):
                raise TypeError(f"figures must map names to {{path: …, form: …}}, found {named!r}")
            figures = {str(k): Figure(**v) for k, v in named.items()}
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from error
        study = cls(
            path.stem,
            config,
            tuple(seeds),
            {str(k): dict(v) for k, v in arms.items()},
            choice,
            figures or dict(FIGURES),
            drawn,
            dict(content.get("settings") or {}),
        )
        names = [] if drawn is None else [drawn.learned, *drawn.kept]
        unknown = [name for name in names if name not in study.figures]
        if unknown:
            raise ValueError(
                f"{path}: frontier names {unknown[0]!r}, which is not among the figures: "
                f"{', '.join(study.figures)}"
            )
        open_arms = [arm for arm in study.arms if study.candidates(arm)]
        if open_arms and choice is None:
            raise ValueError(f"{path}: arm {open_arms[0]!r} leaves a choice; say how: choose: …")
        return study

    def candidates(self, arm: str) -> list[dict[str, Any]]:
        """Every combination of what the arm leaves to choose; empty where it leaves nothing."""
        lists = {key: v["choose"] for key, v in self.arms[arm].items() if is_choice(v)}
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"arm {arm!r}: {key}: choose must be a list, found {values!r}")
        if not lists:
            return []
        return [
            dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())
        ]

    def choosing_runs(self, arguments: Sequence[str] = ()) -> list[Run]:
        """One run for every candidate, the first candidate of every arm before any second."""
        runs = []
        for arm in self.arms:
            assert self.choice is not None or not self.candidates(arm), "read refuses it"
            for place, candidate in enumerate(self.candidates(arm)):
                settings = {**self.settings, **self.arms[arm], **candidate, **self.choice.settings}
                run = self._run(arm, self.choice.seed, settings, arguments)
                runs.append((place, dataclasses.replace(run, candidate=candidate)))
        return [run for _, run in sorted(runs, key=lambda pair: pair[0])]

    def chosen(self, arm: str, root: Path, arguments: Sequence[str] = ()) -> dict[str, Any] | None:
        """What was best of an arm's candidates, {} where it has none, None while one is missing."""
        runs = [run for run in self.choosing_runs(arguments) if run.arm == arm]
        if not runs:
            return {}
        records = [run.record(root) for run in runs]
        if None in records:
            return None
        best = self.choice.best([Figure(self.choice.by).of(record) for record in records])
        return None if best is None else runs[best].candidate

    def runs(self, arguments: Sequence[str] = (), root: Path | None = None) -> list[Run]:
        """The arms' runs, every arm's first seed before any second: gaps are spread evenly.

        Arms whose choice is not made yet, as far as the records in `root` tell, are left out.
        """
        chosen = {
            arm: {} if root is None else self.chosen(arm, root, arguments) for arm in self.arms
        }
        return [
            dataclasses.replace(
                self._run(arm, seed, {**self.settings, **self.arms[arm], **settings}, arguments),
                chosen=settings,
            )
            for seed in self.seeds
            for arm, settings in chosen.items()
            if settings is not None and (settings or not self.candidates(arm))
        ]

    def _run(self, arm: str, seed: int, chosen: dict[str, Any], arguments: Sequence[str]) -> Run:
        settings = [
            word
            for key, value in chosen.items()
            for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
        ]
        definition = json.dumps([self.config.read_text(encoding="utf-8"), settings, *arguments])
        place = f"{self.name}/{arm}-{hashlib.sha256(definition.encode()).hexdigest()[:8]}"
        return Run(arm, seed, place, (str(self.config), *settings, *arguments))


def is_choice(value: Any) -> bool:
    """Whether a setting is left to choose."""
    return isinstance(value, Mapping) and set(value) == {"choose"}


def told(settings: Mapping[str, Any]) -> str:
    """Settings in few words: the last part of each key, and its value."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items())


def value_at(record: Mapping[str, Any] | None, *path: str) -> Any:
    """A figure of a record, or None where a part of the path is missing."""
    found: Any = record
    for key in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found
