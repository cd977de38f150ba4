"""`vit_preproj_*` in timm's registry: what a timm user expects of a model.

timm's own tests/test_models.py (at aa4b5850) passed for every `vit_preproj_*` and, with clips of
four frames as input, for every `video_vit_preproj_*`, joint and divided. Left out are
torch.jit.script; the three tests that read weights of timm's hub (here files do); and
test_model_default_cfgs, for models that end in a map of features (timm leaves its own vit_* out of
it by name; test_model_default_cfgs_non_std is the one for those and these).
"""

import io
import shutil

import numpy as np
import onnxruntime
import pytest
import timm
import timm.optim
import torch
from helpers import perturb, randomise_base, traced_by_fx
from torch import nn

import mmpreproj
from mmpreproj import preproj_modules

NAME = "vit_preproj_tiny"
SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
}


def build(*, depth=2, num_classes=5, img_size=32, **kwargs):
    model = timm.create_model(
        NAME, depth=depth, num_classes=num_classes, img_size=img_size, **kwargs
    )
    randomise_base(model)
    return perturb(model).eval()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_registered_sizes_are_the_rope_models_plus_the_method(size):
    dim, depth, heads = SIZES[size]
    model = timm.create_model(f"vit_preproj_{size}", device="meta")
    assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads) == (
        dim,
        depth,
        heads,
    )
    patch = 16 * 16 * 3 * dim + dim
    block = 12 * dim * dim + 13 * dim  # qkv, proj, two MLP layers with bias; two norms
    method = 2 * dim * int(1.25 * dim) + dim * dim
    whole = dim + patch + depth * (block + method) + 2 * dim + 1000 * dim + 1000
    assert sum(p.numel() for p in model.parameters()) == whole
    assert not [n for n, _ in model.named_parameters() if "gamma" in n or "pos_embed" in n]


def test_models_are_listed_and_carry_their_data_config():
    assert timm.list_models("vit_preproj*") == [f"vit_preproj_{s}" for s in sorted(SIZES)]
    assert timm.list_pretrained("vit_preproj*") == [
        f"vit_preproj_{s}.naver_in1k" for s in ("base", "large", "small")
    ]
    model = timm.create_model("vit_preproj_base", device="meta")
    assert model.default_cfg["architecture"] == "vit_preproj_base"
    config = timm.data.resolve_data_config(model=model)
    assert config["input_size"] == (3, 224, 224) and config["mean"] == (0.485, 0.456, 0.406)


def test_method_keywords_reach_every_block():
    model = timm.create_model(NAME, depth=3, expansion=2.0, content_skip=False, layers=[0, -1])
    modules = preproj_modules(model)
    assert list(modules) == ["blocks.0.attn.preproj", "blocks.2.attn.preproj"]
    assert all(m.up.weight.shape == (384, 192) and m.skip is None for m in modules.values())
    low = timm.create_model(NAME, depth=1, skip_rank=4, init_std=0.1)
    assert preproj_modules(low)["blocks.0.attn.preproj"].skip.weight.shape == (192, 4)
    assert preproj_modules(low)["blocks.0.attn.preproj"].down.weight.any()
    with pytest.raises(ValueError, match="there is no block 7 in a stack of 3"):
        timm.create_model(NAME, depth=3, layers=[7])


@pytest.mark.parametrize("name", [NAME, f"video_{NAME}"])
def test_keywords_of_other_vits_name_the_one_to_use(name):
    for keywords, use in (
        ({"reg_tokens": 4}, "use 'num_reg_tokens'"),
        ({"pre_norm": True}, "use 'use_pre_transformer_norm'"),
        ({"expension": 2.0}, "did you mean 'expansion'"),
        ({"embed_dims": 96}, "did you mean 'embed_dim'"),
    ):
        with pytest.raises(TypeError, match=f"{next(iter(keywords))}.*{use}"):
            timm.create_model(name, device="meta", **keywords)


