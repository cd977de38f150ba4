"""Pictures of a study, from the rows of `mmpreproj.studies.summarise`.

An arm has the same colour in all of them. `mmpreproj.analysis.plots.write` saves them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mmpreproj.analysis.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKIP_PANELS,
    Figure,
    finite,
    panels,
    short,
    ticker,
)
from mmpreproj.studies.summary import is_chosen, with_n

__all__ = ["arms_by_seed", "frontier", "skip_by_layer"]

COLOURS = (GREY, BLUE, ORANGE, GREEN, "#805ad5", "#c53030", "#0d9488", "#b7791f")
STYLES = ("o-", "s--", "^:", "v-.")
FAR = 1.5  # ranges of the other arms: an arm further off is told, and not drawn
FENCE = 1.5  # interquartile ranges: a candidate further off the others is counted, and not in view

Rows = Sequence[Mapping[str, Any]]
Points = Sequence[tuple[float, float]]


def arms_by_seed(rows: Rows, title: str = "") -> Figure:
    """A panel for each metric of the study: a point for every seed of every arm, and the mean."""
    names = list(rows[0]["figures"])
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    figure, axes = panels(columns, 4.4 * columns, 3.3 * lines + 0.4, lines)
    for axis, name in zip(axes, names, strict=False):
        values = [
            [v for v in map(finite, row["figures"][name]["by_seed"].values()) if v is not None]
            for row in rows
        ]
        far = _far(values)
        for place, found in enumerate(values):
            if found and place not in far:
                mean = sum(found) / len(found)
                axis.plot([place] * len(found), found, "o", color=_colour(place), ms=6, alpha=0.7)
                axis.plot([place - 0.3, place + 0.3], [mean, mean], color=_colour(place), lw=2)
        axis.set_xticks(range(len(rows)), [short(row["arm"], 18) for row in rows], fontsize=8)
        axis.tick_params("x", rotation=25 if len(rows) > 3 else 0)
        axis.set_xlim(-0.6, len(rows) - 0.4)
        form = ".1%" if _is_share(rows, name) else ".4g"
        off = [f"{rows[i]['arm']}: {sum(values[i]) / len(values[i]):{form}}" for i in far]
        note = f"\noff the scale: {', '.join(off)}" if off else ""
        axis.set_title(f"{with_n(name, rows)}{note}", fontsize=10)
        _scale(axis.yaxis, rows, name)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    seeds = max((len(row["seeds"]) for row in rows), default=0)
    figure.suptitle(f"{title}: every seed ({seeds}), and the mean".lstrip(": "), fontsize=11)
    return figure


def skip_by_layer(rows: Rows, title: str = "") -> Figure | None:
    """How strong each arm's skip is in each layer: as a weight, and beside attention.

    Mean over the seeds, with the standard deviation. None where no arm has a skip.
    """
    drawn = [(place, row) for place, row in enumerate(rows) if row["skip"]]
    if not drawn:
        return None
    figure, axes = panels(2, 11, 3.8)
    for axis, (key, (name, label)) in zip(axes, SKIP_PANELS.items(), strict=True):
        for place, row in drawn:
            layers = [entry["layer"] for entry in row["skip"]]
            means = [finite(entry[key]["mean"], math.nan) for entry in row["skip"]]
            spread = [entry[key]["std"] or 0.0 for entry in row["skip"]]
            axis.errorbar(
                layers, means, spread, marker="o", ms=4, color=_colour(place), label=row["arm"]
            )
        axis.set(title=name, xlabel="layer (from 0)", ylabel=label)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title}: content skip by layer, mean over seeds".lstrip(": "), fontsize=11)
    return figure


def frontier(rows: Rows, learned: str, kept: Sequence[str], title: str = "") -> Figure:
    """Learning against keeping: a small point for every candidate, joined in order of rate, with a
    ring where it was chosen; a star for an arm's runs with all seeds; a level for an arm that had
    nothing to choose. Candidates far off the others (a rate that broke the model) are left outside
    the view, and counted.

    Args:
        learned: the metric on the x axis, of text of the training kind.
        kept: the metrics on the y axes, a panel each.
    """
    figure, axes = panels(len(kept), 5.2 * len(kept), 5.4, grid="both")
    for axis, name in zip(axes, kept, strict=True):
        tried: list[tuple[float, float]] = []
        final: list[tuple[float, float]] = []
        levels: list[float] = []
        for place, row in enumerate(rows):
            colour = _colour(place)
            lines = _lines(row, learned, name)
            for style, (kind, points) in zip(STYLES * len(rows), lines.items(), strict=False):
                label = f"{row['arm']}{f' ({kind})' if kind else ''}"
                xs, ys, rates, rings = zip(*points, strict=True)
                tried += zip(xs, ys, strict=True)
                axis.plot(xs, ys, style, color=colour, ms=4, lw=1, alpha=0.8, label=label)
                for x, y, rate, ring in zip(xs, ys, rates, rings, strict=True):
                    axis.annotate(f" {rate}", (x, y), fontsize=6.5, color=colour, clip_on=True)
                    if ring:
                        axis.plot(x, y, "o", ms=11, mfc="none", color=colour)
            x, y = row["figures"][learned], row["figures"][name]
            if None in (x["mean"], y["mean"]):
                continue
            if not row["candidates"]:  # the base, mostly, which has learned nothing
                label = f"{row['arm']} (its {learned}: {x['mean']:.4g})"
                levels.append(y["mean"])
                axis.axhline(y["mean"], color=colour, ls=":", label=label)
            else:
                final.append((x["mean"], y["mean"]))
                spread = (y["std"] or 0.0, x["std"] or 0.0)
                star = {"color": colour, "ms": 13, "mec": "black", "mew": 0.6}
                axis.errorbar(*final[-1], *spread, "*", label=f"{row['arm']}, final", **star)
        _set_view(axis, tried, final, levels)
        for side, scale, metric in (("x", axis.xaxis, learned), ("y", axis.yaxis, name)):
            better = "higher" if _is_share(rows, metric) else "lower"
            axis.set(**{f"{side}label": f"{metric} ({better} is better)"})
            _scale(scale, rows, metric)
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {k: v for v, k in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        order = sorted(handles, key=lambda label: label.endswith(", final"))
        below = {"loc": "outside lower center", "ncols": 4, "handlelength": 3}
        entries = [handles[label] for label in order]
        figure.legend(entries, order, frameon=False, fontsize=8, **below)
    figure.suptitle(title, fontsize=11)
    return figure


def _lines(
    row: Mapping[str, Any], learned: str, kept: str
) -> dict[str, list[tuple[float, float, str, bool]]]:
    """{what else was tried: [(learned, kept, rate, chosen), …] by rate}, of an arm's candidates."""
    lines: dict[str, list[tuple[float, float, str, bool]]] = {}
    for found in row["candidates"]:
        settings = dict(found["settings"])
        rate = next((settings.pop(key) for key in list(settings) if key.endswith("lr")), "")
        point = (finite(found["figures"][learned]), finite(found["figures"][kept]))
        if None not in point:
            scales = [
                f"scale {o['scale']:g}" if isinstance(o, Mapping) and "scale" in o else str(o)
                for o in settings.values()
            ]
            line = lines.setdefault(", ".join(scales), [])
            line.append((*point, str(rate), is_chosen(row, found)))
    for line in lines.values():
        line.sort(key=lambda point: float(point[2] or 0))
    return lines


