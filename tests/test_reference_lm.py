"""Whole language models against the float64 references in `reference_lm.py`.

transformers takes RMSNorm, Gemma's softmax and the rotary table through float32 whatever the
model's dtype. To compare at 1e-10, the first two are given their formula in float64 here, and the
reference reads the model's own table, which is checked against its formula apart. Without that, the
same models agree as far as float32 goes.
"""

import numpy as np
import pytest

pytest.importorskip("transformers")

import reference_lm  # noqa: E402
import torch  # noqa: E402
from helpers import perturb  # noqa: E402
from transformers_models import DEPTH, TOKENS, inputs, tiny  # noqa: E402

from mmpreproj import attach  # noqa: E402

HEADS = {"heads": 4, "kv_heads": 2}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

# Configuration, and what the reference is told of it. 64 is a width whose root is exact in float32.
MODELS = {
    "llama": (
        {},
        lambda ids, w, rope: reference_lm.llama(ids, w, DEPTH, **HEADS, eps=1e-6, rope=rope),
    ),
    "gemma2": (
        {"hidden_size": 64, "query_pre_attn_scalar": 24, "sliding_window": 4, **CAPS},
        lambda ids, w, rope: reference_lm.gemma2(
            ids, w, DEPTH, **HEADS, eps=1e-6, rope=rope, query_scalar=24, cap=2.0, final_cap=3.0,
            window=4,
        ),
    ),
    "gpt_neox": (
        {},
        lambda ids, w, rope: reference_lm.gpt_neox(ids, w, DEPTH, 4, 1e-5, rope, parallel=True),
    ),
    "gpt_neox_sequential": (
        {},
        lambda ids, w, rope: reference_lm.gpt_neox(ids, w, DEPTH, 4, 1e-5, rope, parallel=False),
    ),
    "gpt2": ({}, lambda ids, w, rope: reference_lm.gpt2(ids, w, DEPTH, 4, 1e-5)),
}  # fmt: skip


@pytest.fixture
def in_float64(monkeypatch):
    """RMSNorm and softmax by their formula in the dtype of their input."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def normed(x, eps):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    monkeypatch.setattr(
        *(LlamaRMSNorm, "forward"), lambda self, x: self.weight * normed(x, self.variance_epsilon)
    )
    monkeypatch.setattr(
        *(Gemma2RMSNorm, "forward"), lambda self, x: (1 + self.weight) * normed(x, self.eps)
    )
    monkeypatch.setattr(
        *(torch.nn.functional, "softmax"), lambda x, dim, dtype=None: torch.softmax(x, dim)
    )


def build(name, dtype):
    return perturb(attach(tiny(name, dtype, **MODELS[name][0])))


def rotary_table(model):
    """sin and cos [T, n / 2] as the model holds them (rounded to float32 by transformers)."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(TOKENS)[None])
    half = cos.shape[-1] // 2
    return sin[0, :, :half].numpy(), cos[0, :, :half].numpy()


@torch.no_grad()
def relative_error(name, model):
    x = inputs(model)
    found = model(**x).logits.double().numpy()
    weights = {key: value.double().numpy() for key, value in model.state_dict().items()}
    expected = MODELS[name][1](x["input_ids"].numpy(), weights, rotary_table(model))
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_the_float64_reference(name, in_float64):
    assert relative_error(name, build(name, torch.float64)) < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_model_as_it_is_agree_as_far_as_float32_goes(name):
    # float32 carries 6e-8 a rounding, through two blocks
    assert relative_error(name, build(name, torch.float64)) < 1e-5
    assert relative_error(name, build(name, torch.float32)) < 1e-5


@pytest.mark.parametrize("name, dim", [("llama", 8), ("gemma2", 8), ("gpt_neox", 4)])
def test_rotary_table_is_the_formula(name, dim):
    sin, cos = rotary_table(build(name, torch.float32))
    angles = reference_lm.rotary_angles(TOKENS, dim)
    assert np.abs(sin - np.sin(angles)).max() < 1e-6  # transformers computes it in float32
    assert np.abs(cos - np.cos(angles)).max() < 1e-6
