"""`video_vit_preproj_*` in timm's registry: what a timm user expects of a model, for clips."""

import numpy as np
import pytest
import timm
import timm.optim
import torch
from helpers import perturb
from reference_video import video_logits
from timm.models.eva import EvaBlock
from torch import nn
from video_models import ATTENTIONS, AVG, NAME, build, clips, each_attention

import mmpreproj
from mmpreproj import preproj_modules

SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}


@pytest.mark.slow
@each_attention
@pytest.mark.parametrize("size", SIZES)
def test_registered_sizes_are_the_image_models_in_three_dimensions(size, attention):
    dim, depth, heads = SIZES[size]
    model = timm.create_model(f"video_vit_preproj_{size}", device="meta", attention=attention)
    image = timm.create_model(f"vit_preproj_{size}", device="meta")
    found = (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads)
    assert found == (dim, depth, heads)
    one_attention = 4 * dim * dim + 4 * dim + 2 * dim  # q, k, v and output with bias; a norm
    method = 2 * dim * int(1.25 * dim) + dim * dim
    more = 3 * 16 * 16 * dim + (attention == "divided") * depth * (one_attention + method)
    count = [sum(p.numel() for p in m.parameters()) for m in (model, image)]
    assert count[0] - count[1] == more
    assert len(preproj_modules(model)) == (2 if attention == "divided" else 1) * depth


@pytest.mark.slow
def test_models_are_listed_and_carry_their_data_config():
    assert timm.list_models("video_vit_preproj*") == [
        f"video_vit_preproj_{s}" for s in sorted(SIZES)
    ]
    model = timm.create_model("video_vit_preproj_base", device="meta", img_size=112)
    assert model.default_cfg["classifier"] == "head"
    assert model.default_cfg["first_conv"] == "patch_embed.proj"
    config = timm.data.resolve_data_config(model=model)
    assert config["mean"] == (0.485, 0.456, 0.406) and config["std"] == (0.229, 0.224, 0.225)
    assert timm.models.get_model_input_config(model)["input_size"] == (3, 112, 112)


def test_method_keywords_reach_every_attention_in_order_of_execution():
    model = build("divided", depth=3, expansion=2.0, content_skip=False, layers=[0, -1])
    modules = preproj_modules(model)
    assert list(modules) == [
        f"blocks.{i}.{attn}.preproj" for i in (0, 2) for attn in ("temporal_attn", "attn")
    ]
    assert all(m.up.weight.shape == (192, 96) and m.skip is None for m in modules.values())
    joint = build(depth=2, skip_rank=4)
    assert list(preproj_modules(joint)) == ["blocks.0.attn.preproj", "blocks.1.attn.preproj"]
    assert all(m.skip.weight.shape == (96, 4) for m in preproj_modules(joint).values())
    assert all(isinstance(block, EvaBlock) for block in joint.blocks)


@each_attention
def test_model_starts_equal_to_the_plain_one_and_detach_gives_it_back(attention):
    kwargs = {"attention": attention, "depth": 2, "img_size": 32, "num_classes": 5}
    torch.manual_seed(1)
    model = timm.create_model(NAME, **kwargs).eval()
    torch.manual_seed(1)
    plain = timm.create_model(NAME, **kwargs, pre_projection=False, content_skip=False).eval()
    assert not preproj_modules(plain)
    x = torch.randn(2, 3, 4, 32, 32)
    assert torch.equal(model(x), plain(x))
    detached = mmpreproj.detach(perturb(model))
    assert torch.equal(detached(x), plain(x))
    assert list(detached.state_dict()) == list(plain.state_dict())
    assert torch.equal(mmpreproj.attach(detached)(x), plain(x))


# Against the float64 reference


