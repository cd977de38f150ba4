"""The pre-projection before the MLP: whole models against the float64 references, and what is told.

The references read the state dict: where `<mlp>.preproj` holds weights, they follow the formula.
"""

import copy

import numpy as np
import pytest
import timm
import torch
from helpers import images, perturb, tiny
from reference import vit_logits
from reference_video import video_logits
from torch import nn
from video_models import build, clips

import mmpreproj
from mmpreproj import PreProjConfig, attach, preproj_modules

SITES = ["mlp", "both"]
each_site = pytest.mark.parametrize("sites", SITES)


def weights_of(model):
    return {name: value.double().numpy() for name, value in model.state_dict().items()}


def relative_error(found, expected):
    return np.abs(found.double().numpy() - expected).max() / np.abs(expected).max()


@each_site
@pytest.mark.parametrize("family", ["vit", "dinov2"])
@torch.no_grad()
def test_timm_models_agree_with_the_float64_reference(family, sites):
    model = attach(tiny(family).double(), PreProjConfig(sites=sites, expansion=0.5))
    x = images(perturb(model))
    sizes = {"depth": 2, "heads": model.blocks[0].attn.num_heads, "eps": model.norm.eps}
    patch = model.patch_embed.patch_size[0]
    expected = vit_logits(x.numpy(), weights_of(model), patch=patch, **sizes)
    assert relative_error(model(x), expected) < 1e-10


@each_site
@pytest.mark.parametrize("attention", ["joint", "divided"])
@torch.no_grad()
def test_video_models_agree_with_the_float64_reference(attention, sites):
    model = build(attention, sites=sites, num_frames=4, img_size=32, expansion=0.5).double()
    x = clips(model)
    given = {"depth": 2, "heads": 3, "eps": model.norm.eps, "divided": attention == "divided"}
    expected = video_logits(x.numpy(), model.state_dict(), **given)
    assert relative_error(model(x), expected) < 1e-10


LANGUAGE = ["llama", "gpt_neox", "gpt_neox_sequential", "gpt2", "gemma2"]


@pytest.mark.slow
@each_site
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_agree_with_the_float64_reference(name, sites):
    pytest.importorskip("transformers")
    from test_reference_lm import MODELS
    from test_reference_lm import relative_error as error_of
    from transformers_models import tiny as language_model

    model = language_model(name, torch.float64, **MODELS[name][0])
    assert error_of(name, perturb(attach(model, PreProjConfig(sites=sites)))) < 1e-5


@each_site
@torch.no_grad()
def test_it_starts_identical_and_detach_gives_the_base_back(sites):
    base = tiny("dinov2")
    model = attach(copy.deepcopy(base), PreProjConfig(sites=sites))
    x = images(base)
    assert torch.equal(model(x), base(x))
    perturb(model)
    assert not torch.allclose(model(x), base(x))
    mmpreproj.detach(model)
    assert torch.equal(model(x), base(x)) and list(model.state_dict()) == list(base.state_dict())


def test_mlps_stand_behind_the_attentions_of_their_block():
    model = attach(tiny("vit"), PreProjConfig(sites="both"))
    names = [f"blocks.{i}.{part}.preproj" for i in (0, 1) for part in ("attn", "mlp")]
    modules = preproj_modules(model)
    assert list(modules) == names
    assert all((m.skip is None) == ("mlp" in name) for name, m in modules.items())
    model = attach(mmpreproj.detach(model), PreProjConfig(sites="mlp", layers=[-1]))
    attention, mlp = preproj_modules(model).values()
    assert attention.up is None and attention.skip is not None
    assert mlp.up is not None and mlp.skip is None
    plain = PreProjConfig(sites="mlp", content_skip=False)
    assert list(preproj_modules(attach(mmpreproj.detach(model), plain))) == names[1::2]
    block = mmpreproj.attach_block(tiny("vit").blocks[0], PreProjConfig(sites="both"))
    assert list(preproj_modules(block)) == ["attn.preproj", "mlp.preproj"]
    video = timm.create_model("video_vit_preproj_tiny", depth=1, attention="divided", sites="both")
    parts = ("temporal_attn", "attn", "mlp")
    assert list(preproj_modules(video)) == [f"blocks.0.{part}.preproj" for part in parts]


