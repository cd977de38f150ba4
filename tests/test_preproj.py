"""The method alone, against NumPy and arithmetic."""

import numpy as np
import pytest
import torch
from reference import silu
from scipy.special import erf

from mmpreproj import PreProj, PreProjConfig


def random_preproj(dim=8, **config):
    module = PreProj(dim, PreProjConfig(init_std=0.5, **config), dtype=torch.float64)
    return module


def test_x_tilde_and_skip_are_the_papers_formula():
    module = random_preproj()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    up, down, skip = (m.weight.detach().numpy() for m in (module.up, module.down, module.skip))
    x_tilde = x.numpy() + silu(x.numpy() @ up.T) @ down.T
    assert np.abs(module(x).detach().numpy() - x_tilde).max() < 1e-14
    found = module.content_skip(module(x)).detach().numpy()
    assert np.abs(found - x_tilde @ skip.T).max() < 1e-14


@pytest.mark.parametrize(
    "dim, expansion, hidden, parameters",
    [
        (64, 1.25, 80, 2 * 64 * 80 + 64 * 64),  # 3.5 d²
        (30, 1.25, 37, 2 * 30 * 37 + 30 * 30),  # int(37.5)
        (64, 2.0, 128, 2 * 64 * 128 + 64 * 64),
    ],
)
def test_widths_and_parameter_count(dim, expansion, hidden, parameters):
    module = PreProj(dim, PreProjConfig(expansion=expansion))
    assert module.up.weight.shape == (hidden, dim)
    assert module.down.weight.shape == (dim, hidden)
    assert module.skip.weight.shape == (dim, dim)
    assert sum(p.numel() for p in module.parameters()) == parameters


def test_parts_that_are_off_hold_no_parameters():
    only_skip = PreProj(16, PreProjConfig(pre_projection=False))
    assert [name for name, _ in only_skip.named_parameters()] == ["skip.weight"]
    x = torch.randn(3, 16)
    assert torch.equal(only_skip(x), x)
    only_pre = PreProj(16, PreProjConfig(content_skip=False))
    assert [name for name, _ in only_pre.named_parameters()] == ["up.weight", "down.weight"]
    assert only_pre.skip_matrix() is None


def test_low_rank_skip_is_the_product_of_its_factors():
    module = random_preproj(skip_rank=3)
    x = torch.randn(4, 8, dtype=torch.float64)
    matrix = module.skip_matrix()
    assert torch.linalg.matrix_rank(matrix) == 3
    assert torch.allclose(module.content_skip(x), x @ matrix.T, atol=1e-12)
    assert sum(p.numel() for p in (module.skip.weight, module.reduce.weight)) == 2 * 3 * 8


def test_start_is_the_identity_and_w_up_is_not_zero():
    module = PreProj(256)
    x = torch.randn(2, 4, 256)
    assert torch.equal(module(x), x)
    assert not module.content_skip(x).any()
    assert not module.down.weight.any() and not module.skip.weight.any()
    # A normal cut at two standard deviations has 0.8796 of the uncut one's (arithmetic).
    assert module.up.weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.02)
    assert module.up.weight.abs().max() <= 0.04


def test_every_tensor_moves_within_two_steps_from_zero():
    module = PreProj(8)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    moved = []
    for _ in range(2):
        x_tilde = module(torch.randn(16, 8))
        loss = (x_tilde + module.content_skip(x_tilde) - torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moved.append({n for n, p in module.named_parameters() if not torch.equal(p, start[n])})
    assert moved == [{"down.weight", "skip.weight"}, {"up.weight", "down.weight", "skip.weight"}]


def test_both_parts_commute_with_any_order_of_the_tokens():
    module = random_preproj()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    order = torch.randperm(9)
    for part in (module, module.content_skip):
        assert torch.allclose(part(x)[:, order], part(x[:, order]), atol=1e-14)


def test_input_is_left_unchanged():
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    before = x.clone()
    random_preproj()(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_output_has_the_inputs_dtype_whatever_the_parameters_have(own):
    module = PreProj(8, PreProjConfig(init_std=0.1), dtype=own)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert module(x).dtype == module.content_skip(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"expansion": 0}, "expansion must be a number above 0, found 0"),
        ({"expansion": "2"}, "expansion must be a number above 0, found '2'"),
        ({"expansion": float("nan")}, "expansion must be a number above 0, found nan"),
        ({"init_std": -1.0}, "init_std must be a number from 0 on, found -1.0"),
        ({"content_skip": "no"}, "content_skip must be True or False, found 'no'"),
        ({"skip_rank": 1.5}, "skip_rank must be 1 or above"),
        ({"layers": [0.5]}, "layers must be block numbers, or None"),
        ({"skip_rank": 0}, "skip_rank must be 1 or above"),
        ({"skip_rank": 4, "content_skip": False}, "needs content_skip=True"),
        ({"layers": []}, "layers must be block numbers, or None"),
        ({"layers": "all"}, "layers must be block numbers, or None"),
        ({"dtype": "float33"}, "a floating-point torch dtype, found 'float33'"),
        ({"attention": "blocks.attn"}, r"a path with a \* for the block"),
        ({"join": "blocks.*.drop_path1"}, "goes with attention="),
    ],
)
def test_config_refuses_what_cannot_be(fields, told):
    with pytest.raises(ValueError, match=told):
        PreProjConfig(**fields)


def test_module_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="dim must be 1 or above, found 0"):
        PreProj(0)
    with pytest.raises(ValueError, match="skip_rank=9 is above the width 8"):
        PreProj(8, PreProjConfig(skip_rank=9))


def test_dtype_may_be_a_torch_dtype_or_its_name():
    assert PreProjConfig(dtype=torch.float32) == PreProjConfig(dtype="float32")


def test_config_survives_json_and_names_a_mistyped_field():
    config = PreProjConfig(layers=[-1, 0], skip_rank=2)
    assert PreProjConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="did you mean 'expansion'"):
        PreProjConfig.from_dict({"expantion": 2.0})


@pytest.mark.parametrize(
    "activation, sigma",
    [
        ("silu", silu),
        ("gelu", lambda z: z * (1 + erf(z / np.sqrt(2))) / 2),
        ("identity", lambda z: z),
    ],
)
def test_activation_is_what_stands_between_up_and_down(activation, sigma):
    module = random_preproj(activation=activation)
    x = torch.randn(5, 8, dtype=torch.float64)
    up, down = (m.weight.detach().numpy() for m in (module.up, module.down))
    expected = x.numpy() + sigma(x.numpy() @ up.T) @ down.T
    assert np.abs(module(x).detach().numpy() - expected).max() < 1e-14
