"""PEFT models of tiny bases, and what to compare them with."""

import copy

import peft
import torch
from helpers import images
from helpers import tiny as tiny_timm
from transformers_models import inputs, outputs, tiny

from mmpreproj import PreProjConfig, PreProjPeftConfig, attach, preproj_modules


def wrapped(model, name="default", **config):
    return peft.get_peft_model(model, PreProjPeftConfig(**config), adapter_name=name)


@torch.no_grad()
def perturb(model, name="default"):
    """Random parameters in one adapter; returns them by the site's path in the base."""
    found = {}
    for path, module in preproj_modules(model).items():
        site, _, adapter = path.removeprefix("base_model.model.").partition(".preproj.by_name.")
        if adapter == name:
            for parameter in module.parameters():
                parameter.normal_(std=0.1)
            found[f"{site}.preproj"] = {k: v.clone() for k, v in module.state_dict().items()}
    return found


def attached(base, parameters, **config):
    """The same numbers through `mmpreproj.attach`, which has tests of its own for the formula."""
    model = attach(copy.deepcopy(base), PreProjConfig(**config))
    for path, module in preproj_modules(model).items():
        module.load_state_dict(parameters[path])
    return model


def facts(model):
    """What an untouched base is known by."""
    return (
        {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        {name: type(module) for name, module in model.named_modules()},
        list(model.state_dict()),
    )


def timm_case():
    model = tiny_timm("vit_small_patch16_rope_224")
    pixels = images(model)
    return model, lambda m: m(pixels).detach()


def text_case(name):
    model = tiny(name)
    x = inputs(model)
    return model, lambda m: outputs(m, x)
