"""The parts of a video transformer that timm does not have: tubelets, and divided attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from timm.layers import AttentionRope, DropPath, LayerNorm, Mlp
from torch import Tensor, nn

from mmpreproj.architectures import BLOCKS, SiteRule


class TubeletEmbed(nn.Module):
    """Clips to tokens: a Conv3d whose stride is its kernel.

    Shape: [B, C, T, H, W] -> [B, T / tubelet, H / patch, W / patch, D].

    Args:
        tubelet_size: frames in a tubelet.
        patch_size: height and width of a tubelet in pixels.
        pad: what to do with a clip that does not divide into tubelets. False: refuse it. True: the
            last frame is repeated, then zeros (the mean colour, after normalisation) are added at
            the bottom and at the right.
    """

    def __init__(
        self,
        tubelet_size: int,
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        pad: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.tubelet_size = tubelet_size
        self.patch_size = patch_size
        self.pad = pad
        kernel = (tubelet_size, *patch_size)
        self.proj = nn.Conv3d(in_chans, embed_dim, kernel, stride=kernel, **factory)

    def check(self, frames: int, height: int, width: int) -> None:
        """Raises ValueError, with both numbers, if a clip does not divide into tubelets."""
        units = (self.tubelet_size, *self.patch_size)
        for name, size, unit in zip(
            ("frames", "rows", "columns"), (frames, height, width), units, strict=True
        ):
            if size < 1 or (size % unit and not self.pad):
                near = [count for count in (size - size % unit, size + unit - size % unit) if count]
                raise ValueError(
                    f"a clip of {size} {name} does not divide into tubelets of {unit} {name}; use "
                    f"{' or '.join(map(str, near))}, or build the model with pad=True"
                )

    def forward(self, clips: Tensor) -> Tensor:
        if clips.ndim != 5 or clips.shape[1] != self.proj.in_channels:
            raise ValueError(
                f"the model takes clips [B, {self.proj.in_channels}, T, H, W], found "
                f"{list(clips.shape)}"
            )
        frames, height, width = clips.shape[2:]
        self.check(frames, height, width)
        if self.pad:
            more_frames, rows, columns = (
                -size % unit
                for size, unit in zip(
                    (frames, height, width), (self.tubelet_size, *self.patch_size), strict=True
                )
            )
            if more_frames:
                last = clips[:, :, -1:].expand(-1, -1, more_frames, -1, -1)
                clips = torch.cat([clips, last], dim=2)
            if rows or columns:
                clips = nn.functional.pad(clips, (0, columns, 0, rows))
        return self.proj(clips).permute(0, 2, 3, 4, 1)


class DividedRope(NamedTuple):
    """What a divided block needs to know of the grid: its frames and the two rotary tables."""

    frames: int
    space: Tensor
    time: Tensor | None


class DividedBlock(nn.Module):
    """Attention over time, then over space, then the MLP (TimeSformer, arXiv 2102.05095).

    Time: each patch attends to the patches of all frames at its own row and column. The class token
    takes no part, in the method's additions there neither. Space: each frame attends within itself,
    together with the class token, which is repeated for every frame; what the copies receive, the
    method's skip included, is averaged over the frames.

    The names are those of timm's `EvaBlock`, with `temporal_norm` and `temporal_attn` before them.
    The projection behind time attention starts at zero, where the block is an image model's block.
    Unlike in TimeSformer no further linear layer follows it. Drop path drops a branch of a clip.

    Shape: [B, prefix + T · S, D], t slowest -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        num_prefix_tokens: int = 1,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_layer: type[nn.Module] = LayerNorm,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        drops = {"attn_drop": attn_drop, "proj_drop": proj_drop}

        def attention(prefix: int) -> AttentionRope:
            return AttentionRope(dim, num_heads, num_prefix_tokens=prefix, **drops, **factory)

        def dropped() -> nn.Module:
            return DropPath(drop_path) if drop_path > 0 else nn.Identity()

        # In order of execution: preproj_modules follows the order of registration.
        self.temporal_norm = norm_layer(dim, **factory)
        self.temporal_attn = attention(0)
        self.temporal_drop_path = dropped()
        self.norm1 = norm_layer(dim, **factory)
        self.attn = attention(num_prefix_tokens)
        self.drop_path1 = dropped()
        self.norm2 = norm_layer(dim, **factory)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, **factory)
        self.drop_path2 = dropped()

    def forward(self, x: Tensor, rope: DividedRope) -> Tensor:
        prefix, patches = x.tensor_split((self.num_prefix_tokens,), dim=1)
        patches = patches + self.temporal_drop_path(self._over_time(patches, rope))
        x = torch.cat([prefix, patches], dim=1)
        x = x + self.drop_path1(self._over_space(x, rope))
        return x + self.drop_path2(self.mlp(self.norm2(x)))

    def _over_time(self, patches: Tensor, rope: DividedRope) -> Tensor:
        batch, tokens, dim = patches.shape
        space = tokens // rope.frames
        folded = self.temporal_norm(patches).reshape(batch, rope.frames, space, dim)
        folded = folded.transpose(1, 2).reshape(batch * space, rope.frames, dim)
        branch = self.temporal_attn(folded, rope=rope.time)
        return branch.reshape(batch, space, rope.frames, dim).transpose(1, 2).flatten(1, 2)

    def _over_space(self, x: Tensor, rope: DividedRope) -> Tensor:
        batch, _, dim = x.shape
        prefix, patches = self.norm1(x).tensor_split((self.num_prefix_tokens,), dim=1)
        frames = patches.reshape(batch * rope.frames, -1, dim)
        repeated = prefix.repeat_interleave(rope.frames, dim=0)
        branch = self.attn(torch.cat([repeated, frames], dim=1), rope=rope.space)
        branch = branch.reshape(batch, rope.frames, -1, dim)
        prefix, patches = branch.tensor_split((self.num_prefix_tokens,), dim=2)
        return torch.cat([prefix.mean(1), patches.flatten(1, 2)], dim=1)


BLOCKS[f"{DividedBlock.__module__}.{DividedBlock.__qualname__}"] = (
    SiteRule("temporal_attn"),
    SiteRule("attn"),
)
