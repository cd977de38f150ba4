"""Pictures of a study: what stands in them, read back from the figures."""

import math

import pytest

from mmpreproj.analysis.plots import write
from mmpreproj.analysis.records import mean_spread
from mmpreproj.studies.study_plots import COLOURS, arms_by_seed, frontier, skip_by_layer


def figure(by_seed, is_share, n):
    spread = mean_spread(by_seed.values())
    return {**spread, "by_seed": by_seed, "is_share": is_share, "n_items": [n]}


def row(arm, ppl, accuracy, candidates=(), chosen=None, skip=()):
    return {
        "arm": arm,
        "seeds": [0, 1],
        "chosen": chosen,
        "figures": {
            "ppl": figure(dict(enumerate(ppl)), False, 70),
            "accuracy": figure(dict(enumerate(accuracy)), True, 50),
        },
        "candidates": list(candidates),
        "skip": list(skip),
    }


def candidate(ppl, accuracy, **settings):
    return {"settings": settings, "figures": {"ppl": ppl, "accuracy": accuracy}}


def layer(number, weights, activations):
    return {
        "layer": number,
        "weight": mean_spread(weights),
        "activation": mean_spread(activations),
    }


TRIED = [
    candidate(30.5, 0.33, lora={"scale": 2.0}, lr="1e-3"),
    candidate(31.0, 0.35, lora={"scale": 2.0}, lr="3e-4"),
    candidate(30.7, 0.34, lora={"scale": 1.0}, lr="1e-3"),
]
ROWS = [
    row("base", [40.0, 40.0], [0.3, 0.3]),
    row("lora", [30.0, 30.4], [0.32, None], TRIED, TRIED[1]["settings"]),
    row(
        "both",
        [30.1, 30.3],
        [0.31, 0.35],
        [candidate(31.5, 0.3, lr=0.01), candidate(None, 0.3, lr=0.1)],
        skip=[layer(0, [0.2, 0.4], [0.5, 0.5]), layer(1, [None, None], [0.1, 0.3])],
    ),
]


def lines(axis):
    return [tuple(map(tuple, (line.get_xdata(), line.get_ydata()))) for line in axis.lines]


def test_every_figure_has_a_panel_with_the_points_of_all_seeds(tmp_path):
    drawn = arms_by_seed(ROWS, "study")
    ppl, accuracy = drawn.axes
    assert ppl.get_title() == "ppl (n = 70)\noff the scale: base: 40"
    assert ((1, 1), (30.0, 30.4)) in lines(ppl) and ((2, 2), (30.1, 30.3)) in lines(ppl)
    assert not any(0 in xs for xs, _ in lines(ppl))  # the base would press the others together
    assert ((0, 0), (0.3, 0.3)) in lines(accuracy) and ((1,), (0.32,)) in lines(accuracy)
    means = {round(ys[0], 6) for xs, ys in lines(accuracy) if len(set(xs)) == 2}
    assert means == {0.3, 0.32, 0.33}
    assert accuracy.yaxis.get_major_formatter()(0.325) == "32.5%"
    write(drawn, tmp_path / "a.png")


def test_the_skips_weights_and_activations_are_drawn_by_layer(tmp_path):
    drawn = skip_by_layer(ROWS)
    for axis, means in zip(drawn.axes, ([0.3, math.nan], [0.5, 0.2]), strict=True):
        (points,) = (c for c in axis.containers if c.get_label() == "both")
        assert list(points[0].get_ydata()) == pytest.approx(means, nan_ok=True)
        assert points[0].get_color() == COLOURS[2]
    write(drawn, tmp_path / "a.png")
    assert skip_by_layer(ROWS[:2]) is None


def test_the_frontier_joins_candidates_by_rate_and_adds_the_final_runs(tmp_path):
    drawn = frontier(ROWS, "ppl", ["accuracy"], "what was tried")
    (axis,) = drawn.axes
    assert ((31.0, 30.5), (0.35, 0.33)) in lines(axis)  # 3e-4, then 1e-3
    assert ((30.7,), (0.34,)) in lines(axis) and ((31.5,), (0.3,)) in lines(axis)
    rings = [line for line in axis.lines if line.get_markersize() == 11]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in rings] == [(31.0, 0.35)]
    stars = [line for line in axis.lines if line.get_marker() == "*"]
    where = {(round(line.get_xdata()[0], 6), round(line.get_ydata()[0], 6)) for line in stars}
    assert where == {(30.2, 0.32), (30.2, 0.33)}
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels == [
        "base (its ppl: 40)", "lora (scale 2)", "lora (scale 1)", "both", "lora, final",
        "both, final",
    ]  # fmt: skip
    assert axis.get_xlabel() == "ppl (lower is better)"
    assert axis.get_ylabel() == "accuracy (higher is better)"
    write(drawn, tmp_path / "a.png")


def test_a_candidate_far_off_the_others_is_counted_and_left_out_of_view():
    near = [candidate(31 + 0.1 * i, 0.30 + 0.01 * i, lr=10.0**-i) for i in range(8)]
    rows = [ROWS[0], row("both", [28.0, 28.0], [0.3, 0.3], [*near, candidate(90.0, 0.3, lr=10.0)])]
    (axis,) = frontier(rows, "ppl", ["accuracy"]).axes
    assert axis.get_title() == "1 of 9 candidates off the scale"
    low, high = axis.get_xlim()
    assert low < 28.0 and 31.7 < high < 40  # the final runs and the eight; not 90, nor the base's
    (axis,) = frontier([ROWS[0], row("both", [28.0], [0.3], near)], "ppl", ["accuracy"]).axes
    assert axis.get_title() == ""
