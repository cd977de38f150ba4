"""attach, detach and freeze_base on timm's attention transformers."""

import copy
import pickle
import threading

import pytest
import timm
import torch
from helpers import FAMILIES, images, perturb, tiny
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig, attach, attach_block, detach, freeze_base, preproj_modules

ONE_POINT, TWO_POINT = "vit", "vit_small_patch16_rope_224"


@torch.no_grad()
def outputs(model, x):
    return model(x)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_attach_leaves_outputs_bit_identical_and_detach_gives_the_base_back(family):
    model = tiny(family)
    x = images(model)
    before = outputs(model, x)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]

    assert attach(model) is model
    assert torch.equal(outputs(model, x), before)
    assert list(preproj_modules(model)) == [f"blocks.{i}.attn.preproj" for i in range(2)]
    assert [key for key in model.state_dict() if "preproj" not in key] == keys

    perturb(model)
    assert not torch.allclose(outputs(model, x), before)
    detach(model)
    assert torch.equal(outputs(model, x), before)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    assert not any("preproj" in name for m in model.modules() for name in vars(m))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "deit3", "beit", "vit_small_patch16_rope_224"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bit_identity_holds_at_other_precisions(family, dtype):
    model = tiny(family).to(dtype)
    x = images(model)
    before = outputs(model, x)
    attach(model)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.equal(outputs(model, x), before)


