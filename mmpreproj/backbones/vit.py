"""Vision transformers with the method, for timm's registry: `vit_preproj_{tiny,small,base,large}`.

Patch 16, 224 px, class token, 2-D axial RoPE by timm's own code, no LayerScale: everything but the
method is `timm.models.eva.Eva`, as timm's `vit_*_patch16_rope_224` (ViT: arXiv 2010.11929; RoPE for
ViT: arXiv 2403.13298). Initialisation: timm's, then the method's own (`mmpreproj.preproj`).

`pretrained=True` starts small, base and large from those models' ImageNet-1k weights: both gammas
of LayerScale are folded into the linear layer before them, and the new parameters start at the
identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.eva import Eva
from timm.models.eva import checkpoint_filter_fn as eva_checkpoint_filter_fn
from torch import Tensor

from mmpreproj.attach import attach, preproj_modules
from mmpreproj.preproj import PreProjConfig

__all__ = ["PreProjVisionTransformer"]


class PreProjVisionTransformer(Eva):
    """timm's `Eva` with the method in its blocks.

    Takes every argument of `Eva`, and the options of `PreProjConfig` by name: `expansion`,
    `pre_projection`, `content_skip`, `layers`, `init_std`, `skip_rank`. With both parts off it is
    the base itself.

    Shape: images [B, C, H, W] -> logits [B, num_classes].
    """

    def __init__(
        self,
        *args: Any,
        expansion: float = 1.25,
        pre_projection: bool = True,
        content_skip: bool = True,
        layers: Sequence[int] | None = None,
        init_std: float = 0.0,
        skip_rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        config = PreProjConfig(
            expansion=expansion,
            pre_projection=pre_projection,
            content_skip=content_skip,
            layers=layers,
            init_std=init_std,
            skip_rank=skip_rank,
        )
        super().__init__(*args, **kwargs)
        if config.enabled:
            attach(self, config)

    def init_weights(self, needs_reset: bool = True) -> None:
        super().init_weights(needs_reset)
        for module in preproj_modules(self).values():
            module.reset_parameters()

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
        """The outputs of the last `n` blocks, or of the blocks that `n` lists (DINO's interface).

        Shape: x [B, C, H, W] -> a list of [B, T, D], or [B, D, H / patch, W / patch] if `reshape`;
        with `return_prefix_tokens`, of pairs of that and the class token [B, 1, D].
        """
        return self.forward_intermediates(
            x,
            n,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
            attn_mask=attn_mask,
        )


def checkpoint_filter_fn(
    state_dict: Mapping[str, Any], model: PreProjVisionTransformer
) -> dict[str, Tensor]:
    """A checkpoint of this model, or of the base model with LayerScale, in this model's names.

    gamma · (W h + b) = (gamma W) h + gamma b, so each gamma goes into the rows of the linear layer
    before it. Where the checkpoint holds none of the new parameters, the model's own stay.
    """
    weights = eva_checkpoint_filter_fn(dict(state_dict), model)
    parameters = dict(model.named_parameters())
    for gamma_name in [name for name in weights if name.endswith((".gamma_1", ".gamma_2"))]:
        if gamma_name in parameters:
            continue  # a model that was made with init_values keeps its LayerScale
        block, _, which = gamma_name.rpartition(".")
        gamma = weights.pop(gamma_name).double()
        linear = f"{block}.attn.proj" if which == "gamma_1" else f"{block}.mlp.fc2"
        for name, scale in ((f"{linear}.weight", gamma[:, None]), (f"{linear}.bias", gamma)):
            weights[name] = (scale * weights[name].double()).to(weights[name].dtype)
    own = {
        f"{path}.{name}": tensor
        for path, module in preproj_modules(model).items()
        for name, tensor in module.state_dict().items()
    }
    return weights if own.keys() & weights.keys() else {**own, **weights}


def _default_cfg(base: str | None = None) -> dict[str, Any]:
    source = {"hf_hub_id": f"timm/{base}", "license": "apache-2.0"} if base else {}
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **source,
    }


default_cfgs = generate_default_cfgs(
    {
        "vit_preproj_tiny": _default_cfg(),
        "vit_preproj_small.naver_in1k": _default_cfg("vit_small_patch16_rope_224.naver_in1k"),
        "vit_preproj_base.naver_in1k": _default_cfg("vit_base_patch16_rope_224.naver_in1k"),
        "vit_preproj_large.naver_in1k": _default_cfg("vit_large_patch16_rope_224.naver_in1k"),
    }
)


def _create(
    variant: str, pretrained: bool, sizes: dict[str, int], **kwargs: Any
) -> torch.nn.Module:
    arguments = {
        "patch_size": 16,
        "mlp_ratio": 4,
        "attn_type": "rope",
        "qkv_bias": True,
        "class_token": True,
        "global_pool": "token",
        "use_abs_pos_emb": False,
        "use_rot_pos_emb": True,
        "rope_grid_indexing": "xy",
        "rope_temperature": 100.0,
        "use_fc_norm": False,  # the weights have their norm before pooling, whatever the pooling
        **sizes,
        **kwargs,
    }
    given = kwargs.get("pretrained_cfg") or kwargs.get("pretrained_cfg_overlay")
    base = default_cfgs[variant].default.hf_hub_id
    if pretrained and not given and not base:
        raise RuntimeError(
            f"{variant} has no pretrained weights: timm's RoPE models start at small. Use "
            "pretrained=False, or vit_preproj_small, _base or _large"
        )
    feature_cfg = {"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"}
    try:
        return build_model_with_cfg(
            PreProjVisionTransformer,
            variant,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg=feature_cfg,
            **arguments,
        )
    except FileNotFoundError as error:  # what huggingface_hub raises where it cannot be reached
        raise RuntimeError(
            f"the pretrained weights of {variant} ({base}) are not here and could not be fetched. "
            "With the file at hand: timm.create_model(..., pretrained=True, "
            "pretrained_cfg_overlay={'file': 'model.safetensors'})"
        ) from error


@register_model
def vit_preproj_tiny(pretrained: bool = False, **kwargs: Any) -> torch.nn.Module:
    """ViT-Ti/16 with the method. There are no pretrained weights to start it from."""
    sizes = {"embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("vit_preproj_tiny", pretrained, sizes, **kwargs)


@register_model
def vit_preproj_small(pretrained: bool = False, **kwargs: Any) -> torch.nn.Module:
    """ViT-S/16 with the method; pretrained weights from timm's vit_small_patch16_rope_224."""
    sizes = {"embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("vit_preproj_small", pretrained, sizes, **kwargs)


@register_model
def vit_preproj_base(pretrained: bool = False, **kwargs: Any) -> torch.nn.Module:
    """ViT-B/16 with the method; pretrained weights from timm's vit_base_patch16_rope_224."""
    sizes = {"embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("vit_preproj_base", pretrained, sizes, **kwargs)


@register_model
def vit_preproj_large(pretrained: bool = False, **kwargs: Any) -> torch.nn.Module:
    """ViT-L/16 with the method; pretrained weights from timm's vit_large_patch16_rope_224."""
    sizes = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
    return _create("vit_preproj_large", pretrained, sizes, **kwargs)
