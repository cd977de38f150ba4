"""Video transformers with the method, for timm's registry: `video_vit_preproj_{tiny,small,base}`.

Clips [B, C, T, H, W] are cut into tubelets of 2 x 16 x 16 (Conv3d, as in ViViT, arXiv 2103.15691).
Positions are rotary alone, over time, row and column (`mmpreproj.backbones.rope3d` states how the
pairs are split), so that frames and sizes may be others at run time. Attention is over space and
time jointly, in timm's `EvaBlock`, or divided: over time, then over space (TimeSformer, arXiv
2102.05095; `mmpreproj.backbones.video_blocks`). No LayerScale. Everything else is as in
`mmpreproj.backbones.vit`, and the weights of those image models can be taken over:
`image_weights=` a file, `pretrained=True`, or `mmpreproj.backbones.inflate.from_image_model`.
"""

from __future__ import annotations

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from mmpreproj.backbones.inflate import inflate_filter_fn
from mmpreproj.backbones.video_transformer import PreProjVideoTransformer
from mmpreproj.backbones.vit import _default_cfg

__all__ = ["PreProjVideoTransformer"]


def _video_cfg(base: str | None = None) -> dict[str, Any]:
    return {**_default_cfg(base), "fixed_input_size": False}


default_cfgs = generate_default_cfgs(
    {
        "video_vit_preproj_tiny": _video_cfg(),
        "video_vit_preproj_small.naver_in1k": _video_cfg("vit_small_patch16_rope_224.naver_in1k"),
        "video_vit_preproj_base.naver_in1k": _video_cfg("vit_base_patch16_rope_224.naver_in1k"),
    }
)


def _create(variant: str, pretrained: bool, sizes: dict[str, int], **kwargs: Any) -> nn.Module:
    given = kwargs.get("pretrained_cfg") or kwargs.get("pretrained_cfg_overlay")
    base = default_cfgs[variant].default.hf_hub_id
    if pretrained and not given and not base:
        raise RuntimeError(
            f"{variant} has no pretrained weights: timm's RoPE image models start at small. Use "
            "pretrained=False, or video_vit_preproj_small or _base"
        )
    feature_cfg = {"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"}
    try:
        return build_model_with_cfg(
            PreProjVideoTransformer,
            variant,
            pretrained,
            pretrained_filter_fn=inflate_filter_fn,
            feature_cfg=feature_cfg,
            **{**sizes, **kwargs},
        )
    except FileNotFoundError as error:
        if kwargs.get("image_weights") is not None:
            raise
        raise RuntimeError(
            f"the image weights of {variant} ({base}) are not here and could not be fetched. With "
            "the file at hand: timm.create_model(..., image_weights='model.safetensors')"
        ) from error


@register_model
def video_vit_preproj_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Video ViT-Ti/16x2 with the method. There are no pretrained weights to start it from."""
    sizes = {"embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("video_vit_preproj_tiny", pretrained, sizes, **kwargs)


@register_model
def video_vit_preproj_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Video ViT-S/16x2 with the method; pretrained: timm's vit_small_patch16_rope_224, inflated."""
    sizes = {"embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("video_vit_preproj_small", pretrained, sizes, **kwargs)


@register_model
def video_vit_preproj_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Video ViT-B/16x2 with the method; pretrained: timm's vit_base_patch16_rope_224, inflated."""
    sizes = {"embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("video_vit_preproj_base", pretrained, sizes, **kwargs)
