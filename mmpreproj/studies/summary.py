"""What a study came to: its arms side by side, from the records that its runs left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmpreproj.analysis.records import mean_spread
from mmpreproj.studies.study import Metric, Run, Study, value_at

__all__ = ["choosing_title", "is_chosen", "markdown", "summarise", "with_n"]

STRENGTHS = ("weight", "activation")
Record = Mapping[str, Any]


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
    records: dict[str, dict[int, Record]] = {arm: {} for arm in study.arms}
    for run in runs:
        record = run.record(root)
        if record is not None:
            records[run.arm][run.seed] = record
    rows = []
    for arm, by_seed in records.items():
        of_arm = list(by_seed.values())
        one = of_arm[0] if of_arm else None
        rows.append(
            {
                "arm": arm,
                "chosen": next((run.chosen for run in runs if run.arm == arm), None),
                "seeds": list(by_seed),
                "missing": [seed for seed in study.seeds if seed not in by_seed],
                "figures": {name: _over_seeds(m, by_seed) for name, m in study.metrics.items()},
                "differences": {
                    other: {
                        name: _difference(metric, by_seed, records[other])
                        for name, metric in study.metrics.items()
                    }
                    for other in study.baselines
                    if other != arm
                },
                "parameters": value_at(one, "parameters", "total"),
                "new_parameters": value_at(one, "parameters", "new"),
                "trainable": value_at(one, "parameters", "trainable"),
                "seconds": mean_spread(value_at(r, "training", "seconds") for r in of_arm),
                "peak_bytes": mean_spread(value_at(r, "peak_bytes", "rss") for r in of_arm),
                "skip": _skip_by_layer(of_arm),
                "candidates": [
                    _candidate(study, run, run.record(root)) for run in choosing if run.arm == arm
                ],
            }
        )
    return rows


def _over_seeds(metric: Metric, records: Mapping[int, Record]) -> dict[str, Any]:
    by_seed = {seed: metric.of(record) for seed, record in records.items()}
    items = {n for record in records.values() if (n := metric.n_of(record)) is not None}
    return {
        **mean_spread(by_seed.values()),
        "by_seed": by_seed,
        "n_items": sorted(items),
        "is_share": metric.is_share,
    }


def _difference(
    metric: Metric, records: Mapping[int, Record], others: Mapping[int, Record]
) -> dict[str, Any]:
    pairs = [(metric.of(records[s]), metric.of(others[s])) for s in records if s in others]
    return mean_spread(a - b for a, b in pairs if a is not None and b is not None)


def _candidate(study: Study, run: Run, record: Record | None) -> dict[str, Any]:
    return {
        "settings": run.candidate,
        "seed": run.seed,
        "figures": {name: metric.of(record) for name, metric in study.metrics.items()},
        study.choice.by: Metric(study.choice.by).of(record),
        "seconds": value_at(record, "training", "seconds"),
    }


def _skip_by_layer(records: Iterable[Record]) -> list[dict[str, Any]]:
    by_layer: dict[int, list[Record]] = {}
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
    parts += [_compared(study, rows, other) for other in study.baselines if len(rows) > 1]
    if any(row["seeds"] for row in rows):
        parts.append(_every_run(study, rows))
    if any(row["candidates"] for row in rows):
        parts.append(_candidates(study, rows))
    return "\n".join(parts)


def _means(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    choice = ["chosen"] if any(row["candidates"] for row in rows) else []
    head = ["arm", *choice, "parameters", "new", "trained"]
    head += [with_n(name, rows) for name in study.metrics]
    table = []
    for row in rows:
        cells = [study.told(row["arm"], row["chosen"], edges=True) or "–" for _ in choice]
        cells += [_cell(row[k], ",d") for k in ("parameters", "new_parameters", "trainable")]
        for name, metric in study.metrics.items():
            found, seeds = row["figures"][name], len(row["seeds"])
            some = "" if found["n"] in (0, seeds) else f" ({found['n']} of {seeds} seeds)"
            cells.append(_spread(found, metric.form) + some)
        cells += [_spread(row["seconds"], ".0f"), _spread(row["peak_bytes"], ".2f", 2**-30)]
        table.append([row["arm"], *cells, ", ".join(map(str, row["seeds"])) or "none"])
    head += ["seconds", "peak GiB", "seeds"]
    return _table("Mean ± standard deviation over seeds", head, table)


def _compared(study: Study, rows: Sequence[Mapping[str, Any]], other: str) -> str:
    table = []
    for row in rows:
        if row["arm"] != other:
            found = row["differences"][other]
            cells = [_spread(found[name], f"+{m.form}") for name, m in study.metrics.items()]
            pairs = max(difference["n"] for difference in found.values())
            table.append([row["arm"], *cells, str(pairs)])
    title = f"Difference to {other}, between runs with the same seed"
    return _table(title, ["arm", *study.metrics, "pairs"], table)


def _every_run(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        [row["arm"], str(seed)]
        + [
            _cell(row["figures"][name]["by_seed"][seed], m.form)
            for name, m in study.metrics.items()
        ]
        for row in rows
        for seed in row["seeds"]
    ]
    return _table("Every run", ["arm", "seed", *study.metrics], table)


def _candidates(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    by = study.choice.by
    table = [
        [
            row["arm"],
            study.told(row["arm"], found["settings"]) + (" *" if is_chosen(row, found) else ""),
            _cell(found[by], ".4f"),
            *(_cell(found["figures"][name], m.form) for name, m in study.metrics.items()),
            _cell(found["seconds"], ".0f"),
        ]
        for row in rows
        for found in row["candidates"]
    ]
    head = ["arm", "candidate", by, *study.metrics, "seconds"]
    return _table(f"{choosing_title(study)} (* chosen)", head, table)


def choosing_title(study: Study) -> str:
    """What the candidates are, for a heading."""
    words = [f"{key.rpartition('.')[2]} {value}" for key, value in study.choice.settings.items()]
    return ", ".join(["Candidates", *words, f"seed {study.choice.seed}"])


def is_chosen(row: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    """Whether it is the candidate that the arm's runs with all seeds were made of."""
    return bool(row["chosen"]) and row["chosen"] == candidate["settings"]


def with_n(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A metric's name, with the number of items that it was measured on, where that is known."""
    items = sorted({n for row in rows for n in row["figures"][name]["n_items"]})
    return f"{name} (n = {' or '.join(f'{n:,}' for n in items)})" if items else name


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = f"|{'---|' * len(head)}"
    lines = [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([title, "", *lines, ""])


def _spread(found: Mapping[str, Any], form: str, unit: float = 1) -> str:
    if found["mean"] is None:
        return "–"
    spread = found["std"]
    told = "" if spread is None else f" ± {format(spread * unit, form.lstrip('+'))}"
    return f"{format(found['mean'] * unit, form)}{told}"


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
