"""From the frames of a video to a clip: which ones, then crops and augmentation, one for all.

Which frames is a matter of numbers only, in whole-number arithmetic:

dense:   T frames, `stride` apart, from one place of the video (SlowFast, arXiv 1812.03982).
uniform: one frame from each of T equal segments of the whole video (TSN, arXiv 1608.00859).

In training places are drawn at random. In testing a video gives V temporal views, places that
follow from the number of frames alone.

Videos shorter than a dense clip's span, (T - 1) * stride + 1 frames, are padded by one rule:
"repeat" (the last frame again and again) or "loop" (from the first frame again). All test views of
such a video are the same clip; of a video with s spare frames at most s + 1 dense views differ.
Uniform clips need no padding: with fewer frames than segments, some frames come several times in a
row.

Pixels stay 8-bit integers until they are on the model's device.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from mmpreproj.data.video.decode import Decoder, read_frames
from mmpreproj.data.vision import normalize

__all__ = ["ClipReader", "ClipsOfFile", "EvalClips", "Padding", "Sampling", "TrainClip"]
__all__ += ["VideoAugment", "dense", "dense_train", "dense_views", "segments", "span"]
__all__ += ["uniform_train", "uniform_views"]

Sampling = Literal["dense", "uniform"]
Padding = Literal["repeat", "loop"]


def span(num_frames: int, stride: int) -> int:
    """Frames of video that a dense clip reaches over, first and last included."""
    return (num_frames - 1) * stride + 1


def dense(
    n_frames: int, num_frames: int, stride: int, start: int, padding: Padding = "repeat"
) -> list[int]:
    """Frame numbers start, start + stride, …; beyond the last frame by the padding rule.

    Raises: ValueError for an empty video, or a start outside it.
    """
    _check(n_frames, num_frames, stride)
    if not 0 <= start < n_frames:
        raise ValueError(f"a clip cannot start at frame {start} of {n_frames}")
    numbers = range(start, start + span(num_frames, stride), stride)
    if padding == "repeat":
        return [min(i, n_frames - 1) for i in numbers]
    if padding == "loop":
        return [i % n_frames for i in numbers]
    raise ValueError(f"padding is 'repeat' or 'loop', got {padding!r}")


def dense_train(
    n_frames: int,
    num_frames: int,
    stride: int,
    padding: Padding = "repeat",
    generator: torch.Generator | None = None,
) -> list[int]:
    """A dense clip from a random start: each of 0 … max(n_frames - span, 0) equally likely."""
    spare = max(n_frames - span(num_frames, stride), 0)
    return dense(n_frames, num_frames, stride, _randint(spare + 1, generator), padding)


def dense_views(
    n_frames: int, num_frames: int, stride: int, views: int = 1, padding: Padding = "repeat"
) -> list[list[int]]:
    """V dense clips, starts spread evenly over what is spare; a single one is central.

    With s = max(n_frames - span, 0), view v starts at v s // (V - 1), so the first at the first
    frame and the last with the last frame in it; for V = 1 at s // 2.
    """
    _check(n_frames, num_frames, stride, views)
    spare = max(n_frames - span(num_frames, stride), 0)
    starts = [v * spare // (views - 1) for v in range(views)] if views > 1 else [spare // 2]
    return [dense(n_frames, num_frames, stride, start, padding) for start in starts]


def segments(n_frames: int, num_frames: int) -> list[tuple[int, int]]:
    """T segments, (first frame, number of frames): segment k is k n // T … (k + 1) n // T - 1.

    With n < T a segment that would be empty is the one frame k n // T.
    """
    _check(n_frames, num_frames)
    bounds = [k * n_frames // num_frames for k in range(num_frames + 1)]
    return [(a, max(b - a, 1)) for a, b in zip(bounds, bounds[1:], strict=False)]


def uniform_train(
    n_frames: int, num_frames: int, generator: torch.Generator | None = None
) -> list[int]:
    """One frame drawn from each segment, each of its frames equally likely."""
    return [a + _randint(size, generator) for a, size in segments(n_frames, num_frames)]


def uniform_views(n_frames: int, num_frames: int, views: int = 1) -> list[list[int]]:
    """V clips: view v takes frame (2 v + 1) size // (2 V) of each segment, for V = 1 its middle."""
    _check(n_frames, num_frames, views=views)
    parts = segments(n_frames, num_frames)
    return [[a + (2 * v + 1) * size // (2 * views) for a, size in parts] for v in range(views)]


def _check(n_frames: int, num_frames: int, stride: int = 1, views: int = 1) -> None:
    if n_frames < 1:
        raise ValueError(f"a video has 1 frame or more, got {n_frames}")
    if num_frames < 1 or stride < 1 or views < 1:
        raise ValueError(
            f"num_frames, stride and views must be 1 or more, got {num_frames}, {stride}, {views}"
        )


def _randint(n: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(n, (), generator=generator))


@dataclasses.dataclass(frozen=True)
class ClipReader:
    """Reads the frames of a clip from a file, once it is known how many frames that has.

    num_frames, stride, views and padding are T, the step of dense clips, V and the rule above.
    """

    sampling: Sampling
    num_frames: int
    stride: int
    padding: Padding = "repeat"
    views: int = 1
    decoder: Decoder = "auto"
    threads: int = 1

    def train(self, path: str | os.PathLike) -> np.ndarray:
        """uint8 [T, H, W, 3], places drawn from torch's default generator."""
        return read_frames(path, self._drawn, self.decoder, self.threads)

    def test(self, path: str | os.PathLike) -> np.ndarray:
        """uint8 [V, T, H, W, 3]."""
        frames = read_frames(path, self._spread, self.decoder, self.threads)
        return frames.reshape(self.views, -1, *frames.shape[1:])

    def _drawn(self, n_frames: int) -> list[int]:
        if self.sampling == "uniform":
            return uniform_train(n_frames, self.num_frames)
        return dense_train(n_frames, self.num_frames, self.stride, self.padding)

    def _spread(self, n_frames: int) -> list[int]:
        if self.sampling == "uniform":
            views = uniform_views(n_frames, self.num_frames, self.views)
        else:
            views = dense_views(n_frames, self.num_frames, self.stride, self.views, self.padding)
        return [number for view in views for number in view]


# Crops and augmentation


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


def as_tchw(frames: np.ndarray, channels: int = 3) -> torch.Tensor:
    """uint8 [T, H, W, 3] -> uint8 [T, C, H, W], a view (channels last in memory, as torchvision's
    8-bit resize likes it), or grey (ITU-R 601 luma)."""
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2)
    return clip if channels == 3 else F.rgb_to_grayscale(clip)


class TrainClip:
    """Frames uint8 [T, H, W, 3] -> one augmented clip, uint8 [C, T, h, w].

    Random numbers come from torch's default generator.
    """

    def __init__(self, config: Mapping[str, Any], augment: VideoAugment):
        self.channels, _, *self.size = config["input_size"]
        interpolation = v2.InterpolationMode(config["interpolation"])
        self.centre = EvalClips(config) if augment.no_aug else None
        crop = v2.RandomResizedCrop(self.size, augment.scale, augment.ratio, interpolation)
        steps: list[v2.Transform] = [crop]
        if augment.hflip > 0:
            steps.append(v2.RandomHorizontalFlip(augment.hflip))
        if augment.rand_augment > 0:
            how = {
                "interpolation": v2.InterpolationMode.BILINEAR,
                "fill": [round(255 * value) for value in config["mean"]],
            }
            n, magnitude = augment.rand_augment, augment.rand_augment_magnitude
            steps.append(v2.RandAugment(n, magnitude, **how))
        self.steps = v2.Compose(steps)

    def __call__(self, frames: np.ndarray) -> torch.Tensor:
        if self.centre is not None:
            return self.centre(frames[None])[0]
        return self.steps(as_tchw(frames, self.channels)).transpose(0, 1).contiguous()


class EvalClips:
    """Frames uint8 [V, T, H, W, 3] -> all views, uint8 [V * S, C, T, h, w].

    The frame is resized, its ratio kept, until it just covers the model's size (or `short_side`
    times that, as a ratio to the model's shorter side). Of its two sides, the one with more to
    spare is cut S times, at offsets s * spare // (S - 1) (S = 1: spare // 2); the other in the
    middle. View v, crop s is row v * S + s.
    """

    def __init__(self, config: Mapping[str, Any], crops: int = 1, short_side: int | None = None):
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


@dataclasses.dataclass
class ClipsOfFile:
    """Path of a video -> normalised float32 [V * S, C, T, H, W], just as in testing."""

    config: Mapping[str, Any]
    reader: ClipReader
    transform: EvalClips

    def frames(self, path: str | os.PathLike) -> np.ndarray:
        """The sampled frames as they are in the file, upright: uint8 [V, T, H, W, 3]."""
        return self.reader.test(path)

    def of_frames(self, frames: np.ndarray) -> torch.Tensor:
        """What `frames` gave -> normalised float32 [V * S, C, T, H, W]."""
        return normalize(self.transform(frames), self.config)

    def __call__(self, path: str | os.PathLike) -> torch.Tensor:
        return self.of_frames(self.frames(path))