@pytest.mark.slow
@pytest.mark.parametrize("family", [ONE_POINT, TWO_POINT, "deit3", "beit"])
def test_base_checkpoint_loads_into_the_attached_model_and_back(family):
    base, other = tiny(family), tiny(family)
    attach(other)
    result = other.load_state_dict(base.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert all("preproj" in key for key in result.missing_keys)
    back = base.load_state_dict(other.state_dict(), strict=False)
    assert back.missing_keys == [] and all("preproj" in key for key in back.unexpected_keys)
    x = images(base)
    assert torch.equal(outputs(base, x), outputs(other, x))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit_small_patch16_rope_224", "deit3", "beit", "dinov3"])
def test_skip_is_not_scaled_by_layer_scale(family):
    """With attention silenced (gamma 0), only W_skip = I is left of the first residual add."""
    model = tiny(family)
    attach(model, PreProjConfig(pre_projection=False))
    block = model.blocks[0]
    with torch.no_grad():
        (block.gamma_1 if hasattr(block, "gamma_1") else block.ls1.gamma).zero_()
        (block.gamma_2 if hasattr(block, "gamma_2") else block.ls2.gamma).zero_()
        block.attn.preproj.skip.weight.copy_(torch.eye(model.embed_dim))
    x = torch.randn(1, 5, model.embed_dim)
    assert torch.allclose(block(x), x + block.norm1(x), atol=1e-6)


def test_gradients_reach_the_skip_at_full_size_under_a_tiny_layer_scale():
    model = tiny(TWO_POINT)
    attach(model)
    for block in model.blocks:
        nn.init.constant_(block.gamma_1, 1e-5)
    model(images(model)).sum().backward()
    grads = {name: m.skip.weight.grad.norm() for name, m in preproj_modules(model).items()}
    proj = model.blocks[0].attn.proj.weight.grad.norm()
    assert min(grads.values()) > 1e3 * proj


def test_drop_path_drops_the_skip_of_a_sample_with_its_attention_branch():
    model = tiny(TWO_POINT, drop_path_rate=0.5)
    attach(model, PreProjConfig(pre_projection=False))
    perturb(model, std=1.0)
    block = model.blocks[1].train()
    block.mlp = nn.Identity()
    nn.init.zeros_(block.gamma_2)
    x = torch.randn(64, 3, model.embed_dim)
    unchanged = torch.isclose(block(x), x, atol=1e-6).all(dim=(1, 2))
    assert 0 < unchanged.sum() < 64  # rate 0.5: neither all nor none, up to chance 2**-63


@pytest.mark.parametrize("layers, expected", [([0, -1], [0, 3]), ([-2], [2]), ([1, 2], [1, 2])])
def test_layers_count_from_both_ends(layers, expected):
    model = attach(tiny("vit", depth=4), PreProjConfig(layers=layers))
    assert list(preproj_modules(model)) == [f"blocks.{i}.attn.preproj" for i in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, told",
    [
        (PreProjConfig(layers=[2]), r"no block 2 in a stack of 2; use 0 to 1, or -2 to -1"),
        (PreProjConfig(layers=[0, -2]), "twice"),
        (PreProjConfig(pre_projection=False, content_skip=False), "both False"),
        (PreProjConfig(attention="blocks.*.atn"), "matches no module; the nearest are"),
        (PreProjConfig(attention="blocks.*.attn", join="blocks.*.no"), "no 'blocks.0.no'"),
        (PreProjConfig(attention="blocks.*.norm1"), "none of the input projections"),
        (PreProjConfig(skip_rank=1000), "skip_rank=1000 is above the width"),
    ],
)
def test_attach_refuses_before_it_changes_anything(config, told):
    model = tiny(TWO_POINT)
    before = [(type(m), list(vars(m))) for m in model.modules()]
    with pytest.raises(ValueError, match=told):
        attach(model, config)
    assert [(type(m), list(vars(m))) for m in model.modules()] == before


@pytest.mark.slow
def test_attach_refuses_a_second_time_a_mapping_a_compiled_model_and_a_patched_forward():
    model = attach(tiny("vit"))
    with pytest.raises(ValueError, match="attached already, at 'blocks.0.attn'"):
        attach(model)
    base = tiny("vit")
    told = "found {'expansion': 2}; of a mapping, PreProjConfig.from"
    for call, module in ((attach, base), (attach_block, base.blocks[0])):
        with pytest.raises(TypeError, match=told):
            call(module, {"expansion": 2})
    compiled = torch.compile(model)
    for call in (attach, detach, freeze_base):
        with pytest.raises(ValueError, match="compiled: give the model inside"):
            call(compiled)
    patched = tiny("vit")
    patched.blocks[1].attn.forward = patched.blocks[1].attn.forward
    with pytest.raises(ValueError, match="'blocks.1.attn' has a forward of its own"):
        attach(patched)
    assert not preproj_modules(patched)
    with pytest.raises(ValueError, match="nothing to detach"):
        detach(patched)


def test_unknown_architecture_names_its_blocks_and_the_way_by_hand():
    with pytest.raises(ValueError) as error:
        attach(timm.create_model("mixer_s32_224", num_classes=3))
    told = str(error.value)
    assert "timm.models.mlp_mixer.MixerBlock" in told
    assert "no transformer block that is known" in told and "PreProjConfig(attention=" in told


def test_paths_by_hand_give_the_same_model_as_the_table():
    by_table, by_hand = tiny(TWO_POINT), None
    by_hand = copy.deepcopy(by_table)
    attach(by_table)
    attach(by_hand, PreProjConfig(attention="blocks.*.attn", join="blocks.*.drop_path1"))
    perturb(by_table)
    by_hand.load_state_dict(by_table.state_dict())
    x = images(by_hand)
    assert torch.equal(outputs(by_hand, x), outputs(by_table, x))


def test_attach_block_is_attach_for_one_block():
    whole = attach(tiny(TWO_POINT), PreProjConfig(layers=[0]))
    perturb(whole)
    single = tiny(TWO_POINT)
    block = attach_block(single.blocks[0])
    assert block is single.blocks[0] and list(preproj_modules(single)) == ["blocks.0.attn.preproj"]
    single.load_state_dict(whole.state_dict())
    x = images(whole)
    assert torch.equal(outputs(single, x), outputs(whole, x))
    detach(single)
    assert not any("preproj_attachment" in vars(module) for module in single.modules())
    with pytest.raises(ValueError, match="layers and attention must be None"):
        attach_block(tiny("vit").blocks[0], PreProjConfig(layers=[0]))


@pytest.mark.parametrize("family", [ONE_POINT, TWO_POINT])
def test_copies_and_pickles_are_independent_and_equal(family):
    model = perturb(attach(tiny(family)))
    x = images(model)
    expected = outputs(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(other, x), expected)
        perturb(other)
        assert not torch.equal(outputs(other, x), expected)
        assert torch.equal(outputs(model, x), expected)
        detach(other)


@pytest.mark.slow
def test_threads_do_not_mix_their_skips():
    model = perturb(attach(tiny(TWO_POINT)))
    batches = [images(model) for _ in range(8)]
    expected = [outputs(model, x) for x in batches]
    wrong = []

    def work(x, want):
        wrong.extend(1 for _ in range(10) if not torch.allclose(outputs(model, x), want, atol=1e-6))

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(batches, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_skip_is_left_over_after_an_error_or_a_call_of_the_attention_alone():
    model = perturb(attach(tiny(TWO_POINT)))
    x = images(model)
    expected = outputs(model, x)
    block = model.blocks[0]
    handle = block.attn.proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    block.attn(torch.randn(1, 5, model.embed_dim))
    handoff = block.attn.preproj_handoff
    assert handoff.skip is None and not handoff.running
    y = torch.randn(1, 5, model.embed_dim)
    assert torch.equal(block.drop_path1(y), y)
    assert torch.equal(outputs(model, x), expected)


def test_replacing_the_join_after_attach_is_an_error_not_a_lost_skip():
    model = perturb(attach(tiny(TWO_POINT)))
    model.blocks[1].drop_path1 = nn.Identity()
    with pytest.raises(RuntimeError, match="the skip of a block was not added"):
        model(images(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, reentrant",  # timm's Eva takes no reentrant checkpointing, with or without the method
    [(ONE_POINT, False), (TWO_POINT, False), ("deit3", False), (ONE_POINT, True), ("deit3", True)],
)
def test_gradient_checkpointing_gives_the_same_gradients_on_a_frozen_base(family, reentrant):
    model = freeze_base(perturb(attach(tiny(family))))
    x = images(model)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    plain = gradients()
    model.set_grad_checkpointing()
    timm.layers.set_reentrant_ckpt(reentrant)
    if reentrant:  # what reentrant checkpointing needs on a frozen base: an input with a gradient
        x.requires_grad_()
    try:
        checkpointed = gradients()
    finally:
        timm.layers.set_reentrant_ckpt(False)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert gradient.abs().sum() > 0
        assert torch.allclose(gradient, checkpointed[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("family", [ONE_POINT, TWO_POINT])
def test_compiled_without_graph_breaks_and_exported(family):
    model = perturb(attach(tiny(family)))
    x = images(model)
    expected = model(x)
    # aot_eager traces forward and backward as the compiler does, without generating code
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(x)
    assert torch.allclose(found, expected, atol=1e-5)
    found.sum().backward()
    gradient = model.blocks[0].attn.preproj.skip.weight.grad.clone()
    model.zero_grad()
    expected.sum().backward()
    assert torch.allclose(gradient, model.blocks[0].attn.preproj.skip.weight.grad, atol=1e-4)
    exported = torch.export.export(model, (x,)).module()
    assert torch.allclose(exported(x), expected, atol=1e-5)


@pytest.mark.slow
def test_compile_with_checkpointing_behind_a_scale_agrees_with_eager():
    model = perturb(attach(tiny(TWO_POINT))).train()
    model.set_grad_checkpointing()
    x = images(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_freeze_base_leaves_the_new_parameters_and_what_is_named():
    model = tiny("vit")
    model.cls_token.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    attach(model)
    assert freeze_base(model, also=["head"]) is model
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    new = {f"{path}.{w}.weight" for path in preproj_modules(model) for w in ("up", "down", "skip")}
    assert trainable == new | {"head.weight", "head.bias"}
    freeze_base(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == new
    detach(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_freeze_base_refuses_what_matches_nothing_and_changes_nothing():
    model = attach(tiny("vit"))
    with pytest.raises(ValueError, match="also='haed' names no parameter; the nearest .*'head'"):
        freeze_base(model, also=["haed"])
    with pytest.raises(ValueError, match="also='head_drop' names a module without parameters"):
        freeze_base(model, also=["head_drop"])
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="nothing would train"):
        freeze_base(tiny("vit"))


def test_new_parameters_may_have_their_own_dtype_on_a_bfloat16_base():
    model = tiny(TWO_POINT).to(torch.bfloat16)
    x = images(model)
    before = outputs(model, x)
    attach(model, PreProjConfig(dtype="float32"))
    assert {p.dtype for m in preproj_modules(model).values() for p in m.parameters()} == {
        torch.float32
    }
    assert torch.equal(outputs(model, x), before)
    assert outputs(perturb(model), x).dtype == torch.bfloat16


def test_post_norm_blocks_are_warned_of_once(recwarn):
    for _ in range(2):
        attach(tiny("eva_post_norm"))
    assert sum("post-norm" in str(warning.message) for warning in recwarn) == 1


def test_reset_classifier_leaves_the_method_alone():
    model = perturb(attach(tiny(TWO_POINT).to(torch.bfloat16)))
    x = images(model)
    features = model.forward_features(x)
    model.reset_classifier(7)
    assert outputs(model, x).shape == (2, 7) and model.num_classes == 7
    assert model.head.weight.dtype == torch.bfloat16
    model.reset_classifier(0)
    assert torch.equal(model.forward_features(x), features)


def test_model_wide_initialisation_draws_the_new_parameters_as_the_method_says():
    model = perturb(attach(tiny("vit")))
    model.init_weights(needs_reset=True)
    for module in mmpreproj.preproj_modules(model).values():
        assert not module.down.weight.any() and not module.skip.weight.any()
        assert 0 < module.up.weight.abs().max() <= 0.04
