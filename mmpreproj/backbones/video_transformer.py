"""The video transformer behind `video_vit_preproj_*` (`mmpreproj.backbones.video`)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import (
    LayerNorm,
    PatchDropoutWithIndices,
    apply_keep_indices_nlc,
    calculate_drop_path_rates,
    get_device_dtype,
    global_pool_nlc,
    to_2tuple,
    trunc_normal_,
)
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models._manipulate import checkpoint
from timm.models.eva import EvaBlock
from torch import Tensor, nn

from mmpreproj.attach import attach, preproj_modules
from mmpreproj.backbones.inflate import from_image_model
from mmpreproj.backbones.rope3d import RotaryTables
from mmpreproj.backbones.video_blocks import DividedBlock, DividedRope, TubeletEmbed
from mmpreproj.preproj import PreProjConfig

__all__ = ["PreProjVideoTransformer"]

# Names that timm's feature wrapper uses for maps, and what they are for a clip.
FEATURE_FORMATS = {"NCHW": "NCTHW", "NHWC": "NTHWC"}


class PreProjVideoTransformer(nn.Module):
    """A video transformer, with the method in its blocks.

    With `pre_projection=False, content_skip=False` it is the plain transformer: the same class,
    blocks and base parameters.

    Args:
        img_size, num_frames: the size of clips the model is meant for. It takes any other as well.
        tubelet_size, patch_size: frames, and pixels, of a tubelet.
        pad: pad clips that do not divide into tubelets (`TubeletEmbed` says how), else refuse them.
        global_pool: "token" (the class token), "avg" (all others), or "" (none).
        class_token: add a class token. It is never rotated.
        attention: "joint", or "divided" (time, then space; two self-attentions a block).
        rope_time: whether time rotates. False, with "joint", leaves the order of tubelets unseen.
        patch_drop_rate: for joint attention alone, as divided attention needs the whole grid.
        image_weights: file of an image model's weights to start from.
        expansion, pre_projection, content_skip, layers, init_std, skip_rank: see `PreProjConfig`.

    Shape: clips [B, C, T, H, W] -> logits [B, num_classes].
    Raises: ValueError naming what does not go together; in forward, what does not divide.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        num_frames: int = 16,
        patch_size: int | tuple[int, int] = 16,
        tubelet_size: int = 2,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        class_token: bool = True,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        attention: str = "joint",
        rope_time: bool = True,
        rope_temperature: float = 100.0,
        pad: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: type[nn.Module] = LayerNorm,
        head_init_scale: float = 0.001,
        image_weights: str | os.PathLike | None = None,
        expansion: float = 1.25,
        pre_projection: bool = True,
        content_skip: bool = True,
        layers: Sequence[int] | None = None,
        init_std: float = 0.0,
        skip_rank: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = PreProjConfig(
            expansion=expansion,
            pre_projection=pre_projection,
            content_skip=content_skip,
            layers=layers,
            init_std=init_std,
            skip_rank=skip_rank,
        )
        super().__init__()
        if attention not in ("joint", "divided"):
            raise ValueError(f"attention must be 'joint' or 'divided', found {attention!r}")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} does not divide into num_heads={num_heads}")
        if attention == "divided" and patch_drop_rate:
            raise ValueError(
                f"patch_drop_rate={patch_drop_rate} needs attention='joint': divided attention "
                "needs every patch of every frame"
            )
        _check_pool(global_pool, class_token)
        factory = {"device": device, "dtype": dtype}
        self.img_size = to_2tuple(img_size)
        self.num_frames = num_frames
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = int(class_token)
        self.mlp_ratio = mlp_ratio
        self.attention = attention
        self.rope_time = rope_time
        self.head_init_scale = head_init_scale
        self.grad_checkpointing = False

        self.patch_embed = TubeletEmbed(
            tubelet_size, to_2tuple(patch_size), in_chans, embed_dim, pad, **factory
        )
        self.patch_embed.check(num_frames, *self.img_size)
        self.cls_token = (
            nn.Parameter(torch.empty(1, 1, embed_dim, **factory)) if class_token else None
        )
        self.rope = RotaryTables(embed_dim // num_heads, rope_temperature)
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.patch_drop = (
            PatchDropoutWithIndices(patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens)
            if patch_drop_rate
            else None
        )
        # EvaBlock's defaults: biases in q, k and v, no LayerScale.
        block = DividedBlock if attention == "divided" else EvaBlock
        attn_type = {} if attention == "divided" else {"attn_type": "rope"}
        self.blocks = nn.ModuleList(
            block(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                num_prefix_tokens=self.num_prefix_tokens,
                attn_drop=attn_drop_rate,
                proj_drop=proj_drop_rate,
                drop_path=rate,
                norm_layer=norm_layer,
                **attn_type,
                **factory,
            )
            for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        reduction = max(self.patch_embed.patch_size)
        self.feature_info = [
            {"module": f"blocks.{index}", "num_chs": embed_dim, "reduction": reduction}
            for index in range(depth)
        ]
        self.norm = norm_layer(embed_dim, **factory)  # before pooling, whatever the pooling
        self.head_drop = nn.Dropout(drop_rate)
        self.head = _head(embed_dim, num_classes, **factory)
        self.init_weights(needs_reset=False)
        if config.enabled:
            attach(self, config)
        if image_weights is not None:
            from_image_model(self, image_weights)

    def init_weights(self, needs_reset: bool = True) -> None:
        """Draw every parameter as timm's rotary ViTs do; time attention's output starts at zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif needs_reset and hasattr(module, "reset_parameters"):
                module.reset_parameters()
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)
        with torch.no_grad():
            for index, block in enumerate(self.blocks):
                scale = math.sqrt(2.0 * (index + 1))
                block.attn.proj.weight.div_(scale)
                block.mlp.fc2.weight.div_(scale)
                if self.attention == "divided":
                    block.temporal_attn.proj.weight.zero_()
            if isinstance(self.head, nn.Linear):
                self.head.weight.mul_(self.head_init_scale)
        for module in preproj_modules(self).values():  # after everything that draws linear layers
            module.reset_parameters()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Parameters to exclude from weight decay."""
        return {"cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters make one layer of layer-wise learning rates."""
        return {
            "stem": r"^cls_token|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the inputs of blocks in training, and compute the rest again."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head, on the model's device and in its dtype."""
        if global_pool is not None:
            _check_pool(global_pool, self.cls_token is not None)
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = _head(self.embed_dim, num_classes, **get_device_dtype(self))
        self.head.train(self.training)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, num_frames: int | None = None
    ) -> None:
        """Record the size of clips that the model is meant for; nothing else depends on it."""
        size = self.img_size if img_size is None else to_2tuple(img_size)
        frames = self.num_frames if num_frames is None else num_frames
        self.patch_embed.check(frames, *size)
        self.img_size, self.num_frames = size, frames
        update_model_input_size(self, size, num_frames=frames)

    def _embed(self, clips: Tensor) -> tuple[Tensor, Tensor | DividedRope, tuple[int, ...]]:
        """Tokens [B, prefix + N, D], t slowest and x fastest; their rotary tables; their grid."""
        x = self.patch_embed(clips)
        batch, *grid, _ = x.shape
        if torch.jit.is_tracing():  # where sizes are tensors
            grid = [int(size) for size in grid]
        x = x.flatten(1, 3)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(batch, -1, -1), x], dim=1)
        x = self.pos_drop(x)
        if self.attention == "divided":
            space = self.rope.get(grid[1:], "yx", like=x)
            time = self.rope.get(grid[:1], "t", like=x) if self.rope_time else None
            return x, DividedRope(grid[0], space, time), tuple(grid)
        if self.rope_time:
            rope = self.rope.get(grid, "tyx", like=x)
        else:
            rope = self.rope.get(grid[1:], "yx", like=x).repeat(grid[0], 1)
        if self.patch_drop is not None:
            x, kept = self.patch_drop(x)
            if kept is not None:  # a dimension for the heads: [B, 1, N, 2 · head_dim]
                rope = apply_keep_indices_nlc(x, rope, kept).unsqueeze(1)
        return x, rope, tuple(grid)

    def _run(self, block: nn.Module, x: Tensor, rope: Tensor | DividedRope) -> Tensor:
        if self.grad_checkpointing:
            return checkpoint(block, x, rope=rope)
        return block(x, rope=rope)

    def forward_features(self, x: Tensor) -> Tensor:
        """Clips [B, C, T, H, W] -> normed tokens [B, prefix + N, D]."""
        x, rope, _ = self._embed(x)
        for block in self.blocks:
            x = self._run(block, x, rope)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Normed tokens -> logits, or pooled features [B, D] with `pre_logits`."""
        x = global_pool_nlc(x, self.global_pool, num_prefix_tokens=self.num_prefix_tokens)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCTHW",
        intermediates_only: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """The outputs of blocks: the last n, or those that `indices` lists; None is all.

        Args:
            output_fmt: "NCTHW" (timm's "NCHW" means that here) for [B, D, T', H', W'], "NTHWC"
                ("NHWC") for [B, T', H', W', D], or "NLC" for [B, N, D]; never the class token.
            return_prefix_tokens: give pairs of that and the class token [B, prefix, D].

        Returns:
            (normed tokens as `forward_features` gives them, outputs), or the outputs alone.
        """
        layout = FEATURE_FORMATS.get(output_fmt, output_fmt)
        if layout not in ("NCTHW", "NTHWC", "NLC"):
            raise ValueError(f"output_fmt must be NCTHW, NTHWC or NLC, found {output_fmt!r}")
        if layout != "NLC" and self.training and self.patch_drop is not None:
            raise ValueError(f"output_fmt={output_fmt!r} needs every patch: patch_drop_rate is on")
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, rope, grid = self._embed(x)
        outputs = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, rope)
            if index in taken:
                y = self.norm(x) if norm else x
                prefix, y = y.tensor_split((self.num_prefix_tokens,), dim=1)
                y = y if layout == "NLC" else y.unflatten(1, grid)
                y = y.permute(0, 4, 1, 2, 3).contiguous() if layout == "NCTHW" else y
                outputs.append((y, prefix) if return_prefix_tokens else y)
        return outputs if intermediates_only else (self.norm(x), outputs)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the outputs of these blocks do not need; returns their numbers."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken


def _head(dim: int, num_classes: int, **factory: Any) -> nn.Module:
    return nn.Linear(dim, num_classes, **factory) if num_classes > 0 else nn.Identity()


def _check_pool(global_pool: str, class_token: bool) -> None:
    if global_pool not in ("token", "avg", ""):
        raise ValueError(f"global_pool must be 'token', 'avg' or '', found {global_pool!r}")
    if global_pool == "token" and not class_token:
        raise ValueError(
            "global_pool='token' needs the class token; use global_pool='avg' with "
            "class_token=False"
        )