def test_with_both_parts_off_it_is_the_base():
    torch.manual_seed(1)
    plain = timm.create_model(NAME, depth=2, pre_projection=False, content_skip=False).eval()
    assert not preproj_modules(plain)
    torch.manual_seed(1)
    base = timm.create_model(
        "vit_small_patch16_rope_224", depth=2, embed_dim=192, num_heads=3
    ).eval()
    assert set(base.state_dict()) - set(plain.state_dict()) == {
        f"blocks.{i}.gamma_{j}" for i in range(2) for j in (1, 2)
    }
    for block in base.blocks:
        nn.init.ones_(block.gamma_1), nn.init.ones_(block.gamma_2)
    plain.load_state_dict(base.state_dict(), strict=False)
    x = torch.randn(1, 3, 224, 224)
    assert torch.allclose(plain(x), base(x), atol=1e-6)


def test_created_model_starts_equal_to_its_base():
    model = timm.create_model(NAME, depth=2, img_size=32, num_classes=5).eval()
    x = torch.randn(2, 3, 32, 32)
    before = model(x)
    assert torch.equal(mmpreproj.detach(model)(x), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs, shape",
    [
        ({"in_chans": 1}, (1, 32, 32)),
        ({"in_chans": 4}, (4, 32, 32)),
        ({"img_size": (48, 80)}, (3, 48, 80)),
        ({"patch_size": 8}, (3, 32, 32)),
        ({"patch_size": (8, 16)}, (3, 32, 32)),
        ({"global_pool": "avg"}, (3, 32, 32)),
        ({"global_pool": "avg", "class_token": False}, (3, 32, 32)),
        ({"num_reg_tokens": 4}, (3, 32, 32)),
        ({"drop_path_rate": 0.2, "patch_drop_rate": 0.5, "proj_drop_rate": 0.1}, (3, 32, 32)),
        ({"init_values": 1e-5}, (3, 32, 32)),
        ({"num_classes": 0}, (3, 32, 32)),
    ],
)
def test_timm_keywords_build_train_and_evaluate(kwargs, shape):
    model = build(**kwargs)
    x = torch.randn(2, *shape)
    width = kwargs.get("num_classes", 5) or model.embed_dim
    assert model(x).shape == (2, width)
    model.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_dynamic_size_equals_the_same_weights_at_the_native_size():
    dynamic = build(dynamic_img_size=True, img_size=64)
    for size in ((64, 96), (96, 64), (64, 64), (80, 112)):
        native = build(img_size=size)
        native.load_state_dict(dynamic.state_dict())
        x = torch.randn(1, 3, *size)
        assert torch.allclose(dynamic(x), native(x), atol=1e-5), size


def test_set_input_size_equals_the_same_weights_at_the_native_size():
    model = build(img_size=32)
    native = build(img_size=(64, 48))
    native.load_state_dict(model.state_dict())
    model.set_input_size(img_size=(64, 48))
    x = torch.randn(1, 3, 64, 48)
    assert torch.allclose(model(x), native(x), atol=1e-6)
    with pytest.raises(AssertionError, match="Input height"):
        model(torch.randn(1, 3, 32, 32))


def test_features_agree_however_they_are_asked_for():
    model = build(depth=4, img_size=(48, 32))
    x = torch.randn(2, 3, 48, 32)
    blocks = []
    handles = [b.register_forward_hook(lambda *a: blocks.append(a[2])) for b in model.blocks]
    model(x)
    for handle in handles:
        handle.remove()
    as_map = [b[:, 1:].transpose(1, 2).reshape(2, 192, 3, 2) for b in blocks]

    final, found = model.forward_intermediates(x, indices=[1, 3])
    assert torch.equal(found[0], as_map[1]) and torch.equal(found[1], as_map[3])
    assert torch.equal(final, model.forward_features(x))

    last = model.get_intermediate_layers(x, n=2, return_prefix_tokens=True)
    assert torch.equal(last[0][0], blocks[2][:, 1:]) and torch.equal(last[0][1], blocks[2][:, :1])
    normed = model.get_intermediate_layers(x, n=[3], reshape=True, norm=True)[0]
    assert torch.equal(normed.flatten(2).transpose(1, 2), final[:, 1:])

    only = timm.create_model(
        NAME, depth=4, img_size=(48, 32), features_only=True, out_indices=(1, 3)
    ).eval()
    only.model.load_state_dict(model.state_dict(), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(only(x), found, strict=True))
    assert only.feature_info.channels() == [192, 192]

    model.prune_intermediate_layers(1)
    assert len(model.blocks) == 4
    model.prune_intermediate_layers([1])
    assert len(model.blocks) == 2 == len(preproj_modules(model))


