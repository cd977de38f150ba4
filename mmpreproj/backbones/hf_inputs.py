"""What a Hugging Face vision model is to be fed, in timm's words, from its preprocessing file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What transformers writes. In the last, several processors stand beside each other.
PREPROCESSOR_FILES = (
    "video_preprocessor_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
# PIL's numbers
_RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


def read_preprocessor(path: Path) -> dict[str, Any]:
    """The image or video processor's settings in one of PREPROCESSOR_FILES.

    Raises:
        ValueError: if it is not a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} should hold a JSON object, it holds {type(found).__name__}")
    if path.name == "processor_config.json":
        return found.get("video_processor") or found.get("image_processor") or {}
    return found


def input_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A processor's settings as timm has them, those that it tells: mean and std (of pixels from 0
    to 1), interpolation, crop_pct, crop_mode, and as `size` the (height, width) it gives.

    transformers computes ((pixel · rescale_factor - offset) - image_mean) / image_std of pixels
    from 0 to 255, where ViViT's offset is 1: its own mean of 0.5 then stands for 0.75 here.
    """
    found: dict[str, Any] = {}
    kind = str(settings.get("video_processor_type") or settings.get("image_processor_type") or "")
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if settings.get("do_normalize") is False:
        mean, std = [0.0] * 3, [1.0] * 3
    if mean and std:
        unit, offset = 1.0, 0.0
        if settings.get("do_rescale") is False:
            unit = 255.0
        else:
            unit = 255.0 * settings.get("rescale_factor", 1 / 255)
            offset = 1.0 if settings.get("offset", kind == "VivitVideoProcessor") else 0.0
        found["mean"] = tuple((m + offset) / unit for m in _channels(mean))
        found["std"] = tuple(s / unit for s in _channels(std))
    resample = settings.get("resample")
    if isinstance(resample, int) and 0 <= resample < len(_RESAMPLING):
        found["interpolation"] = _RESAMPLING[resample]
    return found | _crop(settings)


def _channels(values: Any) -> list[float]:
    return [float(values)] * 3 if isinstance(values, int | float) else [float(v) for v in values]


def _crop(settings: Mapping[str, Any]) -> dict[str, Any]:
    size, crop = settings.get("size"), settings.get("crop_size")
    cropped = bool(settings.get("do_center_crop", crop is not None)) and crop is not None
    if not cropped:
        square = _height_width(size)
        if square is None:
            return {}
        if isinstance(size, Mapping) and "shortest_edge" in size:
            return {"size": square, "crop_pct": 1.0, "crop_mode": "center"}
        return {"size": square, "crop_pct": 1.0, "crop_mode": "squash"}  # the ratio is not kept
    taken, resized = _height_width(crop), _height_width(size)
    if taken is None:
        return {}
    if resized is None or settings.get("do_resize") is False:
        resized = taken
    return {
        "size": taken,
        "crop_pct": min(1.0, min(taken) / min(resized)),
        "crop_mode": "center",
    }


def _height_width(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping):
        if "height" in size and "width" in size:
            return int(size["height"]), int(size["width"])
        if "shortest_edge" in size:
            return int(size["shortest_edge"]), int(size["shortest_edge"])
    return None
