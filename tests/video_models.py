"""Small `video_vit_preproj_*` models, and clips for them."""

import pytest
import timm
import torch
from helpers import perturb, randomise_base
from torch import nn

NAME = "video_vit_preproj_tiny"
AVG = {"class_token": False, "global_pool": "avg"}
ATTENTIONS = ["joint", "divided"]
each_attention = pytest.mark.parametrize("attention", ATTENTIONS)


def build(attention="joint", *, depth=2, num_classes=5, **kwargs):
    """A small model in eval mode at whose weights a fault would show.

    None is near zero, and q and k are large enough for attention that is far from uniform.
    """
    sizes = {"embed_dim": 96, "num_heads": 3, "img_size": (32, 48), "num_frames": 8}
    model = timm.create_model(
        NAME, attention=attention, depth=depth, num_classes=num_classes, **{**sizes, **kwargs}
    )
    randomise_base(model)
    for name, parameter in model.named_parameters():
        if "qkv.weight" in name:
            nn.init.normal_(parameter, std=0.15)
        if "attn.proj" in name:
            nn.init.normal_(parameter, std=0.1)
    return perturb(model).eval()


def clips(model, batch=2, frames=None, size=None):
    size = size or model.img_size
    dtype = next(model.parameters()).dtype
    return torch.randn(batch, model.in_chans, frames or model.num_frames, *size, dtype=dtype)
