"""What each part does: cases whose answer is known without the code under test."""

import copy

import pytest
import torch
from helpers import images, perturb, tiny
from torch.nn import functional as F

from mmpreproj import PreProjConfig, attach, preproj_modules
from mmpreproj.analysis.parts import (
    activations,
    effective_rank,
    effective_ranks,
    linear_probe,
    loss_rises,
    permutation_error,
)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch), torch.arange(len(batch)) % 5)


@pytest.mark.parametrize("family", ["vit", "dinov2"])  # the skip joins the attention, or behind it
@torch.no_grad()
def test_loss_rises_as_it_does_with_the_weights_set_to_zero(family):
    model = perturb(attach(tiny(family), PreProjConfig(sites="both")))
    batches = [images(model, 3), images(model, 3)]
    rows = loss_rises(model, cross_entropy, batches)
    assert [row["name"] for row in rows] == list(preproj_modules(model))
    whole = sum(cross_entropy(model, batch) for batch in batches) / 2
    for row in rows:
        site = row["name"].removesuffix(".preproj")
        last = f"{site}.proj" if site.endswith("attn") else f"{site}.fc2"
        off = {"skip": [f"{row['name']}.skip"], "pre_projection": [f"{row['name']}.down"]}
        for part, paths in {**off, "attention": [last]}.items():
            changed = copy.deepcopy(model)
            if part == "skip" and site.endswith("mlp"):
                assert row[part] is None
                continue
            for parameter in changed.get_submodule(paths[0]).parameters():
                parameter.zero_()
            silent = sum(cross_entropy(changed, batch) for batch in batches) / 2
            assert row[part] == pytest.approx(float(silent - whole), abs=1e-5)
    assert not any(m._forward_hooks for m in model.modules())


@torch.no_grad()
def test_activations_are_the_formulas():
    model = perturb(attach(tiny("vit"), PreProjConfig(sites="both")))
    x = images(model)
    found = activations(model, lambda model: model(x))
    for name, module in preproj_modules(model).items():
        held = found[name]
        assert torch.equal(held["x_tilde"], module(held["x_hat"]))
        assert ("skip" in held) == name.endswith("attn.preproj")
    first = model.blocks[0]
    tokens = model._pos_embed(model.patch_embed(x))
    held = found["blocks.0.attn.preproj"]
    assert torch.equal(held["x_hat"], first.norm1(model.norm_pre(tokens)))
    plain = type(first.attn).preproj_base_class.forward(first.attn, held["x_tilde"])
    torch.testing.assert_close(held["branch"], plain)


def test_a_probe_reads_what_is_there_and_nothing_else():
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 8, 16, generator=g)
    labels = torch.arange(8)
    marked = noise + 10 * F.one_hot(labels, 16)
    found = linear_probe(marked, labels)
    assert found["accuracy"] == 1.0 and found["n"] == 100 * 8
    assert found["chance"] == pytest.approx(1 / 8)
    found = linear_probe(noise, labels)
    # 800 tokens: three standard deviations about chance are 0.035
    assert found["accuracy"] == pytest.approx(1 / 8, abs=0.035)
    assert found["shuffled"] == pytest.approx(1 / 8, abs=0.035)
    with pytest.raises(ValueError, match="B from 2 on"):
        linear_probe(noise[:1], labels)


def test_the_method_commutes_with_any_order_and_positions_do_not():
    model = perturb(attach(tiny("vit")))
    module = next(iter(preproj_modules(model).values()))
    x = torch.randn(2, 9, module.dim)
    assert permutation_error(lambda x: module.content_skip(module(x)), x) < 1e-6
    assert permutation_error(model.blocks[0], x) < 1e-5  # positions come before the blocks
    assert permutation_error(lambda x: x + torch.arange(9.0)[:, None], x) > 0.1
    # x and its reverse differ in every token of this: 0, 1 in the place of 1, 0
    swap = torch.tensor([[[0.0], [1.0]]])
    errors = {permutation_error(lambda x: x.cumsum(1), swap, seed) for seed in range(8)}
    assert errors == {0.0, 1.0}


def test_effective_rank_counts_equal_directions():
    assert effective_rank(torch.eye(7)) == pytest.approx(7)
    assert effective_rank(torch.ones(4, 3)) == pytest.approx(1)
    assert effective_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0]))) == pytest.approx(2)
    assert effective_rank(torch.zeros(3, 3)) == 0
    rows = effective_ranks(perturb(attach(tiny("vit"), PreProjConfig(skip_rank=1))))
    assert [row["skip"] for row in rows] == pytest.approx([1, 1], abs=1e-4)  # of float32
    assert all(row["pre_projection"] > 2 for row in rows)
    rows = effective_ranks(attach(tiny("vit"), PreProjConfig(pre_projection=False)))
    assert [(row["skip"], row["pre_projection"]) for row in rows] == [(0, None), (0, None)]
