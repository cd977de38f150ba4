"""Damaged and nonsensical files give a result or a named error: a part of tools/fuzz.py."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("av")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import fuzz  # noqa: E402

LONG = ("config", "adapter-json", "adapter-safetensors", "checkpoint", "resume", "gguf")
KINDS = [
    pytest.param(kind, marks=pytest.mark.long if kind in LONG else pytest.mark.slow)
    for kind in fuzz.KINDS
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and forks")
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_mutants_end_in_a_result_or_a_named_error(kind, tmp_path):
    numbers = range(max(1, int(50 * fuzz.KINDS[kind].share)))
    found = list(fuzz.run(kind, numbers, seed=0, folder=tmp_path, loud=False))
    assert [f["mutant"] for f in found] == list(numbers)
    assert not [f for f in found if f["outcome"] not in fuzz.GOOD]
