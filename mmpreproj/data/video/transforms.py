"""From decoded frames to model input: crops and augmentation, the same for every frame of a clip.

Pixels stay 8-bit integers until they are on the model's device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing

try:
    from torchvision.transforms import v2
    from torchvision.transforms.v2 import functional as F
except ImportError as error:
    raise ImportError(
        "clips are cropped and resized by torchvision: pip install 'mmpreproj[train,video]'"
    ) from error

INTERPOLATIONS = ("bilinear", "bicubic")


@dataclasses.dataclass
class VideoAugment:
    """Augmentation of training clips, by torchvision v2; one draw for all frames of a clip."""

    no_aug: bool = False
    """Only resize and crop the centre, as in evaluation."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Area of the random crop, as a part of the frame's."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Aspect ratio (width / height) of the random crop."""
    hflip: float = 0.5
    """Probability of a mirror image. Off where left and right matter."""
    rand_augment: int = 0
    """Operations that RandAugment draws for a clip; 0: off. VideoMAE's recipe has 4."""
    rand_augment_magnitude: int = 9
    """From 0 to 30."""
    re_prob: float = 0.0
    """Random erasing, done on whole batches on the model's device: one box for all frames."""


def resolve_video_config(
    model_config: dict[str, Any],
    num_frames: int | None = None,
    size: int | tuple[int, int] | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
) -> dict[str, Any]:
    """The input configuration in use: the model's, with what was given explicitly in its place.

    Args:
        model_config: input_size (C, T, H, W), or (C, H, W) where num_frames is given; mean, std.
    Returns: plain types (for JSON and YAML): input_size [C, T, H, W], mean, std, interpolation.
    Raises: ValueError for channels that videos do not have, an unknown number of frames, or a mean
        or std of another length.
    """
    channels, *rest = model_config["input_size"]
    if channels not in (1, 3):
        raise ValueError(
            f"the model takes {channels} input channels, but videos are read as 3 (RGB) or 1 (grey)"
        )
    if len(rest) == 2 and num_frames is None:
        raise ValueError(
            f"the model's input, {list(model_config['input_size'])}, does not tell the number of "
            "frames: set num_frames (--data.num_frames)"
        )
    height, width = rest[-2:]
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
    interpolation = interpolation or model_config.get("interpolation") or "bilinear"
    statistics = {}
    for name, given in (("mean", mean), ("std", std)):
        values = [float(v) for v in (model_config[name] if given is None else given)]
        if len(values) not in (1, channels) and given is not None:
            raise ValueError(
                f"{name} has {len(values)} values {values}, but the model takes {channels} channels"
            )
        if len(values) != channels:
            values = [sum(values) / len(values)] * channels
        statistics[name] = values
    return {
        "input_size": [channels, int(num_frames or rest[0]), int(height), int(width)],
        "mean": statistics["mean"],
        "std": statistics["std"],
        # torchvision resizes 8-bit integers in these two
        "interpolation": interpolation if interpolation in INTERPOLATIONS else "bilinear",
    }


def as_tchw(frames: np.ndarray, channels: int = 3) -> torch.Tensor:
    """uint8 [T, H, W, 3] -> uint8 [T, C, H, W], a view (channels last in memory, as torchvision's
    8-bit resize likes it), or grey (ITU-R 601 luma)."""
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return clip if channels == 3 else F.rgb_to_grayscale(clip)


class TrainClip:
    """Frames uint8 [T, H, W, 3] -> one augmented clip, uint8 [C, T, h, w].

    Random numbers come from torch's default generator.
    """

    def __init__(self, config: dict[str, Any], augment: VideoAugment):
        self.channels, _, *self.size = config["input_size"]
        interpolation = v2.InterpolationMode(config["interpolation"])
        self.centre = EvalClips(config) if augment.no_aug else None
        steps: list[Callable] = [
            v2.RandomResizedCrop(self.size, augment.scale, augment.ratio, interpolation)
        ]
        if augment.hflip > 0:
            steps.append(v2.RandomHorizontalFlip(augment.hflip))
        if augment.rand_augment > 0:
            fill = [round(255 * value) for value in config["mean"]]
            steps.append(
                v2.RandAugment(
                    augment.rand_augment,
                    augment.rand_augment_magnitude,
                    interpolation=v2.InterpolationMode.BILINEAR,
                    fill=fill,
                )
            )
        self.steps = steps

    def __call__(self, frames: np.ndarray) -> torch.Tensor:
        if self.centre is not None:
            return self.centre(frames[None])[0]
        clip = as_tchw(frames, self.channels)
        for step in self.steps:
            clip = step(clip)
        return clip.transpose(0, 1).contiguous()


class EvalClips:
    """Frames uint8 [V, T, H, W, 3] -> all views, uint8 [V * S, C, T, h, w].

    The frame is resized, its ratio kept, until it just covers the model's size (or `short_side`
    times that, as a ratio to the model's shorter side). Of its two sides, the one with more to
    spare is cut S times, at offsets s * spare // (S - 1) (S = 1: spare // 2); the other in the
    middle. View v, crop s is row v * S + s.
    """

    def __init__(self, config: dict[str, Any], crops: int = 1, short_side: int | None = None):
        self.channels, _, *self.size = config["input_size"]
        self.interpolation = v2.InterpolationMode(config["interpolation"])
        self.crops = crops
        self.short_side = short_side or min(self.size)
        if self.short_side < min(self.size):
            raise ValueError(
                f"short_side ({short_side}) must not be below the model's input size {self.size}"
            )

    def __call__(self, frames: np.ndarray) -> torch.Tensor:
        views, n, height, width, _ = frames.shape
        clip = as_tchw(frames.reshape(views * n, height, width, 3), self.channels)
        height, width = self.resized(height, width)
        if clip.shape[-2:] != (height, width):
            clip = F.resize(clip, [height, width], self.interpolation, antialias=True)
        tall, wide = self.size
        out = torch.empty(views, self.crops, self.channels, n, tall, wide, dtype=torch.uint8)
        for s, (top, left) in enumerate(self.corners(height, width)):
            crop = clip[:, :, top : top + tall, left : left + wide]
            out[:, s] = crop.unflatten(0, (views, n)).transpose(1, 2)
        return out.flatten(0, 1)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Size after resizing, rounded half up and never below the crop."""
        tall, wide = self.size
        zoom = max(tall / height, wide / width) * self.short_side / min(self.size)
        return (
            max(math.floor(height * zoom + 0.5), tall),
            max(math.floor(width * zoom + 0.5), wide),
        )

    def corners(self, height: int, width: int) -> list[tuple[int, int]]:
        """(top, left) of each crop of a resized frame."""
        spare = (height - self.size[0], width - self.size[1])
        along = 0 if spare[0] > spare[1] else 1
        corners = []
        for s in range(self.crops):
            corner = [spare[0] // 2, spare[1] // 2]
            if self.crops > 1:
                corner[along] = s * spare[along] // (self.crops - 1)
            corners.append((corner[0], corner[1]))
        return corners


def erase(clips: torch.Tensor, probability: float) -> torch.Tensor:
    """Random erasing of float clips [B, C, T, H, W]: in a clip the same box in all frames."""
    erasing = RandomErasing(probability, mode="pixel", device=clips.device)
    return erasing(clips.flatten(1, 2)).view_as(clips)