@pytest.mark.slow
@each_attention
@pytest.mark.parametrize("pooling", [{}, AVG], ids=["token", "avg"])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"content_skip": False},
        {"pre_projection": False},
        {"rope_time": False},
        {"num_reg_tokens": 2},
    ],
)
def test_models_agree_with_the_float64_reference(attention, pooling, parts):
    model = build(attention, **pooling, **parts).double()
    x = clips(model)
    expected = video_logits(
        x.numpy(),
        model.state_dict(),
        depth=2,
        heads=3,
        eps=model.norm.eps,
        divided=attention == "divided",
        time=model.rope_time,
    )

    def error(found):
        return np.abs(found.detach().numpy() - expected).max() / np.abs(expected).max()

    assert error(model(x)) < 1e-10
    # float32 carries 6e-8 a rounding, through two blocks
    assert error(model.float()(x.float())) < 1e-5


@each_attention
def test_class_token_is_never_rotated(attention, monkeypatch):
    model = build(attention, depth=1)
    block, seen = model.blocks[0], []
    plain = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **kwargs: (seen.append((q, k)), plain(q, k, v, **kwargs))[1],
    )
    handle = block.attn.qkv.register_forward_hook(lambda *args: seen.append(args[2]))
    model(clips(model))
    handle.remove()
    qkv, (q, k) = seen[-2:]
    q_plain, k_plain, _ = qkv.unflatten(-1, (3, 3, 32)).permute(2, 0, 3, 1, 4)
    for rotated, before in ((q, q_plain), (k, k_plain)):
        assert torch.equal(rotated[:, :, 0], before[:, :, 0])
        changed = (rotated[:, :, 2:] - before[:, :, 2:]).abs().amax((0, 1, 3))
        assert (changed > 1e-3).all()  # the token after the class token is at (0, 0, 0)
    if attention == "divided":
        assert seen[0][0].shape[2] == 4  # time attention is over the 4 tubelets alone


# Other lengths and sizes


@pytest.mark.slow
@each_attention
@pytest.mark.parametrize("frames", [2, 8, 12, 16, 32])
def test_other_lengths_and_sizes_equal_a_model_built_for_them(attention, frames):
    model = build(attention)
    for size in ((32, 48), (48, 32), (64, 64)):
        native = build(attention, img_size=size, num_frames=frames)
        native.load_state_dict(model.state_dict())
        x = clips(native)
        assert torch.equal(model(x), native(x))
    model.set_input_size(img_size=64, num_frames=frames)
    assert (model.img_size, model.num_frames) == ((64, 64), frames)


def test_what_does_not_divide_into_tubelets_is_refused_with_both_numbers():
    model = build()
    for shape, message in (
        ((9, 32, 48), "9 frames does not divide into tubelets of 2 frames; use 8 or 10"),
        ((8, 40, 48), "40 rows does not divide into tubelets of 16 rows; use 32 or 48"),
        ((8, 32, 7), "7 columns does not divide into tubelets of 16 columns; use 16"),
    ):
        with pytest.raises(ValueError, match=message):
            model(torch.randn(1, 3, *shape))
    with pytest.raises(ValueError, match="7 frames does not divide"):
        build(num_frames=7)
    with pytest.raises(ValueError, match=r"takes clips \[B, 3, T, H, W\], found \[2, 3, 32, 48\]"):
        model(torch.randn(2, 3, 32, 48))


@each_attention
def test_padding_repeats_the_last_frame_and_adds_the_mean_below_and_right(attention):
    model = build(attention, pad=True, num_frames=7)
    x = torch.randn(1, 3, 7, 40, 50)
    padded = torch.zeros(1, 3, 8, 48, 64)
    padded[:, :, :7, :40, :50] = x
    padded[:, :, 7] = padded[:, :, 6]
    assert torch.equal(model(x), model(padded))


