"""Divided attention: over time, then over space (TimeSformer, arXiv 2102.05095)."""

from __future__ import annotations

import copy

import torch
from timm.models.eva import EvaBlock
from torch import Tensor, nn

from mmpreproj.architectures import BLOCKS, Site
from mmpreproj.backbones.video.rope3d import DividedRope

__all__ = ["DividedBlock"]


class DividedBlock(nn.Module):
    """Attention over time, then over space, then the MLP.

    Time: each patch attends to the patches of all frames at its own row and column. Prefix tokens
    (class, registers) take no part, in the method's additions there neither. Space: each frame
    attends within itself, together with the prefix tokens, which are repeated for every frame; what
    the copies receive, the method's skip included, is averaged over the frames.

    The names are those of timm's `EvaBlock`, with `temporal_norm` and `temporal_attn` before them.
    The projection behind time attention starts at zero, where the block is an image model's block.
    Unlike in TimeSformer no further linear layer follows it. Drop path drops a branch of a clip.

    Args:
        block: whose parts become those of space and the MLP; time attention is made like its own.

    Shape: [B, prefix + T · S, D], t slowest -> the same.
    """

    def __init__(self, block: EvaBlock) -> None:
        super().__init__()
        self.num_prefix_tokens = block.attn.num_prefix_tokens
        # In order of execution: preproj_modules follows the order of registration.
        self.temporal_norm = copy.deepcopy(block.norm1)
        self.temporal_attn = copy.deepcopy(block.attn)
        self.temporal_attn.num_prefix_tokens = 0
        self.temporal_drop_path = copy.deepcopy(block.drop_path1)
        for name in ("norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2"):
            setattr(self, name, getattr(block, name))

    def forward(
        self,
        x: Tensor,
        rope: DividedRope,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if isinstance(attn_mask, Tensor) or is_causal is True:  # neither: torch.fx's stand-ins
            raise ValueError("attn_mask and is_causal need attention='joint'")
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
    Site("temporal_attn"),
    Site("attn"),
)
