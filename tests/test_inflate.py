"""Video models that start from an image model's weights: what is equal, what is near, and why."""

import importlib

import pytest
import safetensors.torch
import timm
import torch
from helpers import perturb, randomise_base
from torch import nn

from mmpreproj import preproj_modules
from mmpreproj.backbones.video.inflate import from_image_model, image_twin, static_clip_report

NAME = "video_vit_preproj_small"
SIZES = {"embed_dim": 96, "num_heads": 3, "depth": 2}
AVG = {"class_token": False, "global_pool": "avg"}


def image_model(kind="timm", *, num_classes=5, img_size=(32, 48), **kwargs):
    """timm's rotary ViT with gammas of order 1, or ours with a method that has moved."""
    name = {"timm": "vit_small_patch16_rope_224", "ours": "vit_preproj_small"}[kind]
    kwargs = {**SIZES, "num_classes": num_classes, "img_size": img_size, **kwargs}
    model = timm.create_model(name, use_fc_norm=False, **kwargs)
    randomise_base(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("qkv.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")):
            # attention that is far from uniform
            nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
        if name == "head.weight":
            nn.init.normal_(parameter, std=0.1)
    return perturb(model).eval()


def video_model(*, num_classes=5, img_size=(32, 48), **kwargs):
    kwargs = {**SIZES, "num_classes": num_classes, "img_size": img_size, "num_frames": 8, **kwargs}
    return timm.create_model(NAME, **kwargs).eval()


def static(images, frames):
    return images.unsqueeze(2).repeat(1, 1, frames, 1, 1)


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


