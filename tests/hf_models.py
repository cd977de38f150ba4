"""Tiny image and video models of transformers, as a user's folder has them, and their logits."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers_models import BASE, BERT, IMAGE, V_JEPA, VIDEO, randomise  # noqa: E402

from mmpreproj.backbones import building  # noqa: E402

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

CLASSES = 5
TOWERS = {"text_config": dict(BERT), "vision_config": dict(IMAGE)}
JOINT = {**VIDEO, "attention_type": "joint_space_time"}

# transformers' class of the saved model, and its configuration's class and keywords
IMAGES = {
    "beit": (
        "BeitForImageClassification",
        ("BeitConfig", {**IMAGE, "use_relative_position_bias": True, "use_mask_token": True}),
    ),
    "clip": ("CLIPForImageClassification", ("CLIPConfig", TOWERS)),
    "deit": ("DeiTForImageClassification", ("DeiTConfig", IMAGE)),
    "deit_distilled": ("DeiTForImageClassificationWithTeacher", ("DeiTConfig", IMAGE)),
    "dinov2": ("Dinov2ForImageClassification", ("Dinov2Config", IMAGE)),
    "siglip": ("SiglipForImageClassification", ("SiglipConfig", TOWERS)),
    "vit": ("ViTForImageClassification", ("ViTConfig", IMAGE)),
}
CLIPS = {
    "timesformer": ("TimesformerForVideoClassification", ("TimesformerConfig", VIDEO)),
    "timesformer_joint": ("TimesformerForVideoClassification", ("TimesformerConfig", JOINT)),
    "videomae": ("VideoMAEForVideoClassification", ("VideoMAEConfig", VIDEO)),
    "vivit": (
        "VivitForVideoClassification",
        ("VivitConfig", {**VIDEO, "tubelet_size": [2, 8, 8]}),
    ),
    "vjepa2": (
        "VJEPA2ForVideoClassification",
        ("VJEPA2Config", {**BASE, **V_JEPA, "num_pooler_layers": 1}),
    ),
}
CASES = {**IMAGES, **CLIPS}
# What stands outside of the base model, read off the modelling code
HEADS = {
    "beit": ["beit.pooler", "classifier"],
    "deit_distilled": ["cls_classifier", "distillation_classifier"],
    "videomae": ["fc_norm", "classifier"],
    "vjepa2": ["pooler", "classifier"],
}


def reference(case, **changed):
    """A random classifier of transformers' own, as it would be fine-tuned somewhere."""
    model, (config, keywords) = CASES[case]
    config = getattr(transformers, config)(**{**keywords, **changed})
    config.num_labels = CLASSES
    return randomise(getattr(transformers, model)(config)).eval()


def saved(case, folder, **changed):
    model = reference(case, **changed)
    model.save_pretrained(folder)
    return model


def built(folder, num_classes=CLASSES, model_args=None, pretrained=True, **keywords):
    return building.build_model(f"hf:{folder}", num_classes, model_args, pretrained, **keywords)


def inputs(model, batch=2):
    dtype = next(model.parameters()).dtype
    return torch.randn(batch, *building.input_config(model)["input_size"], dtype=dtype)


@torch.no_grad()
def transformers_logits(model, x):
    """x as our models take it: [B, C, H, W] or [B, C, T, H, W]."""
    x = x if x.ndim == 4 else x.permute(0, 2, 1, 3, 4)
    return model(**{model.main_input_name: x}).logits


@torch.no_grad()
def logits(model, x):
    return model(x)


def edit(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
