"""Hugging Face's image and video classifiers behind timm's interface.

What is known of an architecture beyond its configuration stands in `FAMILIES`. Nothing that is
loaded runs code of its own: repositories that need theirs are refused, and weights are read as
safetensors, or as a state dict without unpickling anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from timm.layers import get_device_dtype
from torch import Tensor, nn

from mmpreproj.backbones.hf_vision.families import FAMILIES, InputShape, vision_config
from mmpreproj.backbones.hf_vision.loading import (
    configured,
    find_vision_source,
    head_paths,
    linear,
    load_model,
    new_model,
    preprocessing,
    read_config,
)
from mmpreproj.backbones.modes import set_checkpointing, train_blocks

__all__ = ["HFClassifier", "create_hf_classifier"]

# Parameters that timm's recipes keep out of weight decay, by the end of their names
_NO_DECAY = (
    *("cls_token", "distillation_token", "mask_token", "query_tokens", "register_tokens"),
    *("class_embedding", "position_embedding.weight", "position_embeddings", "time_embeddings"),
    "relative_position_bias_table",
)


class HFClassifier(nn.Module):
    """A transformers image or video classifier as timm's models are: a tensor in, logits out.

    The head is everything outside the base model: in VideoMAE its norm as well, in V-JEPA 2 the
    attentive pooler. It is what `pretrained_cfg["classifier"]` lists, and trains in a frozen probe.

    Args:
        model: of transformers, or of `create_hf_classifier` where that has no classifier.
        config: its configuration.
        data: mean, std, interpolation, crop_pct, crop_mode, and as size (height, width) what the
            model is fed where it takes any size.
        name: where it came from, for records.

    Shape: images [B, C, H, W], or clips [B, C, T, H, W], -> logits [B, num_classes].
    Raises: ValueError naming what is given and what is expected, where the shape is another than
        the model can take.
    """

    def __init__(self, model: nn.Module, config: Any, data: dict[str, Any], name: str) -> None:
        super().__init__()
        self.model = model
        self.config = config
        # distilled DeiT has two
        heads = {n: m for n, m in model.named_children() if n.endswith("classifier")}
        self.num_classes = next(iter(heads.values())).out_features
        self._head_widths = {name: head.in_features for name, head in heads.items()}
        self.grad_checkpointing = False
        self.shape = InputShape.of(config)
        self.in_chans = self.shape.channels
        self.num_frames = self.shape.frames
        self.num_features = vision_config(config).hidden_size
        size = data.get("size") if self.shape.other_sizes else None
        data = {key: value for key, value in data.items() if key != "size"}
        self.pretrained_cfg = {
            "architecture": name,
            "input_size": (self.in_chans, *(size or self.shape.size)),
            "fixed_input_size": not self.shape.other_sizes,
            "classifier": tuple(f"model.{path}" for path in head_paths(model)),
            **data,
        }

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        found = tuple(getattr(self.model, name) for name in self._head_widths)
        return found[0] if len(found) == 1 else found

    def reset_classifier(self, num_classes: int) -> None:
        """Fresh classifiers, on the model's device and in its dtype; the rest of the head stays."""
        factory = get_device_dtype(self)
        std = getattr(vision_config(self.config), "initializer_range", 0.02)
        for name, width in self._head_widths.items():
            new: nn.Module = nn.Identity()
            if num_classes > 0:
                new = linear(width, num_classes, std, **factory)
            setattr(self.model, name, new.train(self.training))
        self.num_classes = self.config.num_labels = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the inputs of blocks in training, and compute the rest again."""
        set_checkpointing(self, enable)
        self.grad_checkpointing = enable

    def train_blocks(self) -> None:
        """Let checkpointing work in blocks that stay in eval mode, as a frozen model's do."""
        train_blocks(self)

    def no_weight_decay(self) -> set[str]:
        """Parameters to exclude from weight decay."""
        return {name for name, _ in self.named_parameters() if name.endswith(_NO_DECAY)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters make one layer of layer-wise learning rates."""
        return {
            "stem": r"^model\..*(?:embeddings|shared_position_bias|pre_layrnorm)\.",
            "blocks": [(r"^model\.(?:.*\.)?layers?\.(\d+)\.", None)],
        }

    def check_input_size(self, *size: int) -> None:
        """Raises ValueError if the model does not take (height, width), or (frames, height, width)
        where it takes clips."""
        frames, *image = (None, *size)[-3:]
        self.shape.check(f"this {self.config.model_type}", frames, image, self.shape.size)

    def forward(self, x: Tensor) -> Tensor:
        video = self.num_frames is not None
        if x.ndim != (5 if video else 4) or x.shape[1] != self.in_chans:
            wanted = f"[B, {self.in_chans}, {'T, ' if video else ''}H, W]"
            what = "clips" if video else "images"
            raise ValueError(
                f"{self.config.model_type} takes {what} {wanted}, found {list(x.shape)}"
            )
        self.check_input_size(*x.shape[2:])
        if video:
            x = x.transpose(1, 2)  # transformers has the frames first
        return self.model(x, return_dict=True).logits


def create_hf_classifier(
    source: str | os.PathLike[str],
    num_classes: int,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> HFClassifier:
    """A classifier of one of the architectures in `FAMILIES`, in float32 and in train mode.

    Args:
        source: a hub name, in its cache or online, or a folder with config.json; and, if
            pretrained, the weights.
        num_classes: width of the classifier. Another one than the weights': fresh.
        model_args: fields of the configuration to change, such as num_frames, image_size,
            attention_type, hidden_dropout_prob or drop_path_rate.
        pretrained: take the weights of `source`. What they lack of the head is fresh; modules that
            the classifier does not read (a decoder, a text tower) are left out. Otherwise only the
            configuration is read, and the weights are random.

    Raises:
        FileNotFoundError: if the folder is not there, or has no config.json.
        ConnectionError: if a hub name is neither in the cache nor to be reached; within seconds.
        ValueError: for another architecture, a field that the configuration does not have (with
            close matches), a value that it does not take, or weights that do not make up the model.
    """
    found = find_vision_source(os.fspath(source), pretrained)
    config = configured(read_config(found), model_args or {}, found.name)
    family = FAMILIES[config.model_type]
    config.num_labels = max(num_classes, 1)
    model = load_model(found, config) if pretrained else new_model(found, config)
    for path in family.unused:
        model.set_submodule(path, nn.Identity())
    for key, parameter in model.named_parameters():
        if key.endswith("mask_token"):  # of pre-training: it would never get a gradient
            parameter.requires_grad_(False)
    data = {
        "mean": family.statistics[0],
        "std": family.statistics[1],
        "interpolation": family.interpolation,
        "crop_pct": family.crop_pct,
        "crop_mode": "center",
        **preprocessing(found, family.video),
    }
    classifier = HFClassifier(model, config, data, found.name)
    if num_classes == 0:
        classifier.reset_classifier(0)
    return classifier.train()
