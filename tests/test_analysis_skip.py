import math

import pytest
import timm
import torch

import mmpreproj
from mmpreproj.analysis.skip import skip_strength, write_csv

ARGS = {"img_size": 32, "depth": 3, "num_classes": 4}


def attached(name="vit_tiny_patch16_224", **config):
    model = timm.create_model(name, **ARGS)
    mmpreproj.attach(model, mmpreproj.PreProjConfig(**config))
    for module in mmpreproj.preproj_modules(model).values():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.slow
def test_weight_strength_of_a_multiple_of_the_identity_is_that_multiple():
    model = attached()
    for factor, module in enumerate(mmpreproj.preproj_modules(model).values()):
        module.skip.weight.data = factor * torch.eye(module.dim)
    assert [row["weight"] for row in skip_strength(model)] == pytest.approx([0.0, 1.0, 2.0])


def test_layers_without_a_skip_are_left_out():
    assert skip_strength(timm.create_model("vit_tiny_patch16_224", **ARGS)) == []
    assert skip_strength(attached(content_skip=False)) == []
    assert len(skip_strength(attached(layers=[0, 2]))) == 2


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit3_small_patch16_224"])
def test_activation_ratio_equals_one_worked_out_by_hand(name):
    """deit3 has LayerScale: there the branch counts as it reaches the residual add."""
    model = attached(name).eval()
    block = model.blocks[0]
    if name.startswith("deit3"):
        torch.nn.init.constant_(block.ls1.gamma, 0.5)
    images = torch.randn(2, 3, 32, 32)
    found = skip_strength(model, images)[0]["activation"]

    seen = {}
    handle = block.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    preproj, base = block.attn.preproj, type(block.attn).preproj_base_class
    with torch.no_grad():
        model(images)
        x_tilde = preproj(block.norm1(seen["x"]))
        skip = x_tilde @ preproj.skip.weight.T
        branch = block.ls1(base.forward(block.attn, x_tilde))
    handle.remove()
    assert found == pytest.approx(float(skip.norm() / branch.norm()), rel=1e-4)


def test_measuring_leaves_modes_and_no_hooks_behind_even_after_an_error():
    model = attached().train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    skip_strength(model, torch.randn(1, 3, 32, 32))
    with pytest.raises(Exception):  # noqa: B017 - whatever timm raises on a wrong size
        skip_strength(model, torch.randn(1, 5, 7, 7))
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_ratio_that_does_not_exist_is_missing(tmp_path):
    model = attached()
    torch.nn.init.zeros_(model.blocks[0].attn.proj.weight)
    torch.nn.init.zeros_(model.blocks[0].attn.proj.bias)
    torch.nn.init.zeros_(model.blocks[0].attn.preproj.skip.weight)
    rows = skip_strength(model, torch.randn(1, 3, 32, 32))
    assert rows[0]["activation"] is None
    assert math.isfinite(rows[1]["activation"])
    lines = write_csv(tmp_path / "skip.csv", rows).read_text().splitlines()
    assert len(lines) == 4 and lines[1].endswith(",")
