import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file

import mmpreproj
from mmpreproj.backbones import building
from mmpreproj.training.trained_module import parameter_counts

VIT, ARGS = "vit_tiny_patch16_224", {"img_size": 32, "depth": 2}


def vit(num_classes=3, **kwargs):
    return building.build_model(VIT, num_classes, ARGS, **kwargs)


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_an_unknown_model_is_an_error_with_close_matches():
    with pytest.raises(
        ValueError, match="'vit_preproj_tinny' is not a timm model.*vit_preproj_tiny"
    ):
        building.check_name("vit_preproj_tinny")


def test_arguments_that_do_not_fit_name_themselves():
    with pytest.raises(ValueError, match="does not take model_args=.*'no_such': 1"):
        building.build_model(VIT, 3, {"no_such": 1})
    with pytest.raises(ValueError, match="model_args holds num_classes"):
        building.build_model(VIT, 3, {"num_classes": 4})
    with pytest.raises(ValueError, match="carries it already"):
        building.build_model("vit_preproj_tiny", 3, {"depth": 1}, preproj=mmpreproj.PreProjConfig())


@pytest.mark.parametrize(
    ("name", "args", "heads"),
    [
        (VIT, ARGS, ["head"]),
        ("vit_preproj_tiny", ARGS, ["head"]),
        ("deit_tiny_distilled_patch16_224", ARGS, ["head", "head_dist"]),
        ("test_resnet", {}, ["fc"]),
    ],
)
def test_freezing_leaves_the_new_parameters_and_every_head(name, args, heads):
    model = building.build_model(name, 3, args)
    building.freeze(model)
    expected = {f"{head}.{kind}" for head in heads for kind in ("weight", "bias")}
    expected |= {n for n, _ in model.named_parameters() if ".preproj." in n}
    assert trained(model) == expected


def test_attached_and_frozen_only_new_parameters_and_the_head_train():
    model = vit(preproj=mmpreproj.PreProjConfig(layers=[1]))
    building.freeze(model)
    parts = ("up", "down", "skip")
    expected = {f"blocks.1.attn.preproj.{part}.weight" for part in parts}
    assert trained(model) == expected | {"head.weight", "head.bias"}


def test_a_frozen_model_trains_only_its_trained_parts():
    model = building.build_model(VIT, 3, {**ARGS, "drop_path_rate": 0.5})
    mmpreproj.attach(model)
    building.freeze(model)
    building.set_frozen_modes(model.train())
    on = {name for name, module in model.named_modules() if module.training and name}
    assert {"head", "head_drop", "blocks.0.attn.preproj.up"} <= on
    assert not any("drop_path" in name or "norm" in name for name in on)
    assert not model.training and not model.blocks[1].attn.training


def test_parameter_counts_are_those_of_the_shapes():
    model = vit(preproj=mmpreproj.PreProjConfig())
    counts = parameter_counts(model)
    assert counts["new"] == 2 * (2 * 240 * 192 + 192 * 192)  # two blocks of width 192
    assert counts["trainable"] == counts["total"]


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_local_weights_are_loaded_and_a_head_of_another_width_is_fresh(tmp_path, kind):
    base = vit(num_classes=7)
    path = tmp_path / f"base.{kind}"
    if kind == "pth":
        torch.save(base.state_dict(), path)
    else:
        save_file(base.state_dict(), path)
    same = vit(num_classes=7, weights=path)
    torch.testing.assert_close(same.state_dict(), base.state_dict())
    other = vit(num_classes=3, weights=path)
    torch.testing.assert_close(other.blocks.state_dict(), base.blocks.state_dict())
    assert other.head.weight.shape == (3, 192)


def test_weights_of_another_size_are_resized(tmp_path):
    path = tmp_path / "base.safetensors"
    save_file(vit().state_dict(), path)  # 32 px: 4 patches and a class token
    model = building.build_model(VIT, 3, {**ARGS, "img_size": 64}, weights=path)
    assert model.pos_embed.shape[1] == 16 + 1


@pytest.mark.parametrize("num_classes", [7, 3])
def test_weights_with_the_method_are_loaded_whole_or_refused(tmp_path, num_classes):
    trained = vit(num_classes=7, preproj=mmpreproj.PreProjConfig(init_std=0.1))
    path = tmp_path / "trained.pth"
    torch.save(trained.state_dict(), path)
    model = vit(num_classes=num_classes, weights=path, preproj=mmpreproj.PreProjConfig())
    torch.testing.assert_close(model.blocks.state_dict(), trained.blocks.state_dict())
    for preproj in (None, mmpreproj.PreProjConfig(content_skip=False)):
        with pytest.raises(ValueError, match="trained.pth.* in another form than this model"):
            vit(num_classes=num_classes, weights=path, preproj=preproj)


