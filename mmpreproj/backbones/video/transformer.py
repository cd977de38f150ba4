"""The spatio-temporal transformer, and its models: `video_vit_preproj_{tiny,small,base}`.

Clips [B, C, T, H, W] are cut into tubelets of 2 x 16 x 16 (Conv3d, as in ViViT, arXiv 2103.15691).
Positions are rotary alone, over time, row and column (`rope3d` states how the pairs are split), so
that frames and sizes may be others at run time. Attention is over space and time jointly, in timm's
`EvaBlock`, or divided: over time, then over space (TimeSformer, arXiv 2102.05095; `divided`).
No LayerScale. Everything else is as in `mmpreproj.backbones.vit`, timm's `Eva`, and the weights of
those image models can be taken over: `image_weights=` a file, `pretrained=True`, or
`inflate.from_image_model`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import apply_keep_indices_nlc, register_notrace_module, to_2tuple
from timm.models import register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models._manipulate import checkpoint
from timm.models.eva import Eva
from torch import Tensor, nn

from mmpreproj.attach import attach, preproj_modules
from mmpreproj.backbones.video.divided import DividedBlock
from mmpreproj.backbones.video.inflate import from_image_model, inflate_filter_fn
from mmpreproj.backbones.video.rope3d import RotaryTables
from mmpreproj.backbones.vit import EVA, ROPE_VIT, create_rope_vit, method_of, rope_vit_cfgs

__all__ = ["PreProjVideoTransformer", "TubeletEmbed"]

# Names that timm's feature wrapper uses for maps, and what they are for a clip.
FEATURE_FORMATS = {"NCHW": "NCTHW", "NHWC": "NTHWC"}
POOLS = ("token", "avg", "max", "avgmax", "map", "")  # Eva's
# Keywords of Eva about positions, which are rotary here and of three axes, and what they may be.
_POSITIONS = {
    name: value
    for name, value in {**EVA, **ROPE_VIT}.items()
    if name.startswith(("rope_", "use_abs", "use_rot", "ref_")) and name != "rope_temperature"
}
# What divided attention has not, and why.
_JOINT_ALONE = {
    "patch_drop_rate": "divided attention needs every patch of every frame",
    "init_values": "a divided block has no LayerScale",
    "use_post_norm": "a divided block has its norms before attention",
}


@register_notrace_module
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
        **keywords: Any,
    ) -> None:
        super().__init__()
        self.tubelet_size = tubelet_size
        self.patch_size = patch_size
        self.pad = pad
        kernel = (tubelet_size, *patch_size)
        self.proj = nn.Conv3d(in_chans, embed_dim, kernel, stride=kernel, **keywords)

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
            columns, rows = -width % self.patch_size[1], -height % self.patch_size[0]
            last = clips[:, :, -1:].expand(-1, -1, -frames % self.tubelet_size, -1, -1)
            clips = nn.functional.pad(torch.cat([clips, last], dim=2), (0, columns, 0, rows))
        return self.proj(clips).permute(0, 2, 3, 4, 1)


class PreProjVideoTransformer(Eva):
    """A video transformer, with the method in its blocks.

    With `pre_projection=False, content_skip=False` it is the plain transformer: the same class,
    blocks and base parameters.

    Args:
        num_frames: with `img_size`, the clips the model is meant for. It takes any other as well.
        tubelet_size: with `patch_size`, frames and pixels of a tubelet.
        attention: "joint", or "divided" (time, then space; two self-attentions a block).
        rope_time: whether time rotates. False, with "joint", leaves the order of tubelets unseen.
        pad: pad clips that do not divide into tubelets (`TubeletEmbed` says how), else refuse them.
        image_weights: file of an image model's weights to start from.
        keywords: those of `vit_preproj_*`: timm's `Eva`'s, and the options of `PreProjConfig` by
            name. Prefix tokens (class and register tokens) are never rotated. `dynamic_img_size`
            changes nothing, and `dynamic_img_pad` is `pad`.

    Shape: clips [B, C, T, H, W] -> logits [B, num_classes].
    Raises: ValueError naming what does not go together; in forward, what does not divide.
    """

    def __init__(
        self,
        num_frames: int = 16,
        tubelet_size: int = 2,
        attention: str = "joint",
        rope_time: bool = True,
        pad: bool = False,
        image_weights: str | os.PathLike | None = None,
        **keywords: Any,
    ) -> None:
        config = method_of(keywords)
        arguments = {**EVA, **ROPE_VIT, **keywords}
        _check(attention, arguments)
        dim, heads = arguments["embed_dim"], arguments["num_heads"]
        rope = RotaryTables(dim // heads, arguments["rope_temperature"])
        super().__init__(**arguments | {"use_rot_pos_emb": False})
        factory = {key: arguments.pop(key) for key in ("device", "dtype")}
        self.image_arguments = arguments
        self.img_size = to_2tuple(arguments["img_size"])
        self.num_frames = num_frames
        self.attention = attention
        self.rope_time = rope_time
        self.rope = rope
        self.patch_embed = TubeletEmbed(
            tubelet_size,
            self.patch_embed.patch_size,
            self.in_chans,
            dim,
            pad or arguments["dynamic_img_pad"],
            bias=self.patch_embed.proj.bias is not None,
            **factory,
        )
        self.patch_embed.check(num_frames, *self.img_size)
        if attention == "divided":
            self.blocks = nn.ModuleList(DividedBlock(block) for block in self.blocks)
            self.init_weights(needs_reset=False)
        if config.enabled:
            attach(self, config)
        if image_weights is not None:
            from_image_model(self, image_weights)

    def init_weights(self, needs_reset: bool = True) -> None:
        """Draw every parameter as timm's rotary ViTs do; time attention's output starts at zero."""
        super().init_weights(needs_reset)
        for block in self.blocks:
            if isinstance(block, DividedBlock):
                nn.init.zeros_(block.temporal_attn.proj.weight)
        for module in preproj_modules(self).values():  # after everything that draws linear layers
            module.reset_parameters()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head, on the model's device and in its dtype."""
        if global_pool is not None:
            _check_pool(global_pool, self.cls_token is not None)
        super().reset_classifier(num_classes, global_pool)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, num_frames: int | None = None
    ) -> None:
        """Record the size of clips that the model is meant for; nothing else depends on it."""
        size = self.img_size if img_size is None else to_2tuple(img_size)
        frames = self.num_frames if num_frames is None else num_frames
        self.patch_embed.check(frames, *size)
        self.img_size, self.num_frames = size, frames
        update_model_input_size(self, size, num_frames=frames)

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, Any]:
        """[B, T, H, W, D] -> tokens [B, prefix + N, D], t slowest and x fastest; their rotation."""
        rope = self.rope(x, self.attention == "divided", self.rope_time)
        prefix = [token for token in (self.cls_token, self.reg_token) if token is not None]
        x = x.flatten(1, 3)
        if prefix:
            x = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in prefix), x], dim=1)
        x = self.pos_drop(x)
        if self.patch_drop is not None:
            x, kept = self.patch_drop(x)
            if kept is not None:  # a dimension for the heads: [B, 1, N, 2 · head_dim]
                rope = apply_keep_indices_nlc(x, rope, kept).unsqueeze(1)
        return x, rope

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
                ("NHWC") for [B, T', H', W', D], or "NLC" for [B, N, D]; never the prefix tokens.
            return_prefix_tokens: give pairs of that and the prefix tokens [B, prefix, D].

        Returns:
            (normed tokens as `forward_features` gives them, outputs), or the outputs alone.
        """
        layout = FEATURE_FORMATS.get(output_fmt, output_fmt)
        if layout not in ("NCTHW", "NTHWC", "NLC"):
            raise ValueError(f"output_fmt must be NCTHW, NTHWC or NLC, found {output_fmt!r}")
        if layout != "NLC" and self.training and self.patch_drop is not None:
            raise ValueError(f"output_fmt={output_fmt!r} needs every patch: patch_drop_rate is on")
        taken, last = feature_take_indices(len(self.blocks), indices)
        x = self.patch_embed(x)
        grid = x.shape[1:4]
        x, rope = self._pos_embed(x)
        x = self.norm_pre(x)
        outputs = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpoint(block, x, rope=rope) if self.grad_checkpointing else block(x, rope=rope)
            if index in taken:
                y = self.norm(x) if norm else x
                prefix, y = y.tensor_split((self.num_prefix_tokens,), dim=1)
                y = y if layout == "NLC" else y.unflatten(1, grid)
                y = y.permute(0, 4, 1, 2, 3).contiguous() if layout == "NCTHW" else y
                outputs.append((y, prefix) if return_prefix_tokens else y)
        return outputs if intermediates_only else (self.norm(x), outputs)


def _check(attention: str, arguments: dict[str, Any]) -> None:
    """Raises ValueError for keywords that do not go together, or that clips have no use for."""
    if attention not in ("joint", "divided"):
        raise ValueError(f"attention must be 'joint' or 'divided', found {attention!r}")
    dim, heads = arguments["embed_dim"], arguments["num_heads"]
    if dim % heads:
        raise ValueError(f"embed_dim={dim} does not divide into num_heads={heads}")
    for name, why in _JOINT_ALONE.items():
        if attention == "divided" and arguments[name]:
            raise ValueError(f"{name}={arguments[name]!r} needs attention='joint': {why}")
    for name, only in _POSITIONS.items():
        if arguments[name] != only:
            raise ValueError(
                f"{name}={arguments[name]!r}: positions of clips are rotary, over time, row and "
                f"column, so {name} is {only!r}; rope_temperature and rope_time can be chosen"
            )
    _check_pool(arguments["global_pool"], arguments["class_token"])


def _check_pool(global_pool: str, class_token: bool) -> None:
    if global_pool not in POOLS:
        raise ValueError(f"global_pool must be one of {POOLS}, found {global_pool!r}")
    if global_pool == "token" and not class_token:
        raise ValueError(
            "global_pool='token' needs the class token; use global_pool='avg' with "
            "class_token=False"
        )


default_cfgs = rope_vit_cfgs("video_vit_preproj", ("tiny", "small", "base"), fixed_input_size=False)


_create = functools.partial(
    create_rope_vit,
    PreProjVideoTransformer,
    inflate_filter_fn,
    "image_weights='model.safetensors'",
)


@register_model
def video_vit_preproj_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Video ViT-Ti/16x2 with the method. There are no pretrained weights to start it from."""
    return _create("video_vit_preproj_tiny", pretrained, kwargs)


@register_model
def video_vit_preproj_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Video ViT-S/16x2 with the method; pretrained: timm's vit_small_patch16_rope_224, inflated."""
    return _create("video_vit_preproj_small", pretrained, kwargs)


@register_model
def video_vit_preproj_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Video ViT-B/16x2 with the method; pretrained: timm's vit_base_patch16_rope_224, inflated."""
    return _create("video_vit_preproj_base", pretrained, kwargs)
