"""Start a video transformer from an image transformer's weights, and measure how near it is.

The patch embedding is repeated over the frames of a tubelet and divided by their number (I3D,
arXiv 1705.07750), so that a tubelet of equal frames embeds as the frame did. On a static clip, one
frame repeated, the video model then equals the image model on that frame

    - with attention="divided": always. Each frame attends within itself by the image model's
      rotary table, and time attention starts at zero;
    - with attention="joint": if time does not rotate (rope_time=False) and there is no class token
      (class_token=False, global_pool="avg"; in the image model as well). All frames' tokens are
      then equal, and each of T equal keys gets a T-th of the softmax's weight.

Elsewhere it is near, not equal; `static_clip_report` measures what each cause contributes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from timm.models import adapt_input_conv, load_state_dict
from torch import Tensor, nn

from mmpreproj.attach import attachment_of
from mmpreproj.backbones.modes import evaluating
from mmpreproj.backbones.vit import (
    METHOD_KEYWORDS,
    PreProjVisionTransformer,
    checkpoint_filter_fn,
    with_own_method,
)
from mmpreproj.preproj import PreProjConfig

__all__ = ["StaticClipReport", "from_image_model", "image_twin", "static_clip_report"]

WITHOUT = PreProjConfig(pre_projection=False, content_skip=False)
_logger = logging.getLogger(__name__)


def image_twin(model: nn.Module, **kwargs: Any) -> nn.Module:
    """The image model of a video model's sizes, freshly initialised, with the method if it has it.

    Args:
        kwargs: other keywords of `vit_preproj_*`, such as `img_size` or `pre_projection=False`.
    """
    method = attachment_of(model).config or WITHOUT
    current = {
        **{name: getattr(method, name) for name in METHOD_KEYWORDS},
        "img_size": model.img_size,
        "num_classes": model.num_classes,
        "depth": len(model.blocks),
        "global_pool": model.global_pool,
    }
    return PreProjVisionTransformer(**model.image_arguments | current | kwargs)


def from_image_model(model: nn.Module, weights: Mapping[str, Any] | str | os.PathLike) -> list[str]:
    """Load an image model's weights into a video model, in place.

    Args:
        model: a `video_vit_preproj_*`.
        weights: the state dict, or the file, of a `vit_preproj_*` or of timm's
            `vit_*_patch16_rope_224` (its LayerScale is folded in).

    Returns:
        The names of the parameters that did not come from the image model: those of the method and
        of time attention where the image model has none, and the head of another number of classes.
        In divided attention, time attention reads by the weights of the image model's attention,
        and its output starts at zero.

    Raises:
        ValueError: if the weights are of another architecture or size.
        FileNotFoundError: if there is no such file.
    """
    if not isinstance(weights, Mapping):
        if not os.path.isfile(weights):
            raise FileNotFoundError(f"there is no file of image weights at {os.fspath(weights)!r}")
        weights = load_state_dict(os.fspath(weights))
    inflated, own = _inflate(weights, model)
    model.load_state_dict(inflated)
    _logger.info(
        "started %s from an image model: %d tensors are its, %d keep their own start",
        *(type(model).__name__, len(inflated) - len(own), len(own)),
    )
    return own


def inflate_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """What timm calls on a checkpoint: image weights are inflated, video weights stay as they are.

    A video checkpoint without the new parameters gets the model's own.
    """
    patch = state_dict.get("patch_embed.proj.weight")
    if patch is None or patch.ndim != 5:
        return _inflate(state_dict, model)[0]
    return with_own_method(state_dict, model)


def _inflate(weights: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """The video model's whole state dict, and the names in it that are the model's own."""
    own = model.state_dict()
    # A plain twin gives every checkpoint timm knows the image model's names, gammas folded.
    plain = {name: getattr(WITHOUT, name) for name in METHOD_KEYWORDS}
    image = checkpoint_filter_fn(weights, image_twin(model, device="meta", **plain))
    if "patch_embed.proj.weight" not in image or image["patch_embed.proj.weight"].ndim != 4:
        raise ValueError(
            "these are not the weights of an image model: patch_embed.proj.weight "
            f"[D, C, patch, patch] is missing; they start with {list(weights)[:3]}"
        )
    patch = image["patch_embed.proj.weight"]
    if patch.shape[1] != model.in_chans:
        _logger.info("adapting %d input channels to %d", patch.shape[1], model.in_chans)
        patch = adapt_input_conv(model.in_chans, patch, base_chans=patch.shape[1])
    frames = model.patch_embed.tubelet_size
    image["patch_embed.proj.weight"] = patch.unsqueeze(2).repeat(1, 1, frames, 1, 1) / frames

    dropped = {"cls_token", "reg_token"} - own.keys()  # what the video model is without
    dropped |= {n for n in ("head.weight", "head.bias") if _shape(image, n) != _shape(own, n)}
    for name in dropped:
        image.pop(name, None)
    if model.attention == "divided":
        image.update(_time_attention(image))

    wrong = [n for n in image if _shape(image, n) != _shape(own, n)]
    missing = [n for n in own if n not in image and ".preproj." not in n and n not in dropped]
    if wrong or missing:
        name = (wrong or missing)[0]
        raise ValueError(
            f"these weights are not of this model's image model: {len(wrong) + len(missing)} "
            f"tensors do not fit, first {name!r}: {_shape(image, name)} in the weights, "
            f"{_shape(own, name)} in the model. It takes rotary ViTs of its own width and depth, "
            "without position embeddings, with a class token if it has one"
        )
    return {**own, **image}, [n for n in own if n not in image or "temporal_attn.proj" in n]


def _time_attention(image: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads as the image model's attention does; writes nothing yet."""
    weights = {}
    for name, tensor in image.items():
        found = re.fullmatch(r"(blocks\.\d+)\.(norm|attn)1?\.(?!preproj)(.+)", name)
        if found:
            block, module, rest = found.groups()
            silent = module == "attn" and rest.startswith("proj.")
            weights[f"{block}.temporal_{module}.{rest}"] = (
                torch.zeros_like(tensor) if silent else tensor
            )
    return weights


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


