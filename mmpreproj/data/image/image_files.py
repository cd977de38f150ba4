"""One image, from a file of any kind to the model's input.

Reading gives 8-bit RGB or grey, by one rule for training, validation and prediction:

- the EXIF orientation is applied, so that a phone's photograph stands upright;
- transparency (RGBA, LA, palette, or a single transparent colour) is laid over white;
- CMYK and YCCK JPEGs are read with Adobe's inverted inks, as ImageNet's are;
- 16-bit grey is scaled to 8 bits, not clipped;
- of an animation the first frame is read; embedded colour profiles are ignored, as by timm and
  torchvision;
- a file cut short is an error, never an image with a grey lower half.

Then come timm's transforms. Pixels are normalised on the model's device, or here, in prediction.
"""

import dataclasses
import functools
import io
import itertools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torchvision.transforms import Compose

from mmpreproj.data.labelled_files import UnreadableFile
from mmpreproj.data.vision import check_channels, normalize

__all__ = ["AugmentConfig", "UnreadableImage", "eval_transform", "load_image", "pixel_transform"]
__all__ += ["to_channels", "train_transform"]

ORIENTATION_TAG = 0x0112
TILE = 2048

# Damaged metadata says nothing about the pixels, and in a large collection these messages come by
# the thousand.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")


class UnreadableImage(UnreadableFile):
    """An image file that cannot be decoded; the message names the file and the reason."""


def load_image(
    source: str | os.PathLike | BinaryIO | Image.Image, channels: int = 3, name: str | None = None
) -> Image.Image:
    """Reads an image file completely.

    Args:
        source: a path, an open binary file (which is closed afterwards), or an image that is read.
        channels: 3 for RGB, 1 for grey.
        name: what to call the image in an error, where the source does not know it.
    Returns: a loaded PIL image of mode RGB or L.
    Raises:
        UnreadableImage: not an image, cut short, too large (PIL's limit of 179 million pixels), or
            of a pixel type without a defined range of values.
        ValueError: `channels` is neither 1 nor 3.
    """
    check_channels(channels)
    is_path = isinstance(source, (str, os.PathLike))
    name = name or (os.fspath(source) if is_path else getattr(source, "name", "<stream>"))
    try:
        if isinstance(source, Image.Image):
            return to_channels(source, channels)
        with open(source, "rb") if is_path else source as file:
            # in memory, as PIL asks a file for as many bytes as a damaged one says that it has
            with Image.open(io.BytesIO(file.read())) as image:
                image.load()
                if _orientation(image) != 1:
                    ImageOps.exif_transpose(image, in_place=True)
                return to_channels(image, channels)
    except MemoryError:
        raise  # says something about this machine, not about the file
    # PIL's decoders raise nearly every type on damaged files: struct.error, SyntaxError, …
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnreadableImage(f"cannot read image {name!r} ({reason})") from error


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Upright 8-bit RGB (channels 3) or grey (channels 1) from a PIL image of any mode.

    Raises: ValueError for pixel types without a defined range (float, 32-bit integers beyond 16
    bits).
    """
    check_channels(channels)
    mode = {1: "L", 3: "RGB"}[channels]
    if _orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _by_tiles(_wide_to_grey, image, "L")
    elif image.has_transparency_data:
        image = _by_tiles(_over_white, image, "RGB")
    elif image.mode == mode:
        return image
    elif image.mode in ("CMYK", "P", "1", "L"):
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _orientation(image: Image.Image) -> int:
    if "exif" not in image.info and image.format not in ("TIFF", "MPO", "PNG", "WEBP"):
        return 1  # parsing metadata that is not there would cost more than decoding a small JPEG
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # damaged metadata around sound pixels: as if there were none
        return 1


def _by_tiles(
    change: Callable[[Image.Image], Image.Image], image: Image.Image, mode: str
) -> Image.Image:
    """The image changed tile by tile, so that of a large one there are not several copies."""
    width, height = image.size
    changed = Image.new(mode, image.size)
    for left, top in itertools.product(range(0, width, TILE), range(0, height, TILE)):
        box = (left, top, min(left + TILE, width), min(top + TILE, height))
        changed.paste(change(image.crop(box)), box)
    return changed


def _over_white(image: Image.Image) -> Image.Image:
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    white.alpha_composite(layer)
    return white.convert("RGB")


def _wide_to_grey(image: Image.Image) -> Image.Image:
    """8-bit grey from 16-bit grey (modes I;16*, and I where the values fit 16 bits)."""
    if image.mode == "F":
        raise ValueError(
            "32-bit float pixels have no defined range: save the image with 8 or 16 bits a channel"
        )
    values = np.asarray(image).astype(np.int64)
    low, high = values.min(), values.max()
    if low < 0 or high > 65535:
        raise ValueError(
            f"integer pixels from {low} to {high} do not fit 16 bits: save it with 8 or 16 bits"
        )
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        values[values == transparent] = 65535  # white, as for every other kind of transparency
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


# To the model's input


@dataclasses.dataclass
class AugmentConfig:
    """Augmentation: keywords of timm.data.create_transform, defaults of timm's train.py."""

    no_aug: bool = False
    """Only resize and crop."""
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | None = None
    """Random resized crop (rrc, the default), or resize, ratio kept, and centre or random crop."""
    scale: tuple[float, float] | None = None
    """Area of the random crop; None is timm's default for the crop mode: (0.08, 1) for rrc."""
    ratio: tuple[float, float] | None = None
    """Aspect ratio of the random crop; None is (3/4, 4/3) for rrc."""
    hflip: float = 0.5
    vflip: float = 0.0
    color_jitter: float | tuple[float, float, float] | tuple[float, float, float, float] | None = (
        0.4
    )
    color_jitter_prob: float | None = None
    grayscale_prob: float = 0.0
    gaussian_blur_prob: float = 0.0
    auto_augment: str | None = None
    """timm's policy string: "rand-m9-mstd0.5-inc1", "augmix-m3", "3a" (DeiT III's), …"""
    interpolation: str = "random"
    """Of the random crop; "random" draws bilinear or bicubic."""
    re_prob: float = 0.0
    """Random erasing, done on whole batches on the model's device."""
    re_mode: Literal["const", "rand", "pixel"] = "pixel"
    re_count: int = 1


def train_transform(
    config: Mapping[str, Any], augment: AugmentConfig
) -> Callable[[Image.Image], torch.Tensor]:
    """PIL image -> augmented uint8 [C, H, W]; random erasing is left to the batch."""
    keywords = {k: v for k, v in dataclasses.asdict(augment).items() if not k.startswith("re_")}
    return create_transform(
        config["input_size"],
        is_training=True,
        use_prefetcher=True,
        mean=tuple(config["mean"]),
        **keywords,
    )


def pixel_transform(config: Mapping[str, Any]) -> Callable[[Image.Image], torch.Tensor]:
    """PIL image -> uint8 [C, H, W], resized and cropped for evaluation."""
    return create_transform(
        config["input_size"],
        use_prefetcher=True,
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
    )


def eval_transform(config: Mapping[str, Any]) -> Callable[[Image.Image], torch.Tensor]:
    """PIL image of any kind -> normalised float32 [C, H, W], just as in evaluation."""
    upright = functools.partial(to_channels, channels=config["input_size"][0])
    return Compose([upright, pixel_transform(config), functools.partial(normalize, config=config)])