def test_options_that_do_not_go_together_are_refused():
    for kwargs, message in (
        ({"attention": "axial"}, "'joint' or 'divided', found 'axial'"),
        ({"class_token": False}, "use global_pool='avg'"),
        ({"global_pool": "median"}, "found 'median'"),
        ({"attention": "divided", "patch_drop_rate": 0.5}, "needs attention='joint'"),
        ({"attention": "divided", "init_values": 1e-5}, "needs attention='joint'"),
        ({"use_abs_pos_emb": True}, "use_abs_pos_emb is False; rope_temperature and rope_time"),
        ({"rope_type": "mixed"}, "rope_type is 'cat'"),
        ({"num_heads": 5}, "embed_dim=96 does not divide"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**{"attention": "joint", **kwargs})


# What order means


def test_order_of_tubelets_is_seen_through_time_alone():
    x = torch.randn(1, 3, 8, 32, 48)
    shuffled = x.unflatten(2, (4, 2))[:, :, [2, 0, 3, 1]].flatten(2, 3)  # whole tubelets
    for attention in ATTENTIONS:
        sees, blind = build(attention, **AVG), build(attention, **AVG, rope_time=False)
        # averages over tokens are taken in another order
        assert torch.allclose(blind(x), blind(shuffled), atol=1e-6), attention
        assert (sees(x) - sees(shuffled)).abs().max() > 1e-3, attention


# What timm's users call


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [
        {"in_chans": 1},
        {"tubelet_size": 4, "patch_size": (8, 16)},
        AVG,
        {"global_pool": "avg"},
        {"num_classes": 0},
        {"drop_path_rate": 0.2, "proj_drop_rate": 0.1, "pos_drop_rate": 0.1, "drop_rate": 0.1},
        {"attn_drop_rate": 0.1},
        {"num_reg_tokens": 2, "dynamic_img_size": True},
        {"global_pool": "map"},
        {"global_pool": "avgmax", "use_fc_norm": True, "use_pre_transformer_norm": True},
        {"qkv_fused": False, "qk_norm": True, "num_kv_heads": 1},
        {"attn_type": "eva", "swiglu_mlp": True, "scale_mlp": True},
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
@each_attention
def test_keywords_build_train_and_evaluate(attention, kwargs):
    model = build(attention, **kwargs)
    x = clips(model)
    assert model(x).shape == (2, kwargs.get("num_classes", 5) or 96)
    model.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_patch_drop_keeps_each_kept_token_with_its_own_position():
    model = build(patch_drop_rate=0.5, **AVG).train()
    x = clips(model)
    kept = []
    model.patch_drop.register_forward_hook(lambda *args: kept.append(args[2][1]))
    found = model(x)
    tokens = model.patch_embed(x).flatten(1, 3)
    rope = model.rope.get((4, 2, 3), "tyx", like=x)
    for row, indices in enumerate(kept[0]):
        assert len(indices) == 12
        y = tokens[row : row + 1, indices]
        for block in model.blocks:
            y = block(y, rope=rope[indices])
        assert torch.allclose(model.forward_head(model.norm(y))[0], found[row], atol=1e-5)


def test_drop_path_drops_each_branch_of_a_whole_clip():
    model = build("divided", drop_path_rate=0.5).train()
    x = clips(model, batch=16)
    seen = []
    block = model.blocks[1]  # the rate rises from 0 to 0.5
    for drop in (block.temporal_drop_path, block.drop_path1, block.drop_path2):
        drop.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    model(x)
    for (branch, out), tokens in zip(seen, (24, 1 + 24, 1 + 24), strict=True):
        assert branch.shape == (16, tokens, 96)
        kept = out.abs().amax((1, 2)) > 0
        assert 0 < kept.sum() < 16 and torch.equal(out[kept], 2 * branch[kept])


@each_attention
@pytest.mark.parametrize("mode", ["logits", "features"])
def test_gradient_checkpointing_recomputes_every_block_and_changes_nothing(attention, mode):
    model = build(attention).train()
    x = clips(model)

    def run():
        calls = []
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
        model.zero_grad()
        out = model(x) if mode == "logits" else model.forward_intermediates(x, 1)[0]
        out.square().sum().backward()
        handle.remove()
        return out, len(calls), [p.grad for p in model.parameters() if p.grad is not None]

    plain, once, gradients = run()
    gradients = [g.clone() for g in gradients]
    model.set_grad_checkpointing()
    checkpointed, twice, again = run()
    assert (once, twice) == (1, 2) and torch.equal(plain, checkpointed)
    scale = max(g.abs().max() for g in gradients)
    assert all((a - b).abs().max() < 1e-6 * scale for a, b in zip(gradients, again, strict=True))


@each_attention
def test_features_agree_however_they_are_asked_for(attention):
    model = build(attention, depth=3)
    x = clips(model)
    blocks = []
    handles = [b.register_forward_hook(lambda *a: blocks.append(a[2])) for b in model.blocks]
    logits = model(x)
    for handle in handles:
        handle.remove()
    as_map = [b[:, 1:].reshape(2, 4, 2, 3, 96) for b in blocks]

    final, found = model.forward_intermediates(x, indices=[0, 2], output_fmt="NTHWC")
    assert torch.equal(found[0], as_map[0]) and torch.equal(found[1], as_map[2])
    assert torch.equal(final, model.forward_features(x))
    assert torch.equal(model.forward_head(final), logits)
    assert torch.equal(model.head(model.forward_head(final, pre_logits=True)), logits)
    first = model.forward_intermediates(x, [0], intermediates_only=True, stop_early=True)
    assert torch.equal(first[0], as_map[0].permute(0, 4, 1, 2, 3))
    tokens, prefix = model.forward_intermediates(
        x, 1, return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
    )[0]
    assert torch.equal(torch.cat([prefix, tokens], 1), final)
    with pytest.raises(ValueError, match="NCTHW, NTHWC or NLC, found 'NTC'"):
        model.forward_intermediates(x, output_fmt="NTC")

    kwargs = {"embed_dim": 96, "num_heads": 3, "depth": 3, "attention": attention}
    only = timm.create_model(NAME, **kwargs, features_only=True, out_indices=(0, 1)).eval()
    only.model.load_state_dict(model.state_dict(), strict=False)
    assert only.feature_info.channels() == [96, 96] and len(only.model.blocks) == 2
    for a, b in zip(only(x), as_map[:2], strict=True):
        assert torch.equal(a, b.permute(0, 4, 1, 2, 3))


def test_reset_classifier_keeps_device_dtype_and_the_method():
    model = build().to(torch.bfloat16)
    model.reset_classifier(9, "avg")
    assert model.get_classifier().weight.dtype == torch.bfloat16 and model.num_classes == 9
    assert model(clips(model)).shape == (2, 9)
    model.reset_classifier(0)
    assert model(clips(model)).shape == (2, 96) and len(preproj_modules(model)) == 2
    with pytest.raises(ValueError, match="needs the class token"):
        build(**AVG).reset_classifier(3, "token")


@each_attention
def test_layer_decay_scales_every_parameter_with_its_block(attention):
    model = build(attention, depth=3)
    groups = timm.optim.param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    )
    names = {id(p): name for name, p in model.named_parameters()}
    scale = {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}
    decay = {names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]}
    # five layers: the stem is 0, block i is i + 1, timm counts the last norm to the last block
    layers = {"cls_token": 0, "patch_embed": 0, "norm": 3, "head": 4}
    for name, found in scale.items():
        part, *rest = name.split(".")
        layer = int(rest[0]) + 1 if part == "blocks" else layers[part]
        assert found == 0.5 ** (4 - layer), name
    assert len(scale) == len(names) and decay["cls_token"] == 0.0
    assert all(value == 0.05 for name, value in decay.items() if "preproj" in name)


@each_attention
def test_init_weights_draws_the_start_afresh(attention):
    model = build(attention)
    model.init_weights()
    x = clips(model)
    before = model(x)
    for module in preproj_modules(model).values():
        assert module.up.weight.any() and not module.down.weight.any() | module.skip.weight.any()
    for block in model.blocks:
        if attention == "divided":
            assert not block.temporal_attn.proj.weight.any()
            assert not block.temporal_attn.proj.bias.any()
    assert torch.equal(mmpreproj.detach(model)(x), before)
