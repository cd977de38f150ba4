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
    against: [base]                   # what others are compared with; default: the first
    frontier: {learned: held-out ppl, kept: [LAMBADA accuracy]}    # a picture of what was tried

A file that has `studies: [text.yaml, images.yaml]` and nothing else stands for these, one after the
other.

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

from mmpreproj.analysis.records import read_record, read_yaml
from mmpreproj.messages import about, did_you_mean, listed

__all__ = ["Choice", "Frontier", "Metric", "Run", "Study"]

SHARES = {"top1", "top5", "accuracy", "accuracy_normalised", "opposite"}


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

    def folders(self, root: Path) -> list[Path]:
        """The run folders there are for it, oldest first."""
        found = (root / self.place).glob(f"*-seed{self.seed}*")
        ours = re.compile(rf".*-seed{self.seed}(-\d+)?")  # seed 1 is not seed 10
        return sorted(folder for folder in found if ours.fullmatch(folder.name))

    def record(self, root: Path) -> dict[str, Any] | None:
        """The record of the run that finished, if one did."""
        ended = [folder for folder in self.folders(root) if (folder / "record.json").is_file()]
        records = (read_record(folder) for folder in ended)
        return next((record for record in records if record.get("finished")), None)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure of the records: where it stands (dots between keys), and how it is printed."""

    path: str
    form: str = ".4f"

    def __post_init__(self) -> None:
        try:
            format(0.5, self.form)
        except (TypeError, ValueError) as error:
            told = f"{self.path}: form={self.form!r} prints no number: {error}"
            raise ValueError(told) from error

    @property
    def is_share(self) -> bool:
        """Whether it counts what is right, 0 to 1, and is not a loss or a perplexity."""
        return not SHARES.isdisjoint(self.path.split("."))

    def of(self, record: Mapping[str, Any] | None) -> Any:
        """Its value in a record; None where it is missing."""
        return value_at(record, *self.path.split("."))

    def n_of(self, record: Mapping[str, Any] | None) -> int | None:
        """On how many items it was measured: the "n" beside it; None where there is none."""
        return value_at(record, *self.path.split(".")[:-1], "n")


METRICS = {
    "test top-1": Metric("test.top1.value"),
    "loss": Metric("test.loss.value", ".3f"),
}
KEYS = {"config", "seeds", "arms"}
OPTIONAL = {"settings", "choose", "figures", "against", "frontier"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """How what an arm leaves open is chosen: see the top of this file."""

    by: str
    seed: int = 0
    goal: str = "min"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Mapping):
            raise TypeError(f"choose.settings must map keys to values, found {self.settings!r}")
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
    """Which figures the picture of what was tried has: one on the x axis, others on y axes."""

    learned: str
    kept: list[str]

    def __post_init__(self) -> None:
        if not isinstance(self.kept, list) or not self.kept:
            raise TypeError(f"frontier.kept must be a list of figures, found {self.kept!r}")


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study's file says. Raises ValueError, naming the key, if it does not fit."""

    name: str
    config: Path
    seeds: tuple[int, ...]
    arms: dict[str, dict[str, Any]]
    choice: Choice | None
    metrics: dict[str, Metric]
    baselines: tuple[str, ...]
    frontier: Frontier | None
    settings: dict[str, Any]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Study:
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no study {path}")
        content = read_yaml(path)
        with about(path, "is no study"):
            return cls._of(path, content)

    @classmethod
    def read_all(cls, path: str | os.PathLike[str]) -> list[Study]:
        """The studies that a file names (`studies: [text.yaml, images.yaml]`), or the one it is."""
        path = Path(path)
        content = read_yaml(path) if path.is_file() else None
        if not isinstance(content, Mapping) or set(content) != {"studies"}:
            return [cls.read(path)]
        with about(path, "is no list of studies"):
            return [cls.read(path.parent / str(name)) for name in content["studies"]]

    @classmethod
    def _of(cls, path: Path, content: Any) -> Study:
        """Raises: TypeError or ValueError, without the file's name."""
        keys = set(content) if isinstance(content, Mapping) else set()
        if not KEYS <= keys or keys - KEYS - OPTIONAL:
            raise ValueError(
                "a study must have the keys config, seeds and arms, and may have "
                f"{', '.join(sorted(OPTIONAL))}; found {sorted(keys) or content!r}"
            )
        config = path.parent / str(content["config"])
        if not config.is_file():
            raise ValueError(f"config={content['config']!r} is no file beside it: {config}")
        for key in ("settings", "arms", "choose", "figures", "frontier"):
            if not isinstance(content.get(key, {}), Mapping):
                raise TypeError(f"{key} must map names to values, found {content[key]!r}")
        seeds, arms = content["seeds"], content["arms"]
        whole = isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)
        if not whole or len(set(seeds)) < len(seeds):
            raise TypeError(f"seeds must be a list of whole numbers, each once, found {seeds!r}")
        if not arms:
            raise TypeError(f"arms must map names to settings, found {arms!r}")
        for arm, settings in arms.items():
            if not re.fullmatch(r"[\w.+-]+", str(arm)):
                raise ValueError(f"arm {arm!r} must be a name of letters, digits, _, ., + and -")
            if not isinstance(settings, Mapping):
                raise TypeError(f"arm {arm!r} must map keys to values, such as {{}}")
        baselines = content.get("against", [next(iter(arms))])
        study = cls(
            name=path.stem,
            config=config,
            seeds=tuple(seeds),
            arms={str(k): dict(v) for k, v in arms.items()},
            choice=Choice(**content["choose"]) if "choose" in content else None,
            metrics={k: Metric(**v) for k, v in content.get("figures", {}).items()} or METRICS,
            baselines=tuple(baselines) if isinstance(baselines, list) else (baselines,),
            frontier=Frontier(**content["frontier"]) if "frontier" in content else None,
            settings=dict(content.get("settings", {})),
        )
        drawn = [study.frontier.learned, *study.frontier.kept] if study.frontier else []
        named = [("frontier", name, study.metrics) for name in drawn]
        for key, name, known in [*named, *(("against", b, study.arms) for b in study.baselines)]:
            if name not in known:
                told = f"{key} names {name!r}, which is not among {listed(known)}"
                raise ValueError(told + did_you_mean(str(name), known))
        choices = [f"arm {arm!r} leaves a choice" for arm in study.arms if study.candidates(arm)]
        choices += ["frontier shows what was chosen from"] if study.frontier else []
        if choices and study.choice is None:
            raise ValueError(f"{choices[0]}; say how: choose: …")
        return study

    def candidates(self, arm: str) -> list[dict[str, Any]]:
        """Every combination of what the arm leaves to choose; empty where it leaves nothing."""
        lists = {
            key: value["choose"]
            for key, value in self.arms[arm].items()
            if isinstance(value, Mapping) and set(value) == {"choose"}
        }
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"arm {arm!r}: {key}: choose must be a list, found {values!r}")
        every = itertools.product(*lists.values()) if lists else ()
        return [dict(zip(lists, values, strict=True)) for values in every]

    def told(self, arm: str, settings: Mapping[str, Any] | None, edges: bool = False) -> str:
        """An arm's settings in few words; of a mapping, what differs between its candidates.

        edges: say of a number that it is the lowest or the highest of three or more that were
            tried: a better one may lie outside.
        """
        words = []
        for key, value in (settings or {}).items():
            tried = [candidate[key] for candidate in self.candidates(arm)]
            if isinstance(value, Mapping):
                differ = [k for k in value if any(other[k] != value[k] for other in tried)]
                words += [f"{k} {value[k]}" for k in differ or value]
                continue
            word = f"{key.rpartition('.')[2]} {value}"
            numbers = {number for number in map(_number, tried) if number is not None}
            if edges and len(numbers) > 2 and _number(value) in (min(numbers), max(numbers)):
                end = "lowest" if _number(value) == min(numbers) else "highest"
                word += f" (the {end} tried)"
            words.append(word)
        return ", ".join(words)

    def check(self, arguments: Sequence[str]) -> None:
        """Raises: ValueError if an argument would override what an arm or the choice sets."""
        fixed = {f"arm {arm!r}": settings for arm, settings in self.arms.items()}
        if self.choice is not None:
            fixed["choose.settings"] = self.choice.settings
        for word in arguments:
            if not word.startswith("--"):
                continue
            key = _short(word.partition("=")[0].removeprefix("--"))
            for where, settings in fixed.items():
                for own in map(_short, settings):
                    if f"{key}.".startswith(f"{own}.") or f"{own}.".startswith(f"{key}."):
                        raise ValueError(
                            f"{word} would override what {where} sets: change the study"
                        )

    def choosing_runs(self, arguments: Sequence[str] = ()) -> list[Run]:
        """One run for every candidate, the first candidate of every arm before any second."""
        by_arm = [
            [self._run(arm, self.choice.seed, arguments, candidate=c) for c in self.candidates(arm)]
            for arm in self.arms
        ]
        return [run for turn in itertools.zip_longest(*by_arm) for run in turn if run is not None]

    def chosen(
        self, arm: str, root: Path | None, arguments: Sequence[str] = ()
    ) -> dict[str, Any] | None:
        """What was best of an arm's candidates, {} where it has none, None while one is missing."""
        runs = [run for run in self.choosing_runs(arguments) if run.arm == arm]
        if not runs:
            return {}
        records = [root and run.record(root) for run in runs]
        if None in records:
            return None
        best = self.choice.best([Metric(self.choice.by).of(record) for record in records])
        return None if best is None else runs[best].candidate

    def runs(self, arguments: Sequence[str] = (), root: Path | None = None) -> list[Run]:
        """The arms' runs, every arm's first seed before any second: gaps are spread evenly.

        Arms whose choice is not made yet, as far as the records in `root` tell, are left out.
        """
        chosen = {arm: self.chosen(arm, root, arguments) for arm in self.arms}
        return [
            self._run(arm, seed, arguments, chosen=settings)
            for seed in self.seeds
            for arm, settings in chosen.items()
            if settings is not None
        ]

    def name_of(self, run: Run) -> str:
        """What a person calls a run."""
        tried = "" if run.candidate is None else f", {self.told(run.arm, run.candidate)}"
        return f"{run.arm}{tried}, seed {run.seed}"

    def _run(
        self,
        arm: str,
        seed: int,
        arguments: Sequence[str],
        candidate: dict[str, Any] | None = None,
        chosen: dict[str, Any] | None = None,
    ) -> Run:
        settings = {**self.settings, **self.arms[arm], **(candidate or chosen or {})}
        if candidate is not None:
            settings |= self.choice.settings
        words = [
            word
            for key, value in settings.items()
            for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
        ]
        # Whatever a run is made of names its folder: records stay with what made them.
        definition = json.dumps([self.config.read_text(encoding="utf-8"), words, *arguments])
        place = f"{self.name}/{arm}-{hashlib.sha256(definition.encode()).hexdigest()[:8]}"
        return Run(arm, seed, place, (str(self.config), *words, *arguments), candidate, chosen)


def _short(key: str) -> str:
    """A key as the command line may also name it."""
    return key.replace(".init_args.", ".")


def _number(value: Any) -> float | None:
    try:
        return float(value)  # YAML reads 3e-4 as text
    except (TypeError, ValueError):
        return None


def value_at(record: Mapping[str, Any] | None, *path: str) -> Any:
    """A figure of a record, or None where a part of the path is missing."""
    found: Any = record
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
