import json
import math

import pytest
import torch
from scipy.stats import binomtest

from mmpreproj.analysis.records import (
    mean_spread,
    plain,
    proportion,
    read_record,
    wilson_interval,
    write_json,
)


@pytest.mark.parametrize(
    ("correct", "n"), [(0, 1), (1, 1), (0, 10), (530, 540), (540, 540), (3, 7)]
)
def test_wilson_interval_equals_scipys(correct, n):
    expected = binomtest(correct, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(correct, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_interval_stays_within_bounds_and_around_the_estimate():
    for n in (1, 2, 50):
        for correct in range(n + 1):
            low, high = wilson_interval(correct, n)
            assert 0 <= low <= correct / n <= high <= 1


def test_no_trials_give_no_figure():
    assert wilson_interval(0, 0) is None
    assert proportion(0, 0) == {"value": None, "correct": 0, "n": 0, "interval95": None}


def test_more_correct_than_trials_is_refused():
    with pytest.raises(ValueError, match="between 0 and n=3, found 4"):
        wilson_interval(4, 3)


def test_spread_leaves_missing_values_out_and_counts_them():
    found = mean_spread([1.0, None, 3.0, math.nan])
    assert found["mean"] == 2.0
    assert found["std"] == pytest.approx(math.sqrt(2))  # sample deviation of 1 and 3
    assert (found["n"], found["missing"], found["min"], found["max"]) == (2, 2, 1.0, 3.0)
    assert mean_spread([0.5])["std"] is None
    assert mean_spread([None])["mean"] is None


def test_a_record_holds_missing_figures_as_null(tmp_path):
    content = {"loss": math.nan, "top1": torch.tensor(0.5), "n": torch.tensor(3), "path": tmp_path}
    path = write_json(tmp_path / "deep" / "record.json", content)
    text = path.read_text()
    assert json.loads(text) == {"loss": None, "top1": 0.5, "n": 3, "path": str(tmp_path)}
    assert "NaN" not in text
    assert read_record(path.parent) == read_record(path)
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_reading_what_is_no_record_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no record at"):
        read_record(tmp_path)
    (tmp_path / "record.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, found list"):
        read_record(tmp_path)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_record(tmp_path)


def test_plain_keeps_booleans_and_text():
    assert plain({"a": (True, None, "x", 2, math.inf)}) == {"a": [True, None, "x", 2, None]}
