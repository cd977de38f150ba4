"""What is known of Hugging Face's vision architectures beyond their configuration; their input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from PIL.Image import Resampling
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.layers import to_2tuple

__all__ = ["FAMILIES", "Family", "InputShape", "input_of"]

IMAGENET = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
HALF = ((0.5,) * 3, (0.5,) * 3)


@dataclasses.dataclass(frozen=True)
class Family:
    """What the wrapper knows of one `model_type`.

    Args:
        statistics: mean and std of the published checkpoints, for pixels from 0 to 1; used, as
            `interpolation` and `crop_pct` are, where a checkpoint has no preprocessing file.
        other_sizes: takes images of other sizes than its configuration's, and adapts to them.
        other_frames: the same for the number of frames; joint TimeSformer is asked itself.
        oblong: may be built for images that are not square.
        unused: modules that the classifier never reads. They are dropped: what is attached there,
            or trained, would get no gradient.
        video: takes clips.
    """

    statistics: tuple[tuple[float, ...], tuple[float, ...]]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    other_sizes: bool = False
    other_frames: bool = False
    oblong: bool = False
    unused: tuple[str, ...] = ()
    video: bool = False


FAMILIES = {
    "beit": Family(HALF),
    "clip": Family(
        (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
        unused=("vision_model.post_layernorm",),  # of the pooled token; the head pools the others
    ),
    "deit": Family(IMAGENET, crop_pct=0.875, oblong=True),
    "dinov2": Family(IMAGENET, crop_pct=0.875, other_sizes=True),
    "dinov3_vit": Family(IMAGENET, "bilinear", other_sizes=True, oblong=True),
    "siglip": Family(HALF, unused=("vision_model.head",)),
    "vit": Family(HALF, "bilinear", oblong=True),
    "timesformer": Family(((0.45,) * 3, (0.225,) * 3), "bilinear", video=True),
    "videomae": Family(IMAGENET, "bilinear", oblong=True, video=True),
    # ((2 x - 1) - 0.5) / 0.5: see input_of
    "vivit": Family(((0.75,) * 3, (0.25,) * 3), "bilinear", 0.875, oblong=True, video=True),
    # Rotary in time as well; in space the width of a row is taken from the configuration.
    "vjepa2": Family(
        IMAGENET, "bilinear", 0.875, other_frames=True, unused=("vjepa2.predictor",), video=True
    ),
}


@dataclasses.dataclass(frozen=True)
class InputShape:
    """The sizes in a configuration, under one name each; `frames` is None for images."""

    channels: int
    size: tuple[int, int]
    frames: int | None
    patch: tuple[int, int]
    tubelet: int
    other_sizes: bool
    other_frames: bool

    @classmethod
    def of(cls, config: Any) -> InputShape:
        vision, family = vision_config(config), FAMILIES[config.model_type]

        def first(*names: str) -> Any:
            return next((getattr(vision, n) for n in names if hasattr(vision, n)), None)

        tubelet, patch = first("tubelet_size") or 1, first("patch_size")
        if isinstance(tubelet, list | tuple):  # ViViT
            tubelet, patch = tubelet[0], tubelet[1:]
        return cls(
            channels=first("num_channels", "in_chans"),
            size=to_2tuple(first("image_size", "crop_size")),
            frames=first("num_frames", "frames_per_clip") if family.video else None,
            patch=to_2tuple(patch),
            tubelet=tubelet,
            other_sizes=family.other_sizes,
            # The layers of divided attention count with the configuration's number.
            other_frames=family.other_frames
            or getattr(vision, "attention_type", None) == "joint_space_time",
        )

    def check(self, name: str, frames: int | None, size: Sequence[int], own: Sequence[int]) -> None:
        """Raises ValueError if frames (of clips) of size (height, width) are not for the model.

        What would not divide is refused: the patch embedding drops the rest without a word.

        Args:
            own: the size that is taken as it is, a checkpoint's own: some published ones do not
                divide into patches (SigLIP's 384 px by 14), and their last pixels are not seen.
        """
        (height, width), (rows, columns) = size, self.patch
        if frames != self.frames and not self.other_frames:
            raise ValueError(
                f"{name} takes clips of {self.frames} frames, found {frames}; give it those, or "
                f"build it with model_args num_frames={frames}"
            )
        if (height, width) != self.size and not self.other_sizes:
            raise ValueError(
                f"{name} takes {self.size[0]}x{self.size[1]} px, found {height}x{width} px; give "
                "it those, or build it with another image_size in model_args"
            )
        divides = min(size) > 0 and not (height % rows or width % columns)
        if not divides and (height, width) != tuple(own):
            raise ValueError(
                f"{name} takes patches of {rows}x{columns} px, found {height}x{width} px, which do "
                "not divide"
            )
        if frames is not None and (frames < 1 or frames % self.tubelet):
            raise ValueError(
                f"{name} takes frames in tubelets of {self.tubelet}, found {frames} frames, which "
                "do not divide"
            )


def vision_config(config: Any) -> Any:
    """The part of a configuration that is about the image tower: CLIP's and SigLIP's are nested."""
    return getattr(config, "vision_config", config)


def input_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an image or video processor as timm has them, those that it tells: mean and
    std (of pixels from 0 to 1), interpolation, crop_pct, crop_mode, and as `size` the (height,
    width) it gives.

    transformers computes ((pixel · rescale_factor - offset) - image_mean) / image_std of pixels
    from 0 to 255, where ViViT's offset is 1: its own mean of 0.5 then stands for 0.75 here.
    """
    found: dict[str, Any] = {}
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if settings.get("do_normalize") is False:
        mean, std = 0.0, 1.0
    if mean is not None and std is not None:
        unit, offset = 255.0, 0.0
        if settings.get("do_rescale") is not False:
            unit *= settings.get("rescale_factor", 1 / 255)
            vivit = settings.get("video_processor_type") == "VivitVideoProcessor"
            offset = float(settings.get("offset", vivit))
        found["mean"] = tuple((m + offset) / unit for m in _channels(mean))
        found["std"] = tuple(s / unit for s in _channels(std))
    resample = settings.get("resample")
    if resample in tuple(Resampling):
        found["interpolation"] = Resampling(resample).name.lower()
    return found | _crop(settings)


def _channels(values: Any) -> list[float]:
    return [float(values)] * 3 if isinstance(values, int | float) else [float(v) for v in values]


def _crop(settings: Mapping[str, Any]) -> dict[str, Any]:
    size, crop = (_height_width(settings.get(key)) for key in ("size", "crop_size"))
    if crop and settings.get("do_center_crop", True):
        resized = crop if size is None or settings.get("do_resize") is False else size
        share = min(1.0, min(crop) / min(resized))
        return {"size": crop, "crop_pct": share, "crop_mode": "center"}
    if size is None:
        return {}
    whole = not isinstance(settings["size"], Mapping) or "shortest_edge" not in settings["size"]
    return {"size": size, "crop_pct": 1.0, "crop_mode": "squash" if whole else "center"}


def _height_width(size: Any) -> tuple[int, int] | None:
    edges = {"shortest_edge": size} if isinstance(size, int) else size
    if not isinstance(edges, Mapping):
        return None
    found = [edges.get(key, edges.get("shortest_edge")) for key in ("height", "width")]
    return None if None in found else (int(found[0]), int(found[1]))