def test_gradient_checkpointing_recomputes_every_block_and_changes_nothing():
    model = build(depth=3).train()
    x = torch.randn(2, 3, 32, 32)

    def run():
        calls = []
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        handle.remove()
        return out, len(calls), [p.grad.clone() for p in model.parameters()]

    plain, once, gradients = run()
    model.set_grad_checkpointing()
    checkpointed, twice, again = run()
    assert (once, twice) == (1, 2) and torch.equal(plain, checkpointed)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, again, strict=True))


def test_reset_classifier():
    model = build().to(torch.bfloat16)
    model.reset_classifier(9)
    assert model.head.weight.dtype == torch.bfloat16 and model.num_classes == 9
    assert model(torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)).shape == (1, 9)


@pytest.mark.parametrize("frozen", [False, True])
def test_layer_decay_scales_the_new_parameters_with_their_block(frozen):
    model = timm.create_model(NAME, depth=4)
    if frozen:
        mmpreproj.freeze_base(model, also=["head"])
    groups = timm.optim.param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    scale = {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}
    decay = {names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]}
    # six layers: stem, four blocks, norm and head; block i is layer i + 1 of 5
    for block in range(4):
        for part in ("up", "down", "skip"):
            name = f"blocks.{block}.attn.preproj.{part}.weight"
            assert scale[name] == 0.5 ** (4 - block) and decay[name] == 0.05
    assert scale["head.weight"] == 1.0 and decay["head.bias"] == 0.0
    assert ("blocks.0.attn.qkv.weight" in scale) is not frozen


