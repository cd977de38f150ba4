"""Reading one image file, whatever it holds, as 8-bit RGB or grey.

One rule for training, validation and prediction:

- the EXIF orientation is applied, so that a phone's photograph stands upright;
- transparency (RGBA, LA, palette, or a single transparent colour) is laid over white;
- CMYK and YCCK JPEGs are read with Adobe's inverted inks, as ImageNet's are;
- 16-bit grey is scaled to 8 bits, not clipped;
- of an animation the first frame is read; embedded colour profiles are ignored, as by timm and
  torchvision;
- a file cut short is an error, never an image with a grey lower half.
"""

import os
import warnings
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

MODES = {1: "L", 3: "RGB"}
ORIENTATION_TAG = 0x0112

# Damaged metadata says nothing about the pixels, and in a large collection these messages come by
# the thousand.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")


class UnreadableImage(ValueError):
    """An image file that cannot be decoded; the message names the file and the reason."""


def load_image(
    source: str | os.PathLike | BinaryIO, channels: int = 3, name: str | None = None
) -> Image.Image:
    """Reads an image file completely.

    Args:
        source: a path, or an open binary file (which is closed afterwards).
        channels: 3 for RGB, 1 for grey.
        name: what to call the image in an error, where the source does not know it.
    Returns: a loaded PIL image of mode RGB or L.
    Raises:
        UnreadableImage: not an image, cut short, too large (PIL's limit of 179 million pixels), or
            of a pixel type without a defined range of values.
        ValueError: `channels` is neither 1 nor 3.
    """
    mode_of(channels)
    is_path = isinstance(source, (str, os.PathLike))
    name = name or (os.fspath(source) if is_path else getattr(source, "name", "<stream>"))
    try:
        with open(source, "rb") if is_path else source as file:
            with Image.open(file) as image:
                image.load()
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
    mode = mode_of(channels)
    if _orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _wide_to_grey(image)
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGBA", layer.size, "white")
        image.alpha_composite(layer)
        image = image.convert("RGB")
    elif image.mode == mode:
        return image
    elif image.mode in ("CMYK", "P", "1", "L"):
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def mode_of(channels: int) -> str:
    """PIL's mode for a number of channels. Raises: ValueError unless it is 1 or 3."""
    if channels not in MODES:
        raise ValueError(
            f"the model takes {channels} input channels, but image files are read as 3 (RGB) or "
            "1 (grey): "
            "build the model with in_chans=3 or in_chans=1"
        )
    return MODES[channels]


def _orientation(image: Image.Image) -> int:
    if "exif" not in image.info and image.format not in ("TIFF", "MPO", "PNG", "WEBP"):
        return 1  # parsing metadata that is not there would cost more than decoding a small JPEG
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # damaged metadata around sound pixels: as if there were none
        return 1


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
