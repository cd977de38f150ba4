"""Whole models against the float64 reference in `reference.py`."""

import numpy as np
import pytest
import timm
import torch
from helpers import images, perturb, randomise_base
from reference import axial_angles, vit_logits

import mmpreproj

# One family of each kind: where the skip joins, and whether the attention rotates.
KINDS = {
    "plain": "vit_tiny_patch16_224",
    "rope": "vit_preproj_tiny",
    "layer_scale_module": "deit3_small_patch16_224",
    "gamma_parameter": "vit_small_patch16_rope_224",
}
DEPTH, PATCH, HEIGHT, WIDTH = 3, 16, 48, 80


def build(kind, **config):
    model = timm.create_model(KINDS[kind], depth=DEPTH, num_classes=7, img_size=(HEIGHT, WIDTH))
    if kind == "rope":
        mmpreproj.detach(model)
    mmpreproj.attach(model, mmpreproj.PreProjConfig(**config))
    randomise_base(model)
    return perturb(model).eval()


def rope_table(model):
    """sin and cos [T, head_dim / 2] as the model holds them (rounded to float32 by timm)."""
    rope = getattr(model, "rope", None)
    if rope is None:
        return None
    sin, cos = (
        rope.get_embed()
        .double()
        .numpy()
        .reshape(-1, 2, model.embed_dim // heads(model))
        .swapaxes(0, 1)
    )
    return sin[:, ::2], cos[:, ::2]


def heads(model):
    return model.blocks[0].attn.num_heads


def relative_error(model, x):
    with torch.no_grad():
        found = model(x).double().numpy()
    expected = vit_logits(
        x.numpy(),
        {name: value.double().numpy() for name, value in model.state_dict().items()},
        depth=DEPTH,
        heads=heads(model),
        patch=PATCH,
        eps=model.norm.eps,
        rope=rope_table(model),
    )
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [{}, {"content_skip": False}, {"pre_projection": False}])
def test_models_agree_with_the_float64_reference(kind, parts):
    model = build(kind, **parts).double()
    x = images(model)
    assert relative_error(model, x) < 1e-10
    # float32 carries 6e-8 a rounding, through three blocks of width 192 or 384
    assert relative_error(model.float(), x.float()) < 1e-5


@pytest.mark.parametrize("kind", ["rope", "gamma_parameter"])
def test_rotary_table_is_the_axial_formula(kind):
    model = build(kind)
    sin, cos = rope_table(model)
    angles = axial_angles(HEIGHT // PATCH, WIDTH // PATCH, model.embed_dim // heads(model), 100.0)
    assert np.abs(sin - np.sin(angles)).max() < 1e-6  # timm computes the table in float32
    assert np.abs(cos - np.cos(angles)).max() < 1e-6
