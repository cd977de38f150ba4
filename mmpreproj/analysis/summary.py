"""What a study came to: its arms side by side, from the records that its runs left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmpreproj.analysis.records import mean_spread
from mmpreproj.analysis.study import Figure, Study, told, value_at


def summarise(study: Study, root: Path, arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row an arm, from the records there are.

    Each row has: arm, chosen (settings, where it had candidates), seeds (those measured), missing
    (seeds without a record), figures (label: mean, sample standard deviation, n of seeds, by_seed),
    difference (of the first figure to the first arm, seed by seed), n_test, parameters,
    new_parameters, trainable, seconds of training, peak_bytes, skip (strength of W_skip by layer,
    over the seeds), candidates (settings, figures and the figure they were chosen by).
    """
    runs = study.runs(arguments, root)
    choosing = study.choosing_runs(arguments)
    records = {(run.arm, run.seed): run.record(root) for run in runs}
    label, main = next(iter(study.figures.items()))
    first = next(iter(study.arms))
    reference = {seed: main.of(records.get((first, seed))) for seed in study.seeds}
    rows = []
    for arm in study.arms:
        of_arm = {seed: records[arm, seed] for seed in study.seeds if records.get((arm, seed))}
        figures = {name: _over_seeds(figure, of_arm) for name, figure in study.figures.items()}
        pairs = [
            value - reference[seed]
            for seed, value in figures[label]["by_seed"].items()
            if value is not None and reference[seed] is not None
        ]
        sizes = {value_at(record, "n", "test") for record in of_arm.values()}
        assert len(sizes) <= 1, f"runs of arm {arm} were tested on different numbers: {sizes}"
        one = next(iter(of_arm.values()), None)
        rows.append(
            {
                "arm": arm,
                "chosen": next((run.chosen for run in runs if run.arm == arm), None),
                "seeds": list(of_arm),
                "missing": [seed for seed in study.seeds if seed not in of_arm],
                "figures": figures,
                "difference": None if arm == first else mean_spread(pairs),
                "n_test": next(iter(sizes), None),
                "parameters": value_at(one, "parameters", "total"),
                "new_parameters": value_at(one, "parameters", "new"),
                "trainable": value_at(one, "parameters", "trainable"),
                "seconds": _spread_at(of_arm.values(), "training", "seconds"),
                "peak_bytes": _spread_at(of_arm.values(), "peak_bytes", "rss"),
                "skip": _skip_by_layer(of_arm.values()),
                "candidates": [
                    _candidate(study, run, run.record(root)) for run in choosing if run.arm == arm
                ],
            }
        )
    return rows


def _over_seeds(figure: Figure, records: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    by_seed = {seed: figure.of(record) for seed, record in records.items()}
    return {**mean_spread(by_seed.values()), "by_seed": by_seed}


def _spread_at(records: Iterable[Mapping[str, Any]], *path: str) -> dict[str, Any]:
    return mean_spread(value_at(record, *path) for record in records)


def _candidate(study: Study, run: Any, record: Mapping[str, Any] | None) -> dict[str, Any]:
    assert study.choice is not None, "an arm with candidates"
    return {
        "settings": run.candidate,
        "seed": run.seed,
        "figures": {name: figure.of(record) for name, figure in study.figures.items()},
        study.choice.by: Figure(study.choice.by).of(record),
        "seconds": value_at(record, "training", "seconds"),
    }


def _skip_by_layer(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_layer: dict[int, list[float]] = {}
    for record in records:
        for entry in record.get("skip_strength") or ():
            by_layer.setdefault(entry["layer"], []).append(entry["weight"])
    return [{"layer": layer, **mean_spread(values)} for layer, values in sorted(by_layer.items())]


def markdown(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `summarise` as Markdown: arms, and candidates; what is missing is a dash."""
    label, main = next(iter(study.figures.items()))
    choice = any(row["candidates"] for row in rows)
    head = ["arm", *(["chosen"] if choice else []), "parameters", "new", "trained", *study.figures]
    head += ["by seed", "difference", "seconds", "peak GiB", "n"]
    table = []
    for row in rows:
        seeds = row["figures"][label]["by_seed"].items()
        cells = [row["arm"], *([told(row["chosen"] or {}) or "–"] if choice else [])]
        counts = ("parameters", "new_parameters", "trainable")
        cells += [_number(row[name], ",d") for name in counts]
        cells += [_spread(row["figures"][name], f.form) for name, f in study.figures.items()]
        cells += [
            ", ".join(f"{seed}: {_number(v, main.form)}" for seed, v in seeds) or "–",
            "–" if row["difference"] is None else _spread(row["difference"], f"+{main.form}"),
            _spread(row["seconds"], ".0f"),
            _spread(_scaled(row["peak_bytes"], 2**-30), ".2f"),
            f"{_number(row['n_test'], ',d')} x {len(row['seeds'])} seeds",
        ]
        table.append(cells)
    text = _table(head, table)
    if choice:
        by = study.choice.by
        head = ["arm", "candidate", by, *study.figures, "seconds"]
        table = [
            [
                row["arm"],
                told(found["settings"]),
                _number(found[by], ".4f"),
                *(_number(found["figures"][name], f.form) for name, f in study.figures.items()),
                _number(found["seconds"], ".0f"),
            ]
            for row in rows
            for found in row["candidates"]
        ]
        text += "\n" + _table(head, table)
    return text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace(" --- ", "---")


def _scaled(figure: Mapping[str, Any], factor: float) -> dict[str, Any]:
    return {k: None if figure[k] is None else figure[k] * factor for k in ("mean", "std")}


def _spread(figure: Mapping[str, Any], form: str) -> str:
    if figure["mean"] is None:
        return "–"
    spread = "" if figure["std"] is None else f" ± {format(figure['std'], form.lstrip('+'))}"
    return f"{format(figure['mean'], form)}{spread}"


def _number(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