@dataclasses.dataclass(frozen=True)
class StaticClipReport:
    """How far a video model is from the image model on static clips, by cause.

    Differences are of the pooled features before the head: the largest, over the largest feature.

    Args:
        steps: (cause, difference that is left once it and those before it are taken away); the
            first is the model as built.
    """

    steps: tuple[tuple[str, float], ...]

    @property
    def difference(self) -> float:
        """That of the model as built."""
        return self.steps[0][1]

    def __str__(self) -> str:
        return "\n".join(f"{difference:.1e}  {cause}" for cause, difference in self.steps)


@torch.no_grad()
def static_clip_report(
    model: nn.Module, image_model: nn.Module, images: Tensor, frames: int | None = None
) -> StaticClipReport:
    """Compare a video model on one repeated frame with an image model on that frame.

    Each known cause of a difference is taken away in turn, and the difference measured again.

    Args:
        model, image_model: both are put into eval mode for the comparison.
        images: [B, C, H, W].
        frames: length of the clip; None is the model's own.
    """
    frames = model.num_frames if frames is None else frames
    tubelet = model.patch_embed.tubelet_size

    def difference(count: int) -> float:
        clips = images.unsqueeze(2).expand(-1, -1, count, -1, -1)
        found = model.forward_head(model.forward_features(clips), pre_logits=True)
        return ((found - expected).abs().max() / expected.abs().max()).item()

    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluating(model, image_model))
        expected = image_model.forward_head(image_model.forward_features(images), pre_logits=True)
        steps = [("as built", difference(frames))]
        times = [b.temporal_attn for b in model.blocks if hasattr(b, "temporal_attn")]
        if times:
            for attention in times:
                handle = attention.register_forward_hook(lambda *hook: torch.zeros_like(hook[2]))
                stack.callback(handle.remove)
            steps.append(("without time attention, its skip included", difference(frames)))
        elif model.rope_time:
            model.rope_time = False
            stack.callback(setattr, model, "rope_time", True)
            cause = "without time's rotation, whose pairs turn with x and y in the image model"
            steps.append((cause, difference(frames)))
        if not times and model.num_prefix_tokens and frames > tubelet:
            cause = (
                "with one tubelet in time: in joint attention the class token is one key among "
                f"{frames // tubelet} times as many patches"
            )
            steps.append((cause, difference(tubelet)))
    return StaticClipReport(tuple(steps))
