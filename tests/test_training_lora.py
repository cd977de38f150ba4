"""LoRA as the baseline: the rank that meets a number of parameters, and PEFT's own counts."""

import pytest
import torch
from test_training_language import llama

import mmpreproj
from mmpreproj.preproj import PreProjConfig
from mmpreproj.training.lora import LoraConfig, attach_lora, count_new, solve_rank
from mmpreproj.training.recipe import as_config
from mmpreproj.training.trained_module import as_plain


def test_rank_by_arithmetic():
    # r (4 + 6) + r (6 + 6) = 22 r: 66 at 3; from 56 on, 3 is nearer than 2
    shapes = [(4, 6), (6, 6)]
    assert solve_rank(shapes, 66) == 3
    assert solve_rank(shapes, 56) == 3
    assert solve_rank(shapes, 54) == 2
    assert solve_rank(shapes, 1) == 1


def test_no_rank_exceeds_the_smaller_side_of_its_matrix():
    # (2, 8) stops at rank 2 and 20 parameters; (8, 8) goes on: 20 + 16 r
    assert solve_rank([(2, 8), (8, 8)], 20 + 16 * 6) == 6
    with pytest.raises(ValueError, match="take 148 at full rank"):  # 20 + 8 * 16
        solve_rank([(2, 8), (8, 8)], 149)


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_equal_parameters_on_all_linear_layers():
    base, method = llama(), PreProjConfig()
    # width 16: W_up 20 x 16, W_down 16 x 20, W_skip 16 x 16, in each of two layers
    assert count_new(base, method) == 2 * (2 * 16 * 20 + 16 * 16)
    assert not mmpreproj.preproj_modules(base)
    model = attach_lora(base, LoraConfig(rank=None, equal_to=method))
    found = trained(model)
    assert all("lora_" in name for name in found) and not any("lm_head" in name for name in found)
    # a rank more costs 2 x (32 + 24 + 24 + 32 + 3 * 40) = 464, so 1792 is met within 232
    assert abs(sum(p.numel() for p in found.values()) - 1792) <= 232
    ranks = {p.shape[0] for name, p in found.items() if "lora_A" in name}
    assert ranks == {4}


def test_narrow_matrices_keep_their_own_rank_and_scale():
    model = attach_lora(llama(), LoraConfig(rank=12, scale=2.0, targets=["q_proj", "k_proj"]))
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    for name, layer in layers.items():
        rank = 8 if name.endswith("k_proj") else 12  # one key head of 8
        assert layer.r["default"] == rank
        assert layer.scaling["default"] == pytest.approx(2.0)


def test_a_name_that_matches_nothing_is_not_hidden_by_one_that_does():
    with pytest.raises(ValueError, match="names 'kk_proj'"):
        attach_lora(llama(), LoraConfig(rank=2, targets=["q_proj", "kk_proj"]))
    model = attach_lora(llama(), LoraConfig(rank=2, targets="q_proj"))  # a name, not a pattern
    assert sum(hasattr(m, "lora_A") for m in model.modules()) == 2


def test_lora_starts_as_the_base():
    base = llama().eval()
    ids = torch.arange(12).reshape(1, 12)
    expected = base(ids).logits
    assert torch.equal(attach_lora(base, LoraConfig(rank=2))(ids).logits, expected)


def test_a_config_survives_as_plain_types():
    config = LoraConfig(rank=None, equal_to=PreProjConfig(expansion=2.0), scale=1.0)
    assert as_config(LoraConfig, as_plain(config)) == config
    for wrong in ({"rank": None}, {"rank": 4, "equal_to": PreProjConfig()}, {"rank": 0}):
        with pytest.raises(ValueError, match="rank"):
            LoraConfig(**wrong)