def test_no_weight_decay_is_timms():
    model = timm.create_model(NAME, depth=1)
    groups = timm.optim.param_groups_weight_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay()
    )
    names = {id(p): name for name, p in model.named_parameters()}
    without = {names[id(p)] for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    assert {"cls_token", "head.bias", "norm.weight"} <= without
    assert not [name for name in without if "preproj" in name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_runs_in_one_dtype(dtype, monkeypatch):
    model = build().to(dtype)
    seen = set()
    plain = torch.nn.functional.scaled_dot_product_attention

    def record(q, k, v, **kwargs):
        seen.update((q.dtype, k.dtype, v.dtype))
        return plain(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    out = model(torch.randn(2, 3, 32, 32, dtype=dtype))
    out.sum().backward()
    assert seen == {dtype} and out.dtype == dtype and out.isfinite().all()


def test_autocast_stays_near_float32():
    model = build()
    x = torch.randn(4, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(x)
    full = model(x)
    # bfloat16 rounds at 2**-8; two blocks and a head stay within a few of those
    assert ((low.float() - full).norm() / full.norm()).item() < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, sizes",
    [("aot_eager", (32, 48)), ("inductor", (32,))],  # inductor writes C++: slow
)
def test_compiles_without_graph_breaks(backend, sizes):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    model = build(dynamic_img_size=True, depth=1)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for size in sizes:
        x = torch.randn(2, 3, size, size)
        with torch.no_grad():
            assert torch.allclose(compiled(x), model(x), atol=1e-4)


@pytest.mark.slow
def test_export_and_onnx_give_the_same_numbers(tmp_path):
    model = build()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    program = torch.export.export(model, (x,))
    assert torch.allclose(program.module()(x), expected, atol=1e-5)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), str(file), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    found = session.run(None, feed)[0]
    assert np.abs(found - expected.detach().numpy()).max() < 1e-4
    with pytest.raises(Exception, match="(?i)dimension|shape"):  # another size is refused
        wrong = np.zeros((2, 3, 48, 48), dtype=np.float32)
        session.run(None, {session.get_inputs()[0].name: wrong})


def test_a_graph_by_fx_equals_the_model_and_trains_every_parameter():
    model = build()
    x = torch.randn(2, 3, 32, 32)
    graph = traced_by_fx(model)
    assert torch.equal(graph(x)["head"], model(x))
    graph.train()(x)["head"].square().sum().backward()
    assert len(list(graph.parameters())) == len(list(model.parameters()))
    assert all(p.grad is not None for p in graph.parameters())


@pytest.mark.slow
def test_traced_model_equals_eager_at_its_size():
    model = build()
    x = torch.randn(2, 3, 32, 32)
    traced = torch.jit.trace(model, x)
    assert torch.allclose(traced(x), model(x), atol=1e-6)


# Pretrained weights: the base with both gammas folded into the linear layer before them.


def rope_base(tmp_path, size="small", **kwargs):
    """A base model with random gammas of order 1, and the file of its weights."""
    base = timm.create_model(f"vit_{size}_patch16_rope_224", **kwargs).eval()
    randomise_base(base)
    nn.init.normal_(base.head.weight, std=0.02)
    file = tmp_path / "base.pth"
    torch.save(base.state_dict(), file)
    return base, {"file": str(file)}


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_pretrained_weights_give_the_bases_logits(tmp_path, size):
    depth = 4  # of 12 or 24: the folding is the same in every block
    base, overlay = rope_base(tmp_path, size, depth=depth)
    model = timm.create_model(
        f"vit_preproj_{size}", pretrained=True, pretrained_cfg_overlay=overlay, depth=depth
    ).eval()
    x = torch.randn(4, 3, 224, 224)
    with torch.no_grad():
        expected, found = base(x), model(x)
    assert (found - expected).norm() / expected.norm() < 1e-5
    assert torch.equal(found.argmax(1), expected.argmax(1))
    for module in preproj_modules(model).values():
        assert module.up.weight.any() and not module.down.weight.any()


def test_pretrained_weights_meet_other_classes_channels_pools_and_sizes(tmp_path):
    base, overlay = rope_base(tmp_path, depth=2)
    model = timm.create_model(
        "vit_preproj_small",
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        depth=2,
        num_classes=3,
        in_chans=1,
        img_size=64,
        global_pool="avg",
    ).eval()
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 3)
    assert torch.equal(model.blocks[0].attn.qkv.weight, base.blocks[0].attn.qkv.weight)
    rgb = base.patch_embed.proj.weight.sum(1, keepdim=True)
    assert torch.allclose(model.patch_embed.proj.weight, rgb, atol=1e-6)


def test_own_checkpoints_load_as_pretrained_and_by_path(tmp_path):
    model = build()
    file = tmp_path / "own.pth"
    torch.save(model.state_dict(), file)
    x = torch.randn(1, 3, 32, 32)
    kwargs = {"depth": 2, "num_classes": 5, "img_size": 32}
    by_path = timm.create_model(NAME, checkpoint_path=str(file), **kwargs).eval()
    assert torch.equal(by_path(x), model(x))
    overlay = {"file": str(file), "num_classes": 5}
    as_pretrained = timm.create_model(
        NAME, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs
    ).eval()
    assert torch.equal(as_pretrained(x), model(x))


@pytest.mark.slow
def test_missing_pretrained_weights_say_what_to_do(monkeypatch):
    with pytest.raises(RuntimeError, match="vit_preproj_tiny has no pretrained weights"):
        timm.create_model("vit_preproj_tiny", pretrained=True)

    def unreachable(*_, **__):
        raise FileNotFoundError("offline")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", unreachable)
    with pytest.raises(RuntimeError, match="vit_base_patch16_rope_224.naver_in1k.*overlay"):
        timm.create_model("vit_preproj_base", pretrained=True)


def test_state_dict_round_trip_through_bytes():
    model, other = build(), build()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(other(x), model(x))
