"""Figures of a run, written as PNG.

matplotlib's object interface throughout: no pyplot state, so importing this leaves the user's
backend alone, no display is needed and no figure stays open.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmpreproj.messages import need

__all__ = ["learning_curves", "predictions", "skip_by_layer", "write"]

Figure = need("matplotlib.figure", "a plot", "train").Figure
ticker = need("matplotlib.ticker", "a plot", "train")

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
SKIP_PANELS = {  # the two strengths of a skip: name and axis label
    "weight": ("Weights", "$\\Vert W_{skip}\\Vert_F\\;/\\;\\sqrt{D}$"),
    "activation": (
        "Activations",
        "$\\Vert W_{skip}\\,\\tilde{x}\\Vert\\;/\\;\\Vert attention\\Vert$",
    ),
}


def learning_curves(
    history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = ""
) -> Path:
    """Loss of training and validation, top-1 of validation, and the learning rate by epoch.

    Args:
        history: one row an epoch: "epoch" (from 0) and, where known, "train/loss", "val/loss",
            "val/top1", "lr", "train/n", "val/n". Missing and non-finite values leave gaps.
        path: the PNG to write.
        title: above the panels, such as the run's name.
    """
    scored = any("val/top1" in row for row in history) or not any(
        "val/loss" in row for row in history
    )  # a language model has a loss alone
    figure, axes = panels(3 if scored else 2, 12.5 if scored else 8.5, 3.6)
    loss, rate = axes[0], axes[-1]
    validation = f"validation{_n(history, 'val/n')}"
    _curve(loss, history, "train/loss", BLUE, f"training, as optimised{_n(history, 'train/n')}")
    _curve(loss, history, "val/loss", ORANGE, validation)
    loss.set(title="Loss", ylabel="loss (validation: cross-entropy)")
    if scored:
        _accuracy_curve(axes[1], history, validation)
    _curve(rate, history, "lr", GREY, "highest of the groups")
    rate.set(title="Learning rate at the epoch's end", ylabel="learning rate")
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        _legend_or_note(axis)
    return write(figure, path, title)


def _accuracy_curve(top1: Any, history: Sequence[Mapping[str, Any]], label: str) -> None:
    _curve(top1, history, "val/top1", ORANGE, label)
    known = [row for row in history if finite(row.get("val/top1")) is not None]
    if known:  # of equal ones the one with the lower loss, as the best checkpoint is chosen
        best = max(known, key=lambda row: (row["val/top1"], -finite(row.get("val/loss"), math.inf)))
        epoch, score = best["epoch"] + 1, best["val/top1"]
        top1.plot(epoch, score, "o", color=GREEN, label=f"best: {score:.2%}, epoch {epoch:.0f}")
    top1.set(title="Top-1 accuracy", ylabel="correct")
    top1.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))


def skip_by_layer(
    rows: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    title: str = "",
    n_images: int | None = None,
) -> Path:
    """Bars of the skip's strength by layer, from `mmpreproj.analysis.skip_strength`.

    The second panel (activations) is left out where no row has the measure.
    """
    measured = any(finite(row.get("activation")) is not None for row in rows)
    figure, axes = panels(2 if measured else 1, 11 if measured else 6.5, 3.8)
    layers = [row["layer"] for row in rows]
    drawn = zip(axes, SKIP_PANELS.items(), (BLUE, GREEN), strict=False)
    for axis, (key, (name, label)), colour in drawn:
        if key == "activation" and n_images is not None:
            name += f" ({n_images} images)"
        heights = [finite(row.get(key), math.nan) for row in rows]
        axis.bar(layers, heights, color=colour, width=0.7)
        axis.set(title=name, xlabel="layer (from 0)", ylabel=label)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if layers:
            axis.set_xlim(min(layers) - 0.6, max(layers) + 0.6)
        axis.set_ylim(bottom=0)
        if all(map(math.isnan, heights)):
            _legend_or_note(axis)
    return write(figure, path, title)


def predictions(
    images: Sequence[Any],
    names: Sequence[str],
    top: Sequence[Any],
    path: str | os.PathLike[str],
    title: str = "",
    most: int = 8,
) -> Path:
    """Pictures or clips as a person sees them, each beside bars of its likeliest classes.

    Args:
        images: pictures (PIL's or arrays), or clips as uint8 [T, H, W, 3], whose sampled frames are
            drawn in order; as read from file, before the model's crop and scale.
        names: what stands above each.
        top: for each its (class, probability) pairs, likeliest first; or such pairs by label set.
        most: frames drawn of a clip, evenly spaced; their numbers in the sample stand above them.
    """
    clips = [a if a.ndim == 4 else a[None] for a in map(np.asarray, images)]
    sets = [labels if isinstance(labels, Mapping) else {"": labels} for labels in top]
    drawn = min(most, max(map(len, clips)))
    columns = 2 if drawn == 1 and len(clips) > 2 else 1
    ratios = ([2.0 if drawn == 1 else 1.35] * drawn + [3.0] * max(map(len, sets))) * columns
    lines = math.ceil(len(clips) / columns)
    size = (sum(ratios), (2.3 if drawn == 1 else 1.9) * lines + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(lines, len(ratios), width_ratios=ratios)
    for index, (clip, name, labels) in enumerate(zip(clips, names, sets, strict=True)):
        line, left = index // columns, index % columns * (len(ratios) // columns)
        small = max(clip.shape[1:3]) <= 64  # show the pixels of a thumbnail instead of a blur
        chosen = np.linspace(0, len(clip) - 1, min(drawn, len(clip))).round().astype(int)
        for place, number in enumerate(chosen, left):
            picture = figure.add_subplot(grid[line, place])
            blur = "nearest" if small else "antialiased"
            picture.imshow(clip[number], cmap="gray", interpolation=blur)
            picture.set_axis_off()
            above = [short(name, 22) if place == left else ""]
            above += [f"{number + 1} of {len(clip)}"] if drawn > 1 else []
            picture.set_title("\n".join(above), fontsize=8, loc="left")
        for place, (label, classes) in enumerate(labels.items(), left + drawn):
            bars = figure.add_subplot(grid[line, place])
            _bars(bars, classes)
            if len(labels) > 1:
                bars.set_title(label, fontsize=9)
    return write(figure, path, title)


def _bars(axis: Any, classes: Sequence[tuple[str, float]]) -> None:
    shares = [p for _, p in classes]
    drawn = axis.barh(range(len(classes)), shares, color=[BLUE] + [GREY] * (len(classes) - 1))
    axis.bar_label(drawn, [f" {p:.1%}" for p in shares], fontsize=8)
    axis.set_yticks(range(len(classes)), [short(c, 22) for c, _ in classes], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.18)  # room for the label of a certain prediction
    axis.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def panels(
    columns: int, width: float, height: float, lines: int = 1, grid: str = "y"
) -> tuple[Figure, list[Any]]:
    """A figure, and its axes line by line: light grid lines behind what is drawn, and no box."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes:
        axis.grid(True, axis=grid, color="#e2e8f0", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _curve(
    axis: Any, history: Sequence[Mapping[str, Any]], key: str, colour: str, label: str
) -> None:
    """Draw the finite values of one column of the history."""
    points = [(row["epoch"] + 1, finite(row.get(key))) for row in history]
    points = [(epoch, value) for epoch, value in points if value is not None]
    if points:
        # A marker shows a lone epoch, which a line alone would not.
        marker = "o" if len(points) < 16 else None
        axis.plot(*zip(*points, strict=True), marker=marker, ms=3.5, color=colour, label=label)


def _legend_or_note(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)
    else:
        axis.text(0.5, 0.5, "no finite values", transform=axis.transAxes, ha="center", color=GREY)


def finite(value: Any, otherwise: float | None = None) -> float | None:
    """The number; `otherwise` for what is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else otherwise


def _n(history: Sequence[Mapping[str, Any]], key: str) -> str:
    known = [row[key] for row in history if row.get(key) is not None]
    return f" (n = {known[-1]:,.0f})" if known else ""


def short(text: str, length: int) -> str:
    """The text, its middle left out where it is longer."""
    text = text.replace("$", r"\$")  # matplotlib would read a pair of $ as a formula
    return text if len(text) <= length else f"{text[: length // 2 - 1]}…{text[-length // 2 :]}"


def write(figure: Figure, path: str | os.PathLike[str], title: str = "") -> Path:
    """Save a figure as PNG; the title stands above its panels."""
    if title:
        figure.suptitle(title, fontsize=11)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path
