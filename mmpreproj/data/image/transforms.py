"""From PIL image to model input: timm's transforms, and where pixels are normalised."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from PIL import Image
from timm.data import create_transform

from mmpreproj.data.image.files import mode_of, to_channels
from mmpreproj.data.pixels import normalize


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


def resolve_data_config(
    model_config: dict[str, Any],
    img_size: int | tuple[int, int] | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    crop_pct: float | None = None,
    crop_mode: str | None = None,
    interpolation: str | None = None,
) -> dict[str, Any]:
    """The input configuration in use: the model's, with what was given explicitly in its place.

    A model's RGB mean and std are averaged for a grey model, as timm does. Returns plain types (for
    JSON and YAML).
    Raises: ValueError for channels that image files do not have, or a mean or std of another
    length.
    """
    channels, height, width = model_config["input_size"]
    mode_of(channels)
    if img_size is not None:
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    statistics = {}
    for name, given in (("mean", mean), ("std", std)):
        values = [float(v) for v in (model_config[name] if given is None else given)]
        if len(values) != channels and given is not None and len(values) != 1:
            raise ValueError(
                f"{name} has {len(values)} values {values}, but the model takes {channels} channels"
            )
        if len(values) != channels:
            values = [sum(values) / len(values)] * channels
        statistics[name] = values
    return {
        "input_size": [channels, int(height), int(width)],
        "interpolation": interpolation or model_config["interpolation"],
        "mean": statistics["mean"],
        "std": statistics["std"],
        "crop_pct": float(crop_pct or model_config["crop_pct"]),
        "crop_mode": crop_mode or model_config["crop_mode"],
    }


def train_transform(
    config: dict[str, Any], augment: AugmentConfig
) -> Callable[[Image.Image], torch.Tensor]:
    """PIL image -> augmented uint8 [C, H, W]; random erasing is left to the batch."""
    keywords = dataclasses.asdict(augment)
    for name in ("re_prob", "re_mode", "re_count"):
        del keywords[name]
    return create_transform(
        config["input_size"],
        is_training=True,
        use_prefetcher=True,
        mean=tuple(config["mean"]),
        **keywords,
    )


def pixel_transform(config: dict[str, Any]) -> Callable[[Image.Image], torch.Tensor]:
    """PIL image -> uint8 [C, H, W], resized and cropped for evaluation."""
    return create_transform(
        config["input_size"],
        use_prefetcher=True,
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
    )


class EvalTransform:
    """PIL image of any kind -> normalised float32 [C, H, W], just as in evaluation."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.pixels = pixel_transform(config)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return normalize(self.pixels(to_channels(image, self.config["input_size"][0])), self.config)
