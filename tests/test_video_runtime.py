"""Video models in low precision, under compilers, and copied."""

import copy
import pickle

import pytest
import torch
from helpers import traced_by_fx
from torch import nn
from video_models import build, clips, each_attention

pytestmark = pytest.mark.slow


@each_attention
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_runs_in_one_dtype(attention, dtype, monkeypatch):
    model = build(attention).to(dtype)
    seen = set()
    plain = nn.functional.scaled_dot_product_attention

    def record(q, k, v, **kwargs):
        seen.update((q.dtype, k.dtype, v.dtype))
        return plain(q, k, v, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", record)
    out = model(clips(model))
    out.sum().backward()
    assert seen == {dtype} and out.dtype == dtype and out.isfinite().all()


@each_attention
def test_autocast_stays_near_float32(attention):
    model = build(attention)
    x = clips(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
    full = model(x)
    # bfloat16 rounds at 2**-8; up to four attentions and a head stay within a few of those
    assert ((low.float() - full).norm() / full.norm()).item() < 0.03


@each_attention
def test_compiles_without_graph_breaks_at_two_grids(attention):
    model = build(attention, depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for frames, size in ((8, (32, 48)), (4, (48, 32))):
            x = clips(model, frames=frames, size=size)
            assert torch.allclose(compiled(x), model(x), atol=1e-4)


@each_attention
def test_export_gives_the_same_numbers(attention):
    model = build(attention, depth=1)
    x = clips(model)
    expected = model(x)
    program = torch.export.export(model, (x,))
    assert torch.allclose(program.module()(x), expected, atol=1e-5)


@each_attention
def test_a_graph_by_fx_equals_the_model_at_other_sizes_and_trains_every_parameter(attention):
    model = build(attention, num_reg_tokens=2)
    graph = traced_by_fx(model)
    for frames, size in ((8, (32, 48)), (4, (48, 32))):
        x = clips(model, frames=frames, size=size)
        assert torch.equal(graph(x)["head"], model(x))
    graph.train()(x)["head"].square().sum().backward()
    assert len(list(graph.parameters())) == len(list(model.parameters()))
    assert all(p.grad is not None for p in graph.parameters())


def test_inference_before_training_leaves_training_possible():
    model = build()
    x = clips(model)
    with torch.inference_mode():
        expected = model(x)
    out = model.train()(x)
    out.sum().backward()
    assert torch.equal(out, expected)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), expected)
