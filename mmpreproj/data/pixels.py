"""8-bit pixels to the model's numbers, on the device they are on."""

import functools
from typing import Any

import torch


def normalize(pixels: torch.Tensor, config: dict[str, Any], dims: int = 2) -> torch.Tensor:
    """uint8 [..., C, H, W] -> a new float32 tensor, (pixels / 255 - mean) / std.

    Args:
        config: mean and std, one value a channel.
        dims: dimensions behind the channel: 2 of images, 3 of clips [..., C, T, H, W].
    """
    mean, std = _statistics(tuple(config["mean"]), tuple(config["std"]), dims, pixels.device)
    return pixels.float().sub_(mean).div_(std)


@functools.lru_cache(maxsize=8)
def _statistics(
    mean: tuple, std: tuple, dims: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and std of 8-bit values, float32 [C, 1, …]; kept, as a copy to the device is a wait."""
    shape = (-1, *[1] * dims)
    with torch.inference_mode(False):  # else what validation made would be unusable in training
        return tuple(
            torch.tensor(values, device=device).mul_(255).view(shape) for values in (mean, std)
        )