def _set_view(axis: Any, tried: Points, final: Points, levels: Sequence[float]) -> None:
    """Limit the axes to the final runs and to the candidates near each other; count the rest."""
    fences = [_fence(values) for values in zip(*tried, strict=True)]
    near = [p for p in tried if all(a <= v <= b for v, (a, b) in zip(p, fences, strict=True))]
    if len(near) == len(tried):
        return
    xs, ys = zip(*near, *final, strict=True)
    for set_limits, values in ((axis.set_xlim, xs), (axis.set_ylim, (*ys, *levels))):
        room = 0.06 * (max(values) - min(values))
        set_limits(min(values) - room, max(values) + room)
    axis.set_title(f"{len(tried) - len(near)} of {len(tried)} candidates off the scale", fontsize=9)


def _fence(values: Sequence[float]) -> tuple[float, float]:
    """Tukey's outer limits of what belongs together; without any for a few values."""
    if len(values) < 8:
        return -math.inf, math.inf
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low - FENCE * (high - low), high + FENCE * (high - low)


def _far(values: Sequence[Sequence[float]]) -> list[int]:
    """Arms so far off that the others would fall into one line."""
    far = []
    if len([found for found in values if found]) > 2:
        for place, found in enumerate(values):
            rest = [v for other, vs in enumerate(values) if other != place for v in vs]
            room = FAR * (max(rest) - min(rest))
            if found and room and (min(found) > max(rest) + room or max(found) < min(rest) - room):
                far.append(place)
    return far


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _is_share(rows: Rows, name: str) -> bool:
    return any(row["figures"][name]["is_share"] for row in rows)


def _scale(axis: Any, rows: Rows, name: str) -> None:
    if _is_share(rows, name):
        axis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=1))
