import math
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import _pylab_helpers
from PIL import Image

from mmpreproj.analysis import plots

pytestmark = pytest.mark.slow

HISTORY = [
    {"epoch": 0, "train/loss": 2.0, "val/loss": 2.1, "val/top1": 0.2, "lr": 1e-3, "val/n": 10},
    {"epoch": 1, "train/loss": math.nan, "val/loss": None, "lr": 5e-4},
    {"epoch": 2, "train/loss": 1.0, "val/loss": 1.1, "val/top1": 0.8, "lr": 1e-4, "val/n": 10},
]
ROWS = [{"layer": i, "weight": 0.1 * i, "activation": 0.2} for i in range(4)]


def is_picture(path):
    with Image.open(path) as image:
        image.load()
        return image.format == "PNG" and len(image.convert("L").getcolors()) > 2


def test_curves_are_drawn_with_gaps_and_with_one_or_no_epoch(tmp_path):
    for name, history in (("a", HISTORY), ("b", HISTORY[:1]), ("c", []), ("d", HISTORY[1:2])):
        assert is_picture(plots.learning_curves(history, tmp_path / f"{name}.png", "title"))


def test_skip_bars_are_drawn_for_one_layer_nan_and_without_activations(tmp_path):
    cases = {
        "many": ROWS,
        "one": ROWS[:1],
        "nan": [{"layer": 0, "weight": math.nan, "activation": math.inf}],
        "weights": [{"layer": 0, "weight": 0.3, "activation": None}],
        "none": [],
    }
    for name, rows in cases.items():
        assert is_picture(plots.skip_by_layer(rows, tmp_path / f"{name}.png", "title", 3))


def test_predictions_draw_grey_and_colour_and_odd_names(tmp_path):
    images = [Image.new("L", (8, 8)), Image.new("RGB", (90, 30), "red"), np.zeros((4, 9, 3))]
    top = [[("a $cat$", 0.9), ("b", 0.1)], [("c", 1.0)], [("d" * 50, 0.5)]]
    path = plots.predictions(images, ["x$y$.png", "n" * 80, "z"], top, tmp_path / "p.png", "t")
    assert is_picture(path)


def test_no_figure_stays_open(tmp_path):
    for _ in range(5):
        plots.learning_curves(HISTORY, tmp_path / "a.png")
    assert not _pylab_helpers.Gcf.figs


def test_plots_need_no_display_and_leave_the_backend_alone(tmp_path):
    code = (
        "import matplotlib; before = matplotlib.rcParams._get('backend'); "
        "from mmpreproj.analysis import plots; "
        "plots.skip_by_layer([{'layer': 0, 'weight': 1.0}], 'a.png'); import sys; "
        "assert matplotlib.rcParams._get('backend') == before; "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DISPLAY"}
    environment["MPLBACKEND"] = "tkagg"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert is_picture(tmp_path / "a.png")
