"""The digits: sizes, no overlap, reproducible batches, pictures of one's own."""

import numpy as np
import pytest
import torch
from PIL import Image

from mmpreproj.data import DigitsAugment, DigitsDataModule

CONFIG = {
    "input_size": (1, 16, 16),
    "interpolation": "bicubic",
    "mean": (0.5,),
    "std": (0.5,),
    "crop_pct": 0.9,
    "crop_mode": "center",
}


def digits(**keywords):
    data = DigitsDataModule(**keywords)
    data.setup()
    data.data_config = CONFIG
    return data


def numbers(data, split):
    """The numbers that a split's images have in scikit-learn's data set."""
    source, indices, _ = data._parts[split]
    return source.numbers[indices]


def test_parts_have_540_test_images_and_do_not_overlap():
    data = digits()
    facts = data.describe()
    assert facts["n_test"] == 540
    assert facts["n_train"] + facts["n_val"] + facts["n_test"] == 1797
    assert facts["n_val"] == 126  # a tenth of 1257
    parts = [set(numbers(data, split).tolist()) for split in ("train", "val", "test")]
    assert len(set.union(*parts)) == 1797
    assert data.classes == list("0123456789")


def test_the_test_part_has_all_classes_in_proportion():
    targets = torch.cat([t for _, t in digits().test_dataloader()])
    counts = torch.bincount(targets, minlength=10)
    assert counts.sum() == 540
    # 30 % of 174 to 183 images
    assert counts.min() >= 52 and counts.max() <= 55


def test_the_test_part_does_not_follow_any_seed():
    torch.manual_seed(1)
    first = digits(split_seed=1)
    second = digits(split_seed=2, val_fraction=0.3)
    assert np.array_equal(numbers(first, "test"), numbers(second, "test"))
    assert not np.array_equal(numbers(first, "val"), numbers(second, "val")[:125])


def test_evaluation_images_are_the_digits_themselves():
    data = digits()
    images, targets = next(iter(data.test_dataloader()))
    assert images.shape == (64, 1, 16, 16) and images.dtype == torch.float32
    assert images.min() >= -1 and images.max() <= 1
    # 2 x 2 blocks of the enlarged image average to about the 8 x 8 original
    small = torch.nn.functional.avg_pool2d(images, 2) / 2 + 0.5
    from sklearn.datasets import load_digits

    original = torch.from_numpy(load_digits().images).float() / 16
    chosen = original[torch.from_numpy(numbers(data, "test")[:64])]
    assert (small[:, 0] - chosen).abs().mean() < 0.05


def test_three_channels_repeat_the_grey_one():
    data = digits()
    data.data_config = {**CONFIG, "input_size": (3, 16, 24), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (64, 3, 16, 24)
    assert torch.equal(images[:, 0], images[:, 2])


def test_shift_moves_ink_by_the_stated_part_of_the_side():
    # At a shift of exactly +-25 % of 16 px the centre of mass moves by 4 px or less
    from mmpreproj.data.image.digits import resample

    pixels = torch.zeros(64, 1, 8, 8)
    pixels[:, 0, 3:5, 3:5] = 1
    moved = resample(pixels, (16, 16), DigitsAugment(degrees=0, translate=0.25, scale=(1.0, 1.0)))
    place = torch.arange(16.0) + 0.5
    centre = (moved[:, 0].sum(1) * place).sum(1) / moved[:, 0].sum((1, 2))
    assert (centre - 8).abs().max() <= 4.1
    assert (centre - 8).abs().max() > 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_equal_seeds_give_equal_batches_and_epochs_differ(monkeypatch, workers):
    def epochs(seed, num_workers):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        loader = digits(num_workers=num_workers, batch_size=400).train_dataloader()
        return [torch.cat([images for images, _ in loader]) for _ in range(2)]

    first = epochs(5, workers)
    again = epochs(5, 0)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], epochs(6, 0)[0])


def test_own_pictures_are_read_on_dark_or_light_ground():
    data = digits()
    ink = Image.new("L", (80, 100), 255)
    ink.paste(0, (25, 20, 55, 80))
    light = data.eval_transform()(ink)
    dark = data.eval_transform()(Image.eval(ink, lambda v: 255 - v))
    assert light.shape == (1, 16, 16)
    assert torch.allclose(light, dark, atol=1e-6)
    assert light[0, 8, 7:9].min() > 0 and light[0, 8, 0] == -1


def test_settings_that_do_not_apply_are_refused():
    with pytest.raises(ValueError, match="crop_pct"):
        DigitsDataModule(crop_pct=0.9)


def test_padding_items_are_marked():
    dataset = digits().dataset("test", n_padding=3)
    assert len(dataset) == 543
    assert [int(dataset[i][1]) for i in (540, 541, 542)] == [-1, -1, -1]
