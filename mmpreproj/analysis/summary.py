"""What a study came to: its arms side by side, from the records that its runs left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmpreproj.analysis.records import mean_spread
from mmpreproj.analysis.study import Figure, Run, Study, value_at

STRENGTHS = ("weight", "activation")


def summarise(study: Study, root: Path, arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row an arm, from the records there are.

    Each row has: arm, chosen (settings, where it had candidates), seeds (those measured), missing
    (seeds without a record), figures (by name: mean, sample standard deviation, n of seeds,
    by_seed, n_items: on how many items each was measured, is_share: a share of what is right),
    differences (by arm that it is compared with, and figure: of runs with the same seed),
    parameters, new_parameters, trainable, seconds of training, peak_bytes, skip (by layer, over the
    seeds: the strength of W_skip as a weight and on activations), candidates (settings, seed,
    figures, the figure they were chosen by, seconds).

    Raises: ValueError if an argument would override what the study sets.
    """
    study.check(arguments)
    runs = study.runs(arguments, root)
    choosing = study.choosing_runs(arguments)
    records: dict[str, dict[int, Mapping[str, Any]]] = {arm: {} for arm in study.arms}
    for run in runs:
        record = run.record(root)
        if record is not None:
            records[run.arm][run.seed] = record
    rows = []
    for arm, of_arm in records.items():
        one = next(iter(of_arm.values()), None)
        rows.append(
            {
                "arm": arm,
                "chosen": next((run.chosen for run in runs if run.arm == arm), None),
                "seeds": list(of_arm),
                "missing": [seed for seed in study.seeds if seed not in of_arm],
                "figures": {name: _over_seeds(f, of_arm) for name, f in study.figures.items()},
                "differences": {
                    other: _differences(study, of_arm, records[other])
                    for other in study.against
                    if other != arm
                },
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
    items = {n for record in records.values() if (n := figure.n_of(record)) is not None}
    return {
        **mean_spread(by_seed.values()),
        "by_seed": by_seed,
        "n_items": sorted(items),
        "is_share": figure.is_share,
    }


def _differences(
    study: Study, records: Mapping[int, Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    found = {}
    for name, figure in study.figures.items():
        pairs = [(figure.of(records[s]), figure.of(others[s])) for s in records if s in others]
        found[name] = mean_spread(a - b for a, b in pairs if a is not None and b is not None)
    return found


def _spread_at(records: Iterable[Mapping[str, Any]], *path: str) -> dict[str, Any]:
    return mean_spread(value_at(record, *path) for record in records)


def _candidate(study: Study, run: Run, record: Mapping[str, Any] | None) -> dict[str, Any]:
    assert study.choice is not None, "an arm with candidates"
    return {
        "settings": run.candidate,
        "seed": run.seed,
        "figures": {name: figure.of(record) for name, figure in study.figures.items()},
        study.choice.by: Figure(study.choice.by).of(record),
        "seconds": value_at(record, "training", "seconds"),
    }


def _skip_by_layer(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_layer: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        for entry in record.get("skip_strength") or ():
            by_layer.setdefault(entry["layer"], []).append(entry)
    return [
        {"layer": layer} | {k: mean_spread(entry.get(k) for entry in of_layer) for k in STRENGTHS}
        for layer, of_layer in sorted(by_layer.items())
    ]


def markdown(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `summarise` as tables in Markdown; what is missing is a dash."""
    parts = [_means(study, rows)]
    parts += [_compared(study, rows, other) for other in study.against if len(rows) > 1]
    if any(row["seeds"] for row in rows):
        parts.append(_by_seed(study, rows))
    if any(row["candidates"] for row in rows):
        parts.append(_candidates(study, rows))
    return "\n".join(parts)


def _means(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    choice = any(row["candidates"] for row in rows)
    head = ["arm", *(["chosen"] if choice else []), "parameters", "new", "trained"]
    head += [with_n(name, rows) for name in study.figures]
    head += ["seconds", "peak GiB", "seeds"]
    table = []
    for row in rows:
        chosen = study.told(row["arm"], row["chosen"], edges=True) or "–"
        cells = [row["arm"], *([chosen] if choice else [])]
        cells += [_cell(row[k], ",d") for k in ("parameters", "new_parameters", "trainable")]
        for name, figure in study.figures.items():
            found, seeds = row["figures"][name], len(row["seeds"])
            some = "" if found["n"] in (0, seeds) else f" ({found['n']} of {seeds} seeds)"
            cells.append(_spread(found, figure.form) + some)
        cells += [
            _spread(row["seconds"], ".0f"),
            _spread(_scaled(row["peak_bytes"], 2**-30), ".2f"),
            ", ".join(map(str, row["seeds"])) or "none",
        ]
        table.append(cells)
    return "Mean ± standard deviation over seeds\n\n" + _table(head, table)


def _compared(study: Study, rows: Sequence[Mapping[str, Any]], other: str) -> str:
    table = [
        [row["arm"]]
        + [
            _spread(row["differences"][other][name], f"+{figure.form}")
            for name, figure in study.figures.items()
        ]
        + [str(max(found["n"] for found in row["differences"][other].values()))]
        for row in rows
        if row["arm"] != other
    ]
    head = ["arm", *study.figures, "pairs"]
    return f"Difference to {other}, between runs with the same seed\n\n" + _table(head, table)


def _by_seed(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        [row["arm"], str(seed)]
        + [_cell(row["figures"][n]["by_seed"][seed], f.form) for n, f in study.figures.items()]
        for row in rows
        for seed in row["seeds"]
    ]
    return "Every run\n\n" + _table(["arm", "seed", *study.figures], table)


def _candidates(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    assert study.choice is not None, "an arm with candidates"
    by = study.choice.by
    table = [
        [
            row["arm"],
            study.told(row["arm"], found["settings"]) + (" *" if is_chosen(row, found) else ""),
            _cell(found[by], ".4f"),
            *(_cell(found["figures"][name], f.form) for name, f in study.figures.items()),
            _cell(found["seconds"], ".0f"),
        ]
        for row in rows
        for found in row["candidates"]
    ]
    head = ["arm", "candidate", by, *study.figures, "seconds"]
    return f"{choosing_title(study)} (* chosen)\n\n" + _table(head, table)


def choosing_title(study: Study) -> str:
    """What the candidates are, for a heading."""
    assert study.choice is not None, "a study that chooses"
    words = [f"{key.rpartition('.')[2]} {value}" for key, value in study.choice.settings.items()]
    return ", ".join(["Candidates", *words, f"seed {study.choice.seed}"])


def is_chosen(row: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    """Whether it is the candidate that the arm's runs with all seeds were made of."""
    return bool(row["chosen"]) and row["chosen"] == candidate["settings"]


def with_n(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A figure's name, with the number of items that it was measured on, where that is known."""
    items = sorted({n for row in rows for n in row["figures"][name]["n_items"]})
    return f"{name} (n = {' or '.join(f'{n:,}' for n in items)})" if items else name


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


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
