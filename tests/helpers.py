"""Small models, and weights at which a fault would show."""

import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor

import mmpreproj

# One line per family of timm's attention transformers: name and keywords that make it tiny.
FAMILIES = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 32}),
    "deit": ("deit_tiny_distilled_patch16_224", {"img_size": 32}),
    "deit3": ("deit3_small_patch16_224", {"img_size": 32}),
    "beit": ("beit_base_patch16_224", {"img_size": 32}),
    "beitv2": ("beitv2_base_patch16_224", {"img_size": 32}),
    "eva02": ("eva02_tiny_patch14_224", {"img_size": 28}),
    "eva_post_norm": ("eva02_tiny_patch14_224", {"img_size": 28, "use_post_norm": True}),
    "siglip": ("vit_base_patch16_siglip_224", {"img_size": 32}),
    "dinov2": ("vit_small_patch14_dinov2", {"img_size": 28}),
    "dinov2_reg": ("vit_small_patch14_reg4_dinov2", {"img_size": 28}),
    "dinov3": ("vit_small_patch16_dinov3", {"img_size": 32}),
    "pe": ("vit_pe_core_tiny_patch16_384", {"img_size": 32}),
    **{name: (name, {"img_size": 32}) for name in timm.list_models("vit_*_rope_*")},
}
SMALL = {"depth": 2, "num_classes": 5}


def tiny(family, **kwargs):
    """A two-block model of the family, in eval mode, with every weight random and gammas near 1."""
    name, size = FAMILIES[family]
    model = timm.create_model(name, **{**SMALL, **size, **kwargs}).eval()
    randomise_base(model)
    return model


def images(model, batch=2):
    channels, *size = timm.models.get_model_input_config(model)["input_size"]
    return torch.randn(batch, channels, *size, dtype=next(model.parameters()).dtype)


@torch.no_grad()
def randomise_base(model):
    """LayerScale of order 1 and a head that is not near zero: both would hide an error."""
    for name, parameter in model.named_parameters():
        if "gamma" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.startswith("head") or name.endswith("bias"):
            parameter.normal_(std=0.05)


@torch.no_grad()
def perturb(model, std=0.1):
    """Random new weights: at the identity most faults cannot be seen."""
    for module in mmpreproj.preproj_modules(model).values():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return model


def traced_by_fx(model, output="head"):
    """The model traced by torch.fx as timm's own tests do: {output: tensor} of an input."""
    tracer = {
        "leaf_modules": timm.models.get_notrace_modules(),
        "autowrap_functions": timm.models.get_notrace_functions(),
        "param_shapes_constant": True,
    }
    return create_feature_extractor(model, [output], tracer_kwargs=tracer)
