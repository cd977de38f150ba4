"""Which weights of Hugging Face's image and video models are taken, and which are refused."""

import json
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import (  # noqa: E402
    CASES,
    CLASSES,
    TOWERS,
    built,
    edit,
    inputs,
    logits,
    reference,
    saved,
    transformers_logits,
)
from transformers_models import randomise  # noqa: E402

import mmpreproj  # noqa: E402
from mmpreproj.backbones import building  # noqa: E402
from mmpreproj.backbones.hf_vision import create_hf_classifier  # noqa: E402
from mmpreproj.backbones.hf_vision.families import FAMILIES  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_classifier_of_another_width_is_fresh_and_the_rest_is_loaded(case, tmp_path):
    theirs = saved(case, tmp_path).state_dict()
    model = built(tmp_path, 3)
    own = model.state_dict()
    fresh = {key for key in own if "classifier." in key}
    for key in own.keys() - fresh:
        assert torch.equal(own[key], theirs[key.removeprefix("model.")]), key
    std = 32**-0.5 if case in ("clip", "siglip") else 0.02  # of transformers, width 32
    for key in fresh:
        assert own[key].shape[0] == 3
        limit = 5 * std if key.endswith("weight") else 0.0  # the saved ones: 0.2, biases too
        assert own[key].abs().max() <= limit, key


def test_weights_of_the_trunk_alone_leave_the_whole_head_fresh(tmp_path):
    for case, base in (("videomae", "videomae"), ("vjepa2", "vjepa2"), ("vit", "vit")):
        theirs = getattr(saved(case, tmp_path / "headed"), base)
        theirs.save_pretrained(tmp_path / case)
        model = built(tmp_path / case, 3)
        own = getattr(model.model, base).state_dict()
        for key, tensor in own.items():
            assert torch.equal(tensor, theirs.state_dict()[key]), key
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_the_image_tower_of_a_whole_model_is_taken(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**TOWERS)
    whole = randomise(getattr(transformers, f"{family}Model")(config))
    whole.save_pretrained(tmp_path)
    model = built(tmp_path, 3)
    theirs = whole.vision_model.state_dict()
    for key, tensor in model.model.vision_model.state_dict().items():
        assert torch.equal(tensor, theirs[key]), key


def test_a_missing_tensor_of_the_trunk_or_half_a_head_is_named(tmp_path):
    saved("vjepa2", tmp_path)
    lost = "pooler.cross_attention_layer.mlp.fc1.weight"
    edit(tmp_path, lambda tensors: tensors.pop(lost))
    with pytest.raises(ValueError, match=f"do not make up the model: 1 tensors.*{lost}"):
        built(tmp_path)
    saved("videomae", tmp_path)
    lost = "videomae.encoder.layer.1.attention.value.weight"
    edit(tmp_path, lambda tensors: tensors.pop(next(k for k in tensors if k.startswith(lost[:30]))))
    with pytest.raises(ValueError, match="do not make up the model: 1 tensors.*layer.1.attention"):
        built(tmp_path)


def test_weights_saved_with_the_method_in_them_are_refused(tmp_path):
    mmpreproj.attach(reference("vit")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tensors of the method beside the base's.*mmpreproj.save"):
        built(tmp_path)


def test_half_precision_weights_become_float32(tmp_path):
    theirs = reference("vit").to(torch.float16)
    theirs.save_pretrained(tmp_path)
    for pretrained in (True, False):
        model = built(tmp_path, pretrained=pretrained)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        same = torch.equal(model.model.vit.layernorm.weight, theirs.vit.layernorm.weight.float())
        assert same == pretrained


def test_without_pretrained_the_weights_are_drawn_by_the_seed(tmp_path):
    saved("vit", tmp_path)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(built(tmp_path, pretrained=False))
    x = inputs(models[0])
    assert torch.equal(logits(models[0].eval(), x), logits(models[1].eval(), x))


def test_code_in_a_weights_file_is_not_run(tmp_path):
    saved("vit", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload()}, protocol=2))
    with pytest.raises(ValueError, match="weights of hf:.* cannot be loaded"):
        built(tmp_path)
    assert not marker.exists()


def test_code_that_comes_with_a_configuration_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    )
    (tmp_path / "own.py").write_text("open('ran', 'w')")
    with pytest.raises(ValueError, match="without running code"):
        built(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_names_without_the_prefix_say_what_to_write():
    with pytest.raises(ValueError, match="write hf:MCG-NJU/videomae-base"):
        building.check_name("MCG-NJU/videomae-base")
    building.check_name("hf:MCG-NJU/videomae-base")
    with pytest.raises(ValueError, match="'hf:' is not a timm model"):
        building.check_name("hf:")


def test_weights_of_a_file_are_for_timms_models(tmp_path):
    with pytest.raises(ValueError, match="go with timm's models.*pretrained: true"):
        built(tmp_path, pretrained=False, weights=tmp_path / "model.safetensors")


def test_what_is_not_there_is_told(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        create_hf_classifier(tmp_path / "none", 3)
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        create_hf_classifier(tmp_path, 3)
    monkeypatch.setattr("mmpreproj.hub_cache.reachable", lambda endpoint: False)
    with pytest.raises(ConnectionError, match="someone/no-such-model is no local folder"):
        create_hf_classifier("someone/no-such-model", 3, pretrained=True)
    saved("vit", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="weights of hf:.* cannot be loaded"):
        built(tmp_path)


def test_what_is_in_the_hubs_cache_needs_no_network(tmp_path, monkeypatch):
    theirs = saved("vit", tmp_path)

    def cached(repository, file, **keywords):
        assert repository == "someone/tiny"
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    monkeypatch.setattr("mmpreproj.hub_cache.reachable", lambda endpoint: pytest.fail("asked"))
    model = building.build_model("hf:someone/tiny", CLASSES, pretrained=True).eval()
    x = inputs(model)
    assert torch.equal(logits(model, x), transformers_logits(theirs, x))


def test_another_architecture_names_those_that_are_supported(tmp_path):
    transformers.ResNetConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'resnet'; supported are .*videomae"):
        built(tmp_path)
    assert {name.split("_")[0] for name in CASES} | {"dinov3"} == {
        name.split("_")[0] for name in FAMILIES
    }