EQUAL_MODES = {
    "joint": {**AVG, "rope_time": False},
    "divided-avg": {**AVG, "attention": "divided"},
    "divided-token": {"attention": "divided"},
    "divided-token-avg": {"attention": "divided", "global_pool": "avg"},
    "divided-registers": {"attention": "divided", "num_reg_tokens": 2, "qkv_fused": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timm", "ours"])
@pytest.mark.parametrize("mode", EQUAL_MODES)
def test_static_clip_gives_the_image_models_logits(kind, mode):
    kwargs = EQUAL_MODES[mode]
    shared = {key: value for key, value in kwargs.items() if key not in ("attention", "rope_time")}
    image = image_model(kind, **shared)
    video = video_model(**kwargs)
    from_image_model(video, image.state_dict())
    images = torch.randn(3, 3, 32, 48)
    expected = image(images)
    assert expected.std() > 0.1
    for frames in (2, 8, 16):
        # float32 carries 6e-8 a rounding, through two blocks and sums over 96 tokens
        assert relative(video(static(images, frames)), expected) < 1e-5
    assert (video(torch.randn(3, 3, 8, 32, 48)) - expected).abs().max() > 0.1
    exact, source = video.double(), image.double()
    found = exact(static(images.double(), 8))
    # what is left is the image model's rotary table, which timm computes in float32
    assert relative(found, source(images.double())) < 1e-6


@pytest.mark.slow
def test_static_clip_gives_the_logits_of_whole_image_models():
    image = image_model(embed_dim=384, num_heads=6, depth=12, img_size=224, **AVG)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = image(images)
        for kwargs in ({"rope_time": False}, {"attention": "divided"}):
            video = timm.create_model(NAME, num_classes=5, **AVG, **kwargs).eval()
            from_image_model(video, image.state_dict())
            assert relative(video(static(images, 2)), expected) < 1e-5


@pytest.mark.slow
def test_report_takes_the_causes_away_one_by_one():
    images = torch.randn(2, 3, 32, 48)
    for kwargs, causes in (
        ({}, ["as built", "time's rotation", "class token is one key among 4 times"]),
        ({"rope_time": False}, ["as built", "class token is one key among 4 times"]),
        (AVG, ["as built", "time's rotation"]),
        ({**AVG, "rope_time": False}, ["as built"]),
        ({"attention": "divided"}, ["as built", "time attention"]),
    ):
        pooling = {key: value for key, value in kwargs.items() if key in AVG}
        image, video = image_model(**pooling), video_model(**kwargs).train()
        from_image_model(video, image.state_dict())
        before = video.rope_time
        report = static_clip_report(video, image, images)
        assert len(report.steps) == len(causes)
        for (cause, _), expected in zip(report.steps, causes, strict=True):
            assert expected in cause
        differences = [difference for _, difference in report.steps]
        assert report.difference == differences[0] and differences[-1] < 1e-5
        if "attention" not in kwargs:
            assert all(difference > 1e-3 for difference in differences[:-1]), kwargs
        # the report leaves the model as it was
        assert video.training and not image.training and video.rope_time == before
        again = static_clip_report(video, image, images)
        assert str(again) == str(report) and len(str(report).splitlines()) == len(causes)


def test_report_sees_time_attention_that_has_learned():
    image, video = image_model(), video_model(attention="divided")
    from_image_model(video, image.state_dict())
    nn.init.normal_(video.blocks[1].temporal_attn.preproj.skip.weight, std=0.1)
    (_, built), (_, without) = static_clip_report(video, image, torch.randn(2, 3, 32, 48)).steps
    assert built > 1e-2 and without < 1e-5


def test_patch_embedding_is_shared_among_the_frames_of_a_tubelet():
    image = image_model()
    for frames in (1, 2, 4):
        video = video_model(tubelet_size=frames)
        from_image_model(video, image.state_dict())
        weight = video.patch_embed.proj.weight
        assert weight.shape == (96, 3, frames, 16, 16)
        assert torch.allclose(weight.sum(2), image.patch_embed.proj.weight, atol=1e-7)
        assert torch.equal(weight, weight[:, :, :1].expand_as(weight))


def test_time_attention_reads_as_the_image_models_and_starts_to_move():
    image, video = image_model(), video_model(attention="divided", depth=2)
    own = from_image_model(video, image.state_dict())
    assert {name for name in own if "preproj" not in name} == {
        f"blocks.{i}.temporal_attn.proj.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    }
    for block, source in zip(video.blocks, image.blocks, strict=True):
        assert torch.equal(block.temporal_attn.qkv.weight, source.attn.qkv.weight)
        assert torch.equal(block.temporal_norm.weight, source.norm1.weight)
        assert not block.temporal_attn.proj.weight.any()
    video.train()(torch.randn(2, 3, 8, 32, 48)).square().sum().backward()
    for block in video.blocks:
        assert block.temporal_attn.proj.weight.grad.abs().max() > 0
        assert block.temporal_attn.preproj.skip.weight.grad.abs().max() > 0


def test_other_classes_channels_and_tokens_are_met_and_named():
    image = image_model()
    video = video_model(num_classes=7, in_chans=1, **AVG)
    head = video.head.weight.clone()
    own = from_image_model(video, image.state_dict())
    assert {"head.weight", "head.bias"} <= set(own) and torch.equal(video.head.weight, head)
    grey = image.patch_embed.proj.weight.sum(1, keepdim=True)
    assert torch.allclose(video.patch_embed.proj.weight.sum(2), grey, atol=1e-6)
    assert video(torch.randn(1, 1, 8, 32, 48)).shape == (1, 7)


@pytest.mark.slow
def test_weights_of_other_models_are_refused():
    good = image_model().state_dict()
    for weights, message in (
        (image_model(depth=3).state_dict(), r"first 'blocks.2.norm1.weight': \(96,\)"),
        (image_model(embed_dim=192).state_dict(), r"\(1, 1, 192\) in the weights, \(1, 1, 96\)"),
        (image_model(**AVG).state_dict(), "first 'cls_token': None in the weights"),
        ({**good, "pos_embed": torch.zeros(1, 7, 96)}, "without position embeddings"),
        (video_model().state_dict(), "not the weights of an image model"),
        ({"w": torch.zeros(1)}, r"not the weights of an image model.*\['w'\]"),
    ):
        model = video_model()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            from_image_model(model, weights)
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    with pytest.raises(FileNotFoundError, match="no file of image weights at '/nowhere.pth'"):
        video_model(image_weights="/nowhere.pth")


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_image_weights_load_from_a_file_by_keyword_and_as_pretrained(tmp_path, suffix):
    image = image_model()
    file = str(tmp_path / f"image{suffix}")
    if suffix == ".pth":
        torch.save({"model": image.state_dict()}, file)
    else:
        safetensors.torch.save_file(image.state_dict(), file)
    images = torch.randn(1, 3, 32, 48)
    expected = image(images)
    kwargs = {"attention": "divided"}
    overlay = {"pretrained_cfg_overlay": {"file": file, "num_classes": 5}, "pretrained": True}
    for start in ({"image_weights": file}, overlay):
        video = video_model(**kwargs, **start)
        assert relative(video(static(images, 4)), expected) < 1e-5
        features = video_model(**kwargs, **start, features_only=True, out_indices=[0])
        block = image.forward_intermediates(images, [0], intermediates_only=True)[0]
        found = features(static(images, 4))[0]
        assert relative(found, static(block, 2)) < 1e-5
    other = video_model(**kwargs, num_classes=3, **overlay)
    assert other.head.weight.shape == (3, 96)
    assert torch.equal(other.blocks[0].attn.qkv.weight, image.blocks[0].attn.qkv.weight)


def test_video_checkpoints_load_as_pretrained_with_and_without_the_method(tmp_path):
    x = torch.randn(1, 3, 8, 32, 48)
    for parts in ({}, {"pre_projection": False, "content_skip": False}):
        saved = perturb(video_model(**parts))
        file = str(tmp_path / "video.pth")
        torch.save(saved.state_dict(), file)
        overlay = {"file": file, "num_classes": 5}
        loaded = video_model(pretrained=True, pretrained_cfg_overlay=overlay)
        assert torch.equal(loaded(x), saved(x))
        if not parts:
            assert torch.equal(video_model(checkpoint_path=file)(x), saved(x))


@pytest.mark.slow
def test_missing_pretrained_weights_say_what_to_do(monkeypatch):
    with pytest.raises(RuntimeError, match="video_vit_preproj_tiny has no pretrained weights"):
        timm.create_model("video_vit_preproj_tiny", pretrained=True)

    def unreachable(*_, **__):
        raise FileNotFoundError("offline")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", unreachable)
    with pytest.raises(RuntimeError, match="vit_base_patch16_rope_224.naver_in1k.*image_weights"):
        timm.create_model("video_vit_preproj_base", pretrained=True)


def test_twin_is_the_image_model_of_the_same_sizes_and_parts():
    video = video_model(content_skip=False, tubelet_size=4, mlp_ratio=2, in_chans=2)
    twin = image_twin(video)
    shapes = {name: tuple(t.shape) for name, t in video.state_dict().items()}
    shapes["patch_embed.proj.weight"] = (96, 2, 16, 16)
    assert {name: tuple(t.shape) for name, t in twin.state_dict().items()} == shapes
    assert not preproj_modules(image_twin(video, pre_projection=False))


def test_the_name_of_before_is_the_same_module():
    from mmpreproj.backbones import inflate

    assert importlib.import_module("mmpreproj.backbones.inflate") is inflate
    assert inflate.from_image_model is from_image_model
