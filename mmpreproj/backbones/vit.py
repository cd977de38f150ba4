"""Vision transformers with the method, for timm's registry: `vit_preproj_{tiny,small,base,large}`.

Patch 16, 224 px, class token, 2-D axial RoPE by timm's own code, no LayerScale: everything but the
method is `timm.models.eva.Eva`, as timm's `vit_*_patch16_rope_224` (ViT: arXiv 2010.11929; RoPE for
ViT: arXiv 2403.13298). Initialisation: timm's, then the method's own (`mmpreproj.preproj`).

`pretrained=True` starts small, base and large from those models' ImageNet-1k weights: both gammas
of LayerScale are folded into the linear layer before them, and the new parameters start at the
identity.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.eva import Eva
from timm.models.eva import checkpoint_filter_fn as eva_checkpoint_filter_fn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmpreproj.attach import attach, preproj_modules
from mmpreproj.messages import did_you_mean
from mmpreproj.preproj import PreProjConfig

__all__ = ["PreProjVisionTransformer"]

SIZES = {
    "tiny": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "small": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "base": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "large": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
}
EVA = {name: parameter.default for name, parameter in inspect.signature(Eva).parameters.items()}
# What timm's vit_*_patch16_rope_224 are, as keywords of Eva, beside their size.
ROPE_VIT = {
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
}
# Options of PreProjConfig that are keywords of a model: it knows its attentions, and `dtype` and
# `attention` say something else there.
METHOD_KEYWORDS = [
    field.name
    for field in dataclasses.fields(PreProjConfig)
    if field.name not in ("dtype", "attention", "join")
]
# Keywords of timm's VisionTransformer that Eva calls otherwise.
_OF_VIT = {
    "reg_tokens": "num_reg_tokens",
    "fc_norm": "use_fc_norm",
    "pre_norm": "use_pre_transformer_norm",
    "final_norm": "use_post_transformer_norm",
    "scale_attn_norm": "scale_attn_inner",
    "scale_mlp_norm": "scale_mlp",
    "pos_embed": "use_abs_pos_emb",
}


def method_of(keywords: dict[str, Any]) -> PreProjConfig:
    """The options of the method among a model's keywords, which are taken out of them.

    Raises:
        TypeError: if one of the others is not a keyword of `Eva`, naming the one to use.
    """
    given = [name for name in METHOD_KEYWORDS if name in keywords]
    config = PreProjConfig(**{name: keywords.pop(name) for name in given})
    for name in keywords.keys() - EVA.keys():
        use = _OF_VIT.get(name)
        hint = f"; use {use!r}" if use else did_you_mean(name, [*EVA, *METHOD_KEYWORDS])
        raise TypeError(f"{name!r} is not a keyword of timm's Eva, which this model is{hint}")
    return config


class PreProjVisionTransformer(Eva):
    """timm's `Eva` with the method in its blocks.

    Takes every argument of `Eva`, and the options of `PreProjConfig` by name: `expansion`,
    `pre_projection`, `content_skip`, `layers`, `init_std`, `skip_rank`, `sites`, `activation`. With
    both parts off it is the base itself.

    Shape: images [B, C, H, W] -> logits [B, num_classes].
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = method_of(kwargs)
        super().__init__(*args, **kwargs)
        if config.enabled:
            attach(self, config)

    def init_weights(self, needs_reset: bool = True) -> None:
        super().init_weights(needs_reset)
        for module in preproj_modules(self).values():
            module.reset_parameters()

    # DINO's interface, which timm's Eva has not.
    get_intermediate_layers = VisionTransformer.get_intermediate_layers


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
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
    return with_own_method(weights, model)


def with_own_method(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights, and where they hold nothing of the method the model's own parameters of it."""
    own = {name: tensor for name, tensor in model.state_dict().items() if ".preproj." in name}
    return dict(weights) if own.keys() & weights.keys() else {**own, **weights}


def rope_vit_cfgs(name: str, sizes: Iterable[str], **changed: Any) -> dict[str, Any]:
    """timm's `default_cfgs` for NAME_SIZE: timm's RoPE weights where it has some of the size."""
    cfg = {
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
        **changed,
    }
    found = {}
    for size in sizes:
        base = f"vit_{size}_patch16_rope_224.naver_in1k"
        if size == "tiny":
            found[f"{name}_{size}"] = cfg
        else:
            source = {"hf_hub_id": f"timm/{base}", "license": "apache-2.0"}
            found[f"{name}_{size}.naver_in1k"] = cfg | source
    return generate_default_cfgs(found)


def create_rope_vit(
    model_class: type[nn.Module],
    filter_fn: Callable[..., Any],
    with_a_file: str,
    variant: str,
    pretrained: bool,
    keywords: dict[str, Any],
) -> nn.Module:
    """A model of the registry: NAME_SIZE, with other keywords where they are given.

    Args:
        filter_fn: makes the model's state dict of a checkpoint's.
        with_a_file: keywords of create_model that take the weights from a file.

    Raises:
        RuntimeError: if its pretrained weights do not exist, or cannot be had.
    """
    size = variant.rpartition("_")[2]
    base = f"timm/vit_{size}_patch16_rope_224.naver_in1k"
    given = keywords.get("pretrained_cfg") or keywords.get("pretrained_cfg_overlay")
    if pretrained and not given and size == "tiny":
        raise RuntimeError(
            f"{variant} has no pretrained weights: timm's RoPE models start at small. Use "
            f"pretrained=False, or {variant.replace('tiny', 'small')} and above"
        )
    arguments = {**ROPE_VIT, **SIZES[size], **keywords}
    try:
        return build_model_with_cfg(
            model_class,
            variant,
            pretrained,
            pretrained_filter_fn=filter_fn,
            feature_cfg={"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"},
            **arguments,
        )
    except FileNotFoundError as error:  # what huggingface_hub raises where it cannot be reached
        if not pretrained or "image_weights" in keywords:
            raise
        raise RuntimeError(
            f"the pretrained weights of {variant} ({base}) are not here and could not be fetched. "
            f"With the file at hand: timm.create_model(..., {with_a_file})"
        ) from error


default_cfgs = rope_vit_cfgs("vit_preproj", SIZES)


_create = functools.partial(
    create_rope_vit,
    PreProjVisionTransformer,
    checkpoint_filter_fn,
    "pretrained=True, pretrained_cfg_overlay={'file': 'model.safetensors'}",
)


@register_model
def vit_preproj_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-Ti/16 with the method. There are no pretrained weights to start it from."""
    return _create("vit_preproj_tiny", pretrained, kwargs)


@register_model
def vit_preproj_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-S/16 with the method; pretrained weights from timm's vit_small_patch16_rope_224."""
    return _create("vit_preproj_small", pretrained, kwargs)


@register_model
def vit_preproj_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-B/16 with the method; pretrained weights from timm's vit_base_patch16_rope_224."""
    return _create("vit_preproj_base", pretrained, kwargs)


@register_model
def vit_preproj_large(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-L/16 with the method; pretrained weights from timm's vit_large_patch16_rope_224."""
    return _create("vit_preproj_large", pretrained, kwargs)