def test_own_models_do_not_lose_a_part_of_the_method_unseen(tmp_path):
    arguments = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3}
    path = tmp_path / "own.pth"
    torch.save(building.build_model("vit_preproj_tiny", 7, arguments).state_dict(), path)
    assert building.build_model("vit_preproj_tiny", 3, arguments, weights=path).num_classes == 3
    with pytest.raises(ValueError, match="1 tensors of the method .* no place for, .*skip.weight"):
        building.build_model(
            "vit_preproj_tiny", 3, {**arguments, "content_skip": False}, weights=path
        )


def test_weights_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        vit(weights=tmp_path / "none.pth")
    other = tmp_path / "other.pth"
    torch.save(timm.create_model("test_resnet", num_classes=7).state_dict(), other)
    with pytest.raises(ValueError, match="other.pth"):
        vit(num_classes=3, weights=other)
    half = vit(num_classes=7).state_dict()
    del half["blocks.1.mlp.fc1.weight"]
    torch.save(half, other)
    with pytest.raises(ValueError, match="lack 1 tensors.*blocks.1.mlp.fc1.weight"):
        vit(num_classes=3, weights=other)


def test_code_in_a_weights_file_is_not_run(tmp_path):
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps({"state_dict": Payload()}, protocol=2))
    with pytest.raises(ValueError, match="cannot be read"):
        vit(weights=path)
    assert not marker.exists()


def test_pretrained_without_a_network_names_the_hub_id_and_the_way_out(monkeypatch):
    monkeypatch.setattr("mmpreproj.hub_cache.reachable", lambda endpoint: False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    with pytest.raises(ConnectionError, match="timm/vit_tiny_patch16_224.*--model.weights FILE"):
        vit(pretrained=True)


def test_a_model_without_pretrained_weights_says_so():
    with pytest.raises(ValueError, match="no pretrained weights for vit_preproj_tiny"):
        building.build_model("vit_preproj_tiny", 3, ARGS, pretrained=True)


def test_the_input_config_is_the_models_own_and_grey_models_get_one_channel():
    colour = building.input_config(vit())
    assert colour["input_size"] == [3, 32, 32]
    assert colour["mean"] == [0.5, 0.5, 0.5]  # as the model's weights were trained
    grey = building.input_config(
        building.build_model("vit_preproj_tiny", 3, {**ARGS, "in_chans": 1})
    )
    assert grey["input_size"] == [1, 32, 32]
    assert grey["mean"] == pytest.approx([(0.485 + 0.456 + 0.406) / 3])


def test_another_image_size_is_refused_unless_the_model_is_dynamic():
    used = {"input_size": [3, 48, 48]}
    with pytest.raises(ValueError, match="48x48 px, the model takes 32x32"):
        building.check_image_size(vit(), used)
    building.check_image_size(
        building.build_model(VIT, 3, {**ARGS, "dynamic_img_size": True}), used
    )
    building.check_image_size(building.build_model("test_resnet", 3), used)


CLIP_ARGS = {"img_size": 32, "num_frames": 4, "depth": 1, "embed_dim": 48, "num_heads": 3}


def test_the_input_config_of_a_video_model_tells_its_frames_in_plain_types():
    model = building.build_model("video_vit_preproj_tiny", 3, {**CLIP_ARGS, "in_chans": 1})
    config = building.input_config(model)
    assert config["input_size"] == [1, 4, 32, 32]
    assert config["mean"] == pytest.approx([(0.485 + 0.456 + 0.406) / 3])
    assert all(type(size) is int for size in config["input_size"])


def test_clips_that_do_not_divide_and_data_of_the_other_kind_are_refused():
    model = building.build_model("video_vit_preproj_tiny", 3, CLIP_ARGS)
    building.check_image_size(model, {"input_size": [3, 6, 48, 64]})  # any that divides
    with pytest.raises(ValueError, match="3 frames does not divide into tubelets of 2"):
        building.check_image_size(model, {"input_size": [3, 3, 32, 32]})
    with pytest.raises(ValueError, match="the data give images, .* takes clips"):
        building.check_image_size(model, {"input_size": [3, 32, 32]})
    with pytest.raises(ValueError, match="the data give clips, VisionTransformer takes images"):
        building.check_image_size(vit(), {"input_size": [3, 4, 32, 32]})
