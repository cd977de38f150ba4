"""What Hugging Face's image and video models are built for, and fed."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import CLASSES, built, inputs, logits, reference, saved, transformers_logits  # noqa: E402

from mmpreproj.backbones import building  # noqa: E402


def test_fields_of_the_configuration_can_be_changed(tmp_path):
    saved("timesformer", tmp_path / "divided")
    args = {"attention_type": "joint_space_time", "hidden_dropout_prob": 0.3, "num_frames": 4}
    model = built(tmp_path / "divided", model_args=args)
    assert not any("temporal" in name for name, _ in model.named_parameters())
    assert model.model.timesformer.embeddings.pos_drop.p == 0.3
    saved("vjepa2", tmp_path / "rotary")  # no tables of positions: weights fit every size
    model = built(tmp_path / "rotary", model_args={"num_frames": 6, "img_size": 24})
    assert building.input_config(model)["input_size"] == [3, 6, 24, 24]
    saved("clip", tmp_path / "towers")
    args = {"image_size": 24, "attention_dropout": 0.2}
    model = built(tmp_path / "towers", model_args=args, pretrained=False)
    assert model.config.vision_config.image_size == 24
    assert logits(model, inputs(model)).shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("case", "args", "message"),
    [
        ("videomae", {"num_frame": 8}, "no field 'num_frame'; close matches: num_frames"),
        ("videomae", {"num_frames": "many"}, "does not take model_args=.*num_frames"),
        ("videomae", {"num_frames": 5}, "tubelets of 2, found 5 frames, which do not divide"),
        ("vit", {"image_size": 20}, "patches of 8x8 px, found 20x20 px, which do not divide"),
        ("vit", {"num_frames": 4}, "no field 'num_frames'"),
        ("vit", {"img_size": 24, "image_size": 32}, "gives image_size twice"),
        ("vit", {"num_labels": 4}, "model_args holds num_labels"),
        ("vit", {"hidden_act": "spline"}, "cannot be built: .*spline"),
        ("dinov2", {"image_size": [16, 24]}, "square images only, found 16x24"),
        ("timesformer", {"attention_type": "space_only"}, "space_only gives logits for each frame"),
        ("timesformer", {"attention_type": "spiral"}, "spiral"),
    ],
)
def test_fields_that_do_not_fit_name_themselves(case, args, message, tmp_path):
    saved(case, tmp_path)
    with pytest.raises(ValueError, match=message):
        built(tmp_path, model_args=args, pretrained=False)


def test_tables_of_another_size_are_refused_with_both_shapes(tmp_path):
    for case, args, shapes in (
        ("vit", {"image_size": 24}, r"position_embeddings.*\[1, 5, 32\].*\[1, 10, 32\]"),
        ("vivit", {"num_frames": 8}, r"position_embeddings.*\[1, 9, 32\].*\[1, 17, 32\]"),
        ("timesformer", {"num_frames": 8}, r"time_embeddings.*\[1, 4, 32\].*\[1, 8, 32\]"),
    ):
        saved(case, tmp_path / case)
        with pytest.raises(ValueError, match=shapes):
            built(tmp_path / case, model_args=args)
    # VideoMAE's table is computed, not learned: its weights fit any number of frames
    theirs = saved("videomae", tmp_path / "videomae")
    model = built(tmp_path / "videomae", model_args={"num_frames": 8}).eval()
    longer = reference("videomae", num_frames=8)
    longer.load_state_dict(theirs.state_dict())
    x = inputs(model)
    assert x.shape[2] == 8 and torch.equal(logits(model, x), transformers_logits(longer, x))


@pytest.mark.parametrize("frames", [2, 8])
@pytest.mark.parametrize("case", ["videomae", "vivit", "timesformer"])
def test_another_number_of_frames_is_refused_where_the_model_is_fixed(case, frames, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path)
    with pytest.raises(ValueError, match=f"clips of 4 frames, found {frames}"):
        model(torch.randn(1, 3, frames, 16, 16))
    with pytest.raises(ValueError, match=f"clips of 4 frames, found {frames}"):
        building.check_image_size(model, {"input_size": [3, frames, 16, 16]})
    building.check_image_size(model, {"input_size": [3, 4, 16, 16]})


@pytest.mark.parametrize("frames", [2, 8])
@pytest.mark.parametrize("case", ["vjepa2", "timesformer_joint"])
def test_models_that_adapt_to_other_frames_equal_one_built_for_them(case, frames, tmp_path):
    theirs = saved(case, tmp_path)
    model = built(tmp_path).eval()
    key = "frames_per_clip" if case == "vjepa2" else "num_frames"
    other = reference(case, **{key: frames})
    state = theirs.state_dict()
    table = "timesformer.embeddings.time_embeddings"
    if table in state:  # the nearest of the 4 frames: frame i of n is i · 4 / n
        state[table] = state[table][:, [i * 4 // frames for i in range(frames)]]
    other.load_state_dict(state)
    x = torch.randn(2, 3, frames, 16, 16)
    assert torch.equal(logits(model, x), transformers_logits(other, x))
    building.check_image_size(model, {"input_size": [3, frames, 16, 16]})


def test_inputs_of_another_kind_or_size_are_refused(tmp_path):
    saved("vjepa2", tmp_path / "clips")
    saved("vit", tmp_path / "images")
    video, image = built(tmp_path / "clips"), built(tmp_path / "images")
    for model, shape, message in (
        (video, (1, 3, 3, 16, 16), "tubelets of 2, found 3 frames"),
        (video, (1, 3, 4, 24, 24), "takes 16x16 px, found 24x24"),
        (video, (1, 3, 16, 16), r"takes clips \[B, 3, T, H, W\], found \[1, 3, 16, 16\]"),
        (video, (1, 4, 3, 16, 16), r"takes clips \[B, 3, T, H, W\], found \[1, 4, 3, 16, 16\]"),
        (image, (1, 3, 24, 16), "takes 16x16 px, found 24x16"),
        (image, (1, 3, 4, 16, 16), r"takes images \[B, 3, H, W\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(torch.randn(shape))
    with pytest.raises(ValueError, match="the data give clips, HFClassifier takes images"):
        building.check_image_size(image, {"input_size": [3, 4, 16, 16]})
    with pytest.raises(ValueError, match="the data give images, HFClassifier takes clips"):
        building.check_image_size(video, {"input_size": [3, 16, 16]})
    with pytest.raises(ValueError, match="takes 16x16 px, found 32x32"):
        building.check_image_size(image, {"input_size": [3, 32, 32]})


def test_sizes_that_are_not_square_run_where_the_model_takes_them(tmp_path):
    for case, args in (("vit", {"image_size": [16, 24]}), ("videomae", {"image_size": [24, 16]})):
        saved(case, tmp_path / case)
        model = built(tmp_path / case, model_args=args, pretrained=False)
        assert building.input_config(model)["input_size"][-2:] == args["image_size"]
        assert logits(model, inputs(model)).shape == (2, CLASSES)
    theirs = saved("dinov2", tmp_path / "dinov2")
    model = built(tmp_path / "dinov2").eval()
    x = torch.randn(2, 3, 16, 32)
    assert torch.equal(logits(model, x), transformers_logits(theirs, x))
    with pytest.raises(ValueError, match="patches of 8x8 px, found 16x20 px"):
        model(torch.randn(1, 3, 16, 20))


# ---- what it is fed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "BitImageProcessor",  # DINOv2's
        "CLIPImageProcessor",
        "SiglipImageProcessor",
        "ViTImageProcessor",
        "VideoMAEVideoProcessor",
        "VivitImageProcessor",
        "VivitVideoProcessor",
    ],
)
def test_mean_and_std_give_what_the_processor_gives(name, tmp_path):
    processor = getattr(transformers, name)()
    processor.save_pretrained(tmp_path)
    clip = "Video" in name or "Vivit" in name
    saved("videomae" if clip else "vit", tmp_path)
    found = building.input_config(built(tmp_path))
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    fed = [frame.permute(1, 2, 0).numpy() for frame in pixels]
    out = processor(
        [fed] if clip else fed, do_resize=False, do_center_crop=False, return_tensors="pt"
    )["pixel_values"]
    mean, std = (torch.tensor(found[key]).view(3, 1, 1) for key in ("mean", "std"))
    ours = (pixels / 255 - mean) / std
    torch.testing.assert_close(ours, out.reshape(ours.shape).float(), rtol=0, atol=1e-5)


def test_size_crop_and_interpolation_come_from_the_preprocessing_file(tmp_path):
    saved("dinov2", tmp_path)
    crop = {"height": 32, "width": 32}
    settings = {"size": {"shortest_edge": 40}, "crop_size": crop, "do_center_crop": True}
    settings |= {"resample": 3, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(settings))
    config = building.input_config(built(tmp_path))
    assert config["input_size"] == [3, 32, 32]  # DINOv2 adapts: what it is fed, not its table's
    assert (config["crop_pct"], config["crop_mode"]) == (0.8, "center")
    assert config["interpolation"] == "bicubic"
    assert config["mean"] == pytest.approx([0.1, 0.2, 0.3])
    assert config["std"] == pytest.approx([0.4, 0.5, 0.6])
    file.write_text(json.dumps({"size": {"height": 20, "width": 20}, "resample": 2}))
    saved("vit", tmp_path)
    config = building.input_config(built(tmp_path))
    assert config["input_size"] == [3, 16, 16]  # fixed, whatever the file says
    assert (config["crop_pct"], config["crop_mode"]) == (1.0, "squash")
    assert config["interpolation"] == "bilinear" and config["mean"] == [0.5, 0.5, 0.5]
    file.write_text("[1")
    with pytest.raises(ValueError, match="hf:.* cannot be read: .*preprocessor_config.json"):
        built(tmp_path)


def test_input_configs_are_plain_types(tmp_path):
    for case in ("vit", "videomae"):
        saved(case, tmp_path / case)
        config = building.input_config(built(tmp_path / case))
        assert json.loads(json.dumps(config)) == config
    assert config["input_size"] == [3, 4, 16, 16]
