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

RECORD = "record.json"
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

    def __post_init__(self) -> None:
        try:
            format(0.5, self.form)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path}: form={self.form!r} prints no number: {error}"
            ) from error

    @property
    def is_share(self) -> bool:
        """Whether it counts what is right, 0 to 1, and is not a loss or a perplexity."""
        return not SHARES.isdisjoint(self.path.split("."))

    def of(self, record: Mapping[str, Any] | None) -> Any:
        """Its value in a record; None where it is missing."""
        return value_at(record, *self.path.split("."))

    def n_of(self, record: Mapping[str, Any] | None) -> int | None:
        """On how many items it was measured: the "n" beside it; None where there is none."""
        *place, _ = self.path.split(".")
        return value_at(record, *place, "n")


FIGURES = {
    "test top-1": Figure("test.top1.value"),
    "loss": Figure("test.loss.value", ".3f"),
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
    choice: Choice | None = None
    figures: dict[str, Figure] = dataclasses.field(default_factory=lambda: dict(FIGURES))
    against: tuple[str, ...] = ()
    frontier: Frontier | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Study:
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no study {path}")
        content = read_yaml(path)
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
        try:
            study = cls._of(path.stem, config, content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        return study

    @classmethod
    def _of(cls, name: str, config: Path, content: Mapping[str, Any]) -> Study:
        """Raises: TypeError or ValueError, without the file's name."""
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
        choice = Choice(**content["choose"]) if "choose" in content else None
        drawn = Frontier(**content["frontier"]) if "frontier" in content else None
        figures = {str(k): Figure(**v) for k, v in content.get("figures", {}).items()}
        against = content.get("against", [next(iter(arms))])
        study = cls(
            name,
            config,
            tuple(seeds),
            {str(k): dict(v) for k, v in arms.items()},
            choice,
            figures or dict(FIGURES),
            tuple(against) if isinstance(against, list) else (against,),
            drawn,
            dict(content.get("settings", {})),
        )
        known = {"frontier": study.figures, "against": study.arms}
        for key, names in (
            ("frontier", [] if drawn is None else [drawn.learned, *drawn.kept]),
            ("against", study.against),
        ):
            unknown = [name for name in names if name not in known[key]]
            if unknown:
                raise ValueError(
                    f"{key} names {unknown[0]!r}, which is not among {', '.join(known[key])}"
                )
        open_arms = [arm for arm in study.arms if study.candidates(arm)]
        if open_arms and choice is None:
            raise ValueError(f"arm {open_arms[0]!r} leaves a choice; say how: choose: …")
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
        theirs: dict[str, str] = {}
        for arm, settings in self.arms.items():
            theirs |= {_plain(key): f"arm {arm!r}" for key in settings}
        if self.choice is not None:
            theirs |= {_plain(key): "choose.settings" for key in self.choice.settings}
        for word in arguments:
            if not word.startswith("--"):
                continue
            key = _plain(word.partition("=")[0].removeprefix("--"))
            for own, where in theirs.items():
                if f"{key}.".startswith(f"{own}.") or f"{own}.".startswith(f"{key}."):
                    raise ValueError(f"{word} would override what {where} sets: change the study")

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

    def name_of(self, run: Run) -> str:
        """What a person calls a run."""
        tried = "" if run.candidate is None else f", {self.told(run.arm, run.candidate)}"
        return f"{run.arm}{tried}, seed {run.seed}"

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


def _plain(key: str) -> str:
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
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found
