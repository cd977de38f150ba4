"""scikit-learn's handwritten digits, the default: real images that need no download."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch.utils.data import Dataset

from mmpreproj.data.image.image_files import to_channels
from mmpreproj.data.image.image_module import ImageDataModule
from mmpreproj.data.labelled_files import Source
from mmpreproj.data.loaders import run_seed, seeded, stratified_holdout
from mmpreproj.data.targets import PADDING
from mmpreproj.messages import need

__all__ = ["DigitsAugment", "DigitsDataModule", "load_digits", "resample"]

N_TEST = 540
SIDE = 8


def load_digits() -> tuple[torch.Tensor, np.ndarray]:
    """Pixels float [1797, 1, 8, 8] in 0..1, and which digit each image is, int64 [1797]."""
    data = need("sklearn.datasets", "reading the digits", "train").load_digits()
    return torch.from_numpy(data.images).float().div_(16)[:, None], data.target


class DigitsSource(Source):
    """The test split, or the rest, in memory; `numbers` are those of the images in the whole."""

    def __init__(self, split: str):
        pixels, digits = load_digits()
        rest, test = stratified_holdout(digits, n_held=N_TEST, seed=0)
        self.numbers = test if split == "test" else rest
        self.pixels = pixels[self.numbers]
        classes = {"class": [str(digit) for digit in range(10)]}
        super().__init__(f"the digits to {split}", classes, digits[self.numbers][:, None])

    def place(self) -> str:
        return self.origin


@dataclasses.dataclass
class DigitsAugment:
    """Random affine map of training digits. No flips: they would turn digits into other shapes."""

    degrees: float = 10.0
    """Largest rotation either way."""
    translate: float = 0.1
    """Largest shift either way, as a part of the side."""
    scale: tuple[float, float] = (0.9, 1.1)


def resample(
    pixels: torch.Tensor, size: tuple[int, int], augment: DigitsAugment | None = None
) -> torch.Tensor:
    """Enlarges (bicubic, on a dark ground), moving each image at random if `augment` is given.

    A whole batch at a time and in one interpolation: for images this small, calls cost more than
    arithmetic.

    Shape: pixels float [B, 1, 8, 8] in 0..1 -> [B, 1, *size] in 0..1.
    """
    n = len(pixels)
    angle, zoom, shift = torch.zeros(n), torch.ones(n), torch.zeros(n, 2)
    if augment is not None:
        low, high = augment.scale
        angle = (torch.rand(n) * 2 - 1) * torch.pi / 180 * augment.degrees
        zoom = torch.rand(n) * (high - low) + low
        # affine_grid measures in half sides
        shift = (torch.rand(n, 2) * 2 - 1) * 2 * augment.translate
    cos, sin = angle.cos() / zoom, angle.sin() / zoom
    rows = [torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), [n, 1, *size], align_corners=False)
    return F.grid_sample(pixels, grid, mode="bicubic", align_corners=False).clamp_(0, 1)


@dataclasses.dataclass(eq=False)
class Digits(Dataset):
    """Digits, enlarged and normalised, a batch at a time. Items: (float [C, H, W], class)."""

    pixels: torch.Tensor
    """float [N, 1, 8, 8] in 0..1."""
    targets: torch.Tensor
    """int64 [N]."""
    config: dict[str, Any]
    """The resolved data config."""
    augment: DigitsAugment | None = None
    seed: int = 0
    rank: int = 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        epoch, first = divmod(indices[0], len(self))  # see loaders.py
        chosen = torch.tensor(indices) % len(self)
        channels, *size = self.config["input_size"]
        if self.augment is None:
            images = resample(self.pixels[chosen], size)
        else:
            with seeded(self.seed, self.rank, epoch, first):
                images = resample(self.pixels[chosen], size, self.augment)
        mean, std = (torch.tensor(self.config[name]).view(-1, 1, 1) for name in ("mean", "std"))
        images = (images.expand(-1, channels, -1, -1) - mean) / std
        return list(zip(images, self.targets[chosen], strict=True))


def digit_of(image: Image.Image, config: dict[str, Any]) -> torch.Tensor:
    """A picture of one digit -> normalised float [C, H, W].

    The picture is brought down to 8 x 8 by averaging, the way the data were made. The data are
    light strokes on a dark ground: a picture whose border is light (ink on paper) is inverted.
    """
    grey = to_channels(image, 1)
    pixels = np.asarray(grey)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground = int(np.median(border))
    if ground > 127:
        grey, ground = ImageOps.invert(grey), 255 - ground
    side = max(grey.size)
    square = Image.new("L", (side, side), ground)
    square.paste(grey, ((side - grey.width) // 2, (side - grey.height) // 2))
    small = np.array(square.resize((SIDE, SIDE), Image.Resampling.BOX))
    digit = torch.from_numpy(small).float().div_(255)[None, None]
    return Digits(digit, torch.zeros(1, dtype=torch.int64), config)[0][0]


class DigitsDataModule(ImageDataModule):
    """1797 handwritten digits of 8 x 8 pixels (UCI's optical digits, test part), enlarged to the
    model's size.

    540 images are the test split, the same ones for ever; validation is held out of the other 1257.

    Args:
        augment: random affine map of training images.
        batch_size: images in a training batch.
        num_workers: worker processes; the images fit in memory and a batch takes a millisecond, so
            they would only cost time.
        keywords: those of ImageDataModule. Cropping and interpolation do not apply.
    """

    def __init__(
        self,
        augment: DigitsAugment | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
        **keywords: Any,
    ):
        super().__init__(batch_size=batch_size, num_workers=num_workers, **keywords)
        crop = ("crop_pct", "crop_mode", "interpolation")
        if unused := [key for key in crop if self.overrides[key] is not None]:
            raise ValueError(
                f"{', '.join(unused)} do not apply to the digits, which are only enlarged"
            )
        self.affine = augment or DigitsAugment()

    def open(self, split: str) -> DigitsSource:
        return DigitsSource(split)

    def dataset(self, split: str, n_padding: int = 0) -> Digits:
        source, indices, targets = self._part(split)
        pixels, digits = source.pixels[indices], torch.from_numpy(targets[indices, 0])
        if split == "train":
            seeds = {"seed": run_seed(), "rank": self._world()[1]}
            return Digits(pixels, digits, self.resolved_data_config, self.affine, **seeds)
        pixels = torch.cat([pixels, pixels.new_zeros(n_padding, *pixels.shape[1:])])
        digits = torch.cat([digits, digits.new_full((n_padding,), PADDING)])
        return Digits(pixels, digits, self.resolved_data_config)

    def eval_transform(self) -> Callable[[Image.Image], torch.Tensor]:
        return functools.partial(digit_of, config=self.resolved_data_config)
