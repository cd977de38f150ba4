"""tools/gpu.py in its small form on the CPU: every part runs."""

import importlib.util

import pytest
from training_data import TOOLS


@pytest.mark.slow
def test_every_part_of_the_gpu_table_runs_in_small_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("gpu_tool", TOOLS / "gpu.py")
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    gpu.main(["--small", "--device", "cpu", "--out", str(tmp_path / "gpu.md")])
    text = (tmp_path / "gpu.md").read_text()
    assert "failed" not in text and "not run" not in text, text
    for part in ("compiled", "decoded, bfloat16", "probe's step", "scoring", "configs/vit.yaml"):
        assert part in text
