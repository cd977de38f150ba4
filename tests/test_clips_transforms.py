"""From frames to clips: sizes, crops, the same draw for all frames, normalisation."""

import numpy as np
import pytest
import torch
from clip_files import CONFIG
from PIL import Image

from mmpreproj.data.video.clips import EvalClips, TrainClip, VideoAugment
from mmpreproj.data.vision import erase, normalize, resolve_data_config


def resolved(**changes):
    return resolve_data_config({**CONFIG, **changes}, clips=True)


def column_ramp(height, width, n=4):
    """Frames [T, H, W, 3] whose pixels say their column."""
    row = np.arange(width, dtype=np.uint8)[None, None, :, None]
    return np.broadcast_to(row, (n, height, width, 3)).copy()


def test_three_crops_are_left_middle_and_right():
    clips = EvalClips(resolved(), crops=3)(column_ramp(32, 96)[None])
    assert clips.shape == (3, 3, 4, 32, 32) and clips.dtype == torch.uint8
    assert [int(clip[0, 0, 0, 0]) for clip in clips] == [0, 32, 64]  # no resizing: 32 rows already
    assert int(clips[2, 0, 3, 31, 31]) == 95


def test_crops_of_an_upright_video_are_top_middle_and_bottom():
    tall = column_ramp(32, 96).transpose(0, 2, 1, 3)
    clips = EvalClips(resolved(), crops=3)(tall[None])
    assert [int(clip[0, 0, 0, 0]) for clip in clips] == [0, 32, 64]
    assert int(clips[1, 0, 0, 31, 0]) == 63


def test_views_come_before_crops():
    first, second = column_ramp(32, 96), column_ramp(32, 96) + 100
    clips = EvalClips(resolved(), crops=2)(np.stack([first, second]))
    assert [int(clip[0, 0, 0, 0]) for clip in clips] == [0, 64, 100, 164]


def test_the_short_side_is_resized_and_the_ratio_kept():
    transform = EvalClips(resolved())
    assert transform.resized(240, 320) == (32, 43)  # 42.67
    assert transform.resized(320, 240) == (43, 32)
    assert EvalClips(resolved(), short_side=40).resized(240, 320) == (40, 53)
    assert EvalClips(resolved(input_size=(3, 4, 32, 48))).resized(240, 320) == (36, 48)


def test_resizing_agrees_with_pillow():
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    frame = np.asarray(Image.fromarray(small).resize((96, 64), Image.Resampling.BICUBIC))
    clip = EvalClips(resolved())(np.stack([frame] * 4)[None])[0]
    expected = np.asarray(Image.fromarray(frame).resize((48, 32), Image.Resampling.BILINEAR))
    difference = clip[:, 0].permute(1, 2, 0).numpy().astype(int) - expected[:, 8:40]
    assert np.abs(difference).max() <= 1  # both antialiased, each with its own rounding


def test_crops_below_the_model_size_are_refused():
    with pytest.raises(ValueError, match="short_side"):
        EvalClips(resolved(), short_side=16)


AUGMENT = VideoAugment(scale=(0.3, 0.9), rand_augment=2)


def test_all_frames_of_a_clip_get_the_same_augmentation():
    frame = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    still = np.stack([frame] * 4)
    transform = TrainClip(resolved(), AUGMENT)
    clips = []
    for seed in range(8):
        torch.manual_seed(seed)
        clip = transform(still)
        assert clip.shape == (3, 4, 32, 32) and clip.dtype == torch.uint8 and clip.is_contiguous()
        assert all(torch.equal(clip[:, 0], clip[:, t]) for t in range(4))
        clips.append(clip)
    assert len({clip.numpy().tobytes() for clip in clips}) == 8


def test_the_augmentation_follows_the_seed():
    frames = np.random.default_rng(0).integers(0, 256, (4, 48, 64, 3), dtype=np.uint8)
    transform = TrainClip(resolved(), AUGMENT)
    torch.manual_seed(3)
    first = transform(frames)
    torch.manual_seed(3)
    assert torch.equal(first, transform(frames))


def test_mirroring_can_be_left_out():
    frames = column_ramp(32, 96)
    for hflip, expected in ((0.0, {True}), (1.0, {False}), (0.5, {True, False})):
        transform = TrainClip(resolved(), VideoAugment(hflip=hflip))
        rising = {
            bool(c[0, 0, 9, 0] < c[0, 0, 9, 31]) for c in (transform(frames) for _ in "x" * 20)
        }
        assert rising == expected


def test_no_augmentation_is_the_central_clip_of_evaluation():
    frames = column_ramp(40, 96)
    clip = TrainClip(resolved(), VideoAugment(no_aug=True))(frames)
    assert torch.equal(clip, EvalClips(resolved())(frames[None])[0])


def test_normalisation_is_by_channel():
    pixels = torch.randint(0, 256, (2, 3, 4, 8, 8), dtype=torch.uint8)
    values = normalize(pixels, resolved())
    for c in range(3):
        expected = (pixels[:, c].double() / 255 - CONFIG["mean"][c]) / CONFIG["std"][c]
        assert torch.allclose(values[:, c].double(), expected, atol=1e-6)


def test_grey_models_get_grey_clips():
    config = resolved(input_size=(1, 4, 32, 32))
    assert config["mean"] == pytest.approx([0.4])
    frames = np.full((4, 32, 32, 3), (200, 100, 50), np.uint8)
    clip = EvalClips(config)(frames[None])
    assert clip.shape == (1, 1, 4, 32, 32)
    assert abs(int(clip[0, 0, 0, 0, 0]) - (0.299 * 200 + 0.587 * 100 + 0.114 * 50)) < 1
    assert TrainClip(config, AUGMENT)(frames).shape == (1, 4, 32, 32)


def test_erasing_takes_one_box_of_a_clip_in_all_its_frames():
    clips = erase(torch.full((6, 3, 5, 32, 32), 7.0), 1.0)
    changed = clips != 7.0
    assert changed.flatten(1).any(1).all() and not changed.flatten(1).all(1).any()
    assert torch.equal(changed, changed[:, :1, :1].expand_as(changed))
    boxes = changed[:, 0, 0]
    assert not all(torch.equal(boxes[0], box) for box in boxes[1:])


def test_the_input_is_the_models_unless_said_otherwise():
    used = resolve_data_config(CONFIG, True, num_frames=8, img_size=(24, 40), mean=(0.1,))
    assert used["input_size"] == [3, 8, 24, 40]
    assert used["mean"] == pytest.approx([0.1] * 3) and used["std"] == list(CONFIG["std"])
    image = {**CONFIG, "input_size": (3, 32, 32)}
    assert resolve_data_config(image, True, num_frames=8)["input_size"] == [3, 8, 32, 32]
    with pytest.raises(ValueError, match="num_frames"):
        resolve_data_config(image, True)
    with pytest.raises(ValueError, match="4 input channels"):
        resolved(input_size=(4, 4, 32, 32))
    with pytest.raises(ValueError, match="mean has 2 values"):
        resolve_data_config(CONFIG, True, mean=(0.1, 0.2))