@each_site
@torch.no_grad()
def test_it_is_saved_and_loaded(sites, tmp_path):
    base = tiny("vit")
    config = PreProjConfig(sites=sites, activation="gelu")
    model = perturb(attach(copy.deepcopy(base), config))
    found = mmpreproj.load(copy.deepcopy(base), mmpreproj.save(model, tmp_path / "adapter"))
    x = images(base)
    assert torch.equal(found(x), model(x))


@each_site
def test_every_tensor_of_a_block_learns(sites):
    model = attach(tiny("vit"), PreProjConfig(sites=sites))
    perturb(mmpreproj.freeze_base(model))
    model(images(model)).square().mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


def test_describe_and_verify_know_mlps():
    model, config = tiny("vit"), PreProjConfig(sites="both")
    told = str(mmpreproj.describe(model, config))
    assert "blocks.*.mlp    2      blocks.*.norm2  none: it is an MLP" in told
    assert mmpreproj.verify(model, images(model), config)


def test_image_weights_with_mlp_sites_start_a_video_model():
    sizes = {"embed_dim": 24, "num_heads": 2, "img_size": 32, "depth": 1, "sites": "both"}
    image = perturb(timm.create_model("vit_preproj_tiny", **sizes))
    from mmpreproj.backbones.video.inflate import from_image_model, image_twin

    video = timm.create_model("video_vit_preproj_tiny", num_frames=4, **sizes)
    assert from_image_model(video, image.state_dict()) == []
    up = "blocks.0.mlp.preproj.up.weight"
    assert torch.equal(video.state_dict()[up], image.state_dict()[up])
    assert image_twin(video).state_dict().keys() == image.state_dict().keys()


def test_bare_layers_in_a_block_are_an_mlp_and_post_norm_reads_its_norm():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    settings = transformers.OPTConfig(ffn_dim=48, word_embed_proj_dim=32, pad_token_id=0, **sizes)
    opt = transformers.OPTModel(settings).eval()
    assert mmpreproj.verify(opt, torch.arange(6)[None], PreProjConfig(sites="mlp"))
    with torch.device("meta"):
        bert = transformers.BertModel(transformers.BertConfig(intermediate_size=48, **sizes))
    config = PreProjConfig(sites="mlp", content_skip=False)
    assert list(preproj_modules(attach(opt, config))) == ["decoder.layers.0.fc1.preproj"]
    found = list(preproj_modules(attach(bert, config)))
    assert found == ["encoder.layer.0.intermediate.preproj"]


def test_what_has_no_such_mlp_is_refused_with_a_reason():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48}
    with torch.device("meta"):
        mixtral = transformers.MixtralModel(transformers.MixtralConfig(**sizes))
        olmo = transformers.Olmo2Model(transformers.Olmo2Config(**sizes))
    for model, why in ((mixtral, "experts, whose router reads x̂"), (olmo, "MLP cannot be found")):
        with pytest.raises(ValueError, match=why):
            attach(model, PreProjConfig(sites="both"))
        assert not preproj_modules(model)
        attach(model)
    bare = tiny("vit")
    for block in bare.blocks:
        block.norm2 = nn.Identity()
    with pytest.raises(ValueError, match="MLP cannot be found.*'blocks.1'"):
        attach(bare, PreProjConfig(sites="mlp", layers=[1]))
    with pytest.raises(ValueError, match="needs pre_projection=True"):
        PreProjConfig(sites="mlp", pre_projection=False)
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, identity"):
        PreProjConfig(activation="relu")
