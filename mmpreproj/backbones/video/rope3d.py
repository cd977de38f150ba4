"""Axial rotary positions for clips, by timm's rotary code.

A head of size `head_dim` has P = head_dim // 2 pairs (x[2i], x[2i+1]). Each pair turns with one
axis, by coordinate times band; coordinates are the indices of the token in its grid, from 0. With
h = P // 2 and the bands b_i = temperature^(-i / h) of timm's image models, the pairs are split so:

    axes "yx"   x turns pairs 0 … h-1, y turns pairs h … 2h-1, each by b_0 … b_(h-1):
                the table of timm's vit_*_patch16_rope_224 (and of vit_preproj_*)
    axes "tyx"  n = head_dim // 6 pairs an axis, each axis by the fastest bands b_0 … b_(n-1):
                x keeps its pairs 0 … n-1 and y its pairs h … h+n-1; t takes the first n of those
                that x and y left (n … h-1, then h+n …); the other P - 3n pairs stay unrotated
    axes "t"    t turns all P pairs, by temperature^(-i / P)

For head_dim 64: "yx" is 16 + 16 pairs; "tyx" is x 0-9, y 16-25, t 10-15 and 26-29, and 30 and 31
unrotated. So what x and y turn is as in the image model, and time takes the image model's slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import build_fourier_pos_embed, register_notrace_module
from torch import Tensor, nn

__all__ = ["DividedRope", "RotaryTables", "rotary_table"]

KEPT_TABLES = 16


def rotary_table(
    grid: Sequence[int],
    head_dim: int,
    axes: str = "tyx",
    temperature: float = 100.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The sines and cosines of a grid of tokens, as timm's `apply_rot_embed_cat` takes them.

    Everything is computed in `dtype`, in float32 by the same operations as timm's image models.

    Args:
        grid: the number of tokens along each axis of `axes`, in that order; t slowest, x fastest.
        axes: "tyx", "yx" or "t".

    Shape: [N, 2 · head_dim], N the product of the grid; sines first, each value twice in a row.
    """
    assert axes in ("tyx", "yx", "t") and len(grid) == len(axes), (grid, axes)
    pairs = head_dim // 2
    half = pairs // 2
    count, period = {"tyx": (pairs // 3, half), "yx": (half, half), "t": (pairs, pairs)}[axes]
    exponents = torch.arange(count, device=device).to(dtype) / period
    bands = 1.0 / temperature**exponents
    sin, cos = build_fourier_pos_embed(
        list(grid), bands=bands, in_pixels=False, grid_indexing="ij", device=device, dtype=dtype
    )
    table = torch.cat([_by_pairs(sin, axes, pairs, 0.0), _by_pairs(cos, axes, pairs, 1.0)], -1)
    return table.repeat_interleave(2, -1)


def _by_pairs(values: Tensor, axes: str, pairs: int, unrotated: float) -> Tensor:
    """[*grid, axes, bands] -> [N, pairs]: the values by pair, `unrotated` where no axis turns."""
    by_axis = values.flatten(0, -3)  # [N, axes, bands]
    if axes == "t":
        parts = [by_axis[:, 0]]
    elif axes == "yx":
        parts = [by_axis[:, 1], by_axis[:, 0]]
    else:
        t, y, x = by_axis.unbind(1)
        left_of_x = pairs // 2 - x.shape[1]
        parts = [x, t[:, :left_of_x], y, t[:, left_of_x:]]
    found = torch.cat(parts, -1)
    rest = found.new_full((found.shape[0], pairs - found.shape[1]), unrotated)
    return torch.cat([found, rest], -1)


class DividedRope(NamedTuple):
    """What a divided block needs to know of the grid: its frames and the two rotary tables."""

    frames: int
    space: Tensor
    time: Tensor | None


@register_notrace_module
class RotaryTables(nn.Module):
    """Tables for whatever grid comes, the last few of them kept.

    Within torch.compile, export and trace a table is part of the graph, so that nothing is kept
    there and a change of grid is no more than a change of shape.
    """

    def __init__(self, head_dim: int, temperature: float) -> None:
        super().__init__()
        if head_dim % 2 or head_dim < 6:  # a pair for each axis
            raise ValueError(
                f"a head of {head_dim} cannot be rotated by three axes: embed_dim / num_heads must "
                "be even, and 6 or more"
            )
        self.head_dim = head_dim
        self.temperature = temperature
        self.kept: dict[tuple[Any, ...], Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kept": {}}

    def forward(self, x: Tensor, divided: bool, time: bool) -> Tensor | DividedRope:
        """The rotation of tokens [B, T, H, W, D], by one table of [T · H · W, 2 · head_dim] or two.

        Args:
            divided: for attention over time, then over space.
            time: whether time rotates.
        """
        frames, *space = (int(size) if torch.jit.is_tracing() else size for size in x.shape[1:4])
        if divided:
            by_time = self.get([frames], "t", like=x) if time else None
            return DividedRope(frames, self.get(space, "yx", like=x), by_time)
        if time:
            return self.get([frames, *space], "tyx", like=x)
        return self.get(space, "yx", like=x).repeat(frames, 1)

    def get(self, grid: Sequence[int], axes: str, like: Tensor) -> Tensor:
        """The table of `rotary_table` on the device of `like`.

        float32 for models of lower precision too: timm rotates in float32 and then rounds.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        in_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if in_graph or type(like) is not Tensor:  # such as a fake tensor
            return rotary_table(grid, self.head_dim, axes, self.temperature, like.device, dtype)
        key = (*grid, axes, like.device, dtype)
        if key not in self.kept:
            # A table made in a validation pass must serve in training as well.
            with torch.inference_mode(False), torch.no_grad():
                table = rotary_table(grid, self.head_dim, axes, self.temperature, dtype=dtype)
                table = table.to(like.device)
            while len(self.kept) >= KEPT_TABLES:
                self.kept.pop(next(iter(self.kept)), None)
            self.kept[key] = table
        return self.kept[key]
