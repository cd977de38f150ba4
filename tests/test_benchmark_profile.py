"""tools/benchmark.py profile: operations belong to the part that they are of, backwards too."""

import pytest
import timm
import torch
from training_data import TOOLS

pytestmark = pytest.mark.slow


def test_operations_are_counted_by_part_forward_and_backward(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from benchmarks.profiling import by_part

    size = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2}
    model, images = timm.create_model("vit_preproj_tiny", **size), torch.randn(2, 3, 32, 32)
    found = by_part(model, lambda: model(images).logsumexp(1).sum().backward(), 2)
    # a multiplication and an addition a weight and token, forward, and twice that backward
    once = 6 * (16 + 1) * len(images) * size["depth"] * size["embed_dim"] ** 2
    assert found["content skip"]["flops"] == once
    assert found["pre-projection"]["flops"] == pytest.approx(2 * 1.25 * once)
    assert found["mlp"]["flops"] == 8 * once
    assert all(found[part]["backward"] > 0 for part in ("content skip", "pre-projection", "mlp"))
