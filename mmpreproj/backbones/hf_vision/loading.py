"""Configurations and weights of Hugging Face vision models: found, changed, loaded and checked."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.backbones.hf_vision.families import (
    FAMILIES,
    InputShape,
    input_of,
    vision_config,
)
from mmpreproj.backbones.lm.lm_loading import check_loaded
from mmpreproj.hf import MARK
from mmpreproj.hub_cache import MODEL_FILES, Source, cached_snapshot, require_model
from mmpreproj.messages import listed, nearest, need

__all__ = [
    "TokensClassifier",
    "configured",
    "find_vision_source",
    "load_model",
    "new_model",
    "preprocessing",
    "read_config",
]

_logger = logging.getLogger(__name__)

# Names that timm's models and those of video share, and what some configurations call them.
_ALIASES = {
    "img_size": ("image_size", "crop_size"),
    "image_size": ("crop_size",),
    "in_chans": ("num_channels",),
    "num_frames": ("frames_per_clip",),
}
_WITHOUT_CLASSIFIER = "dinov3_vit"
# The classifier's own, and what decides the class.
_NOT_FIELDS = ("num_classes", "num_labels", "id2label", "label2id", "pretrained", "model_type")


def find_vision_source(name: str, weights: bool) -> Source:
    """What a name stands for. Nothing is downloaded.

    Args:
        weights: whether they are wanted, beside the configuration.

    Returns:
        A folder, which may be the hub's cache; or the hub name, where it is to be fetched.

    Raises:
        FileNotFoundError: if it is a path, and there is no folder with config.json.
        ConnectionError: if it is a hub name, neither in the cache nor to be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"hf:{name} has no config.json: give the folder that save_pretrained wrote"
            )
        return Source(name, "folder", str(path))
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise FileNotFoundError(
            f"hf:{name}: there is no such folder. A Hugging Face model is a hub name "
            "(hf:MCG-NJU/videomae-base), or a folder with config.json and model.safetensors"
        )
    # Named by its folder: by a hub name, transformers asks the hub whatever is in the cache.
    cached = cached_snapshot(name, *(MODEL_FILES if weights else MODEL_FILES[:1]))
    if cached is None:
        require_model(name)
    return Source(name, "hub", str(cached or name))


def read_config(source: Source) -> Any:
    """The configuration, of an architecture in FAMILIES. Raises: ValueError."""
    transformers = need("transformers", f"hf:{source.name}", "text")
    try:
        config = transformers.AutoConfig.from_pretrained(source.place, trust_remote_code=False)
        vars(config).pop(MARK, None)  # check_loaded says more of such a folder
    except Exception as error:  # each of the formats has errors of its own
        raise ValueError(
            f"hf:{source.name} has no configuration that transformers can use without running code "
            f"that comes with it (timm's repositories are model=hf-hub:NAME): {error}"
        ) from error
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"hf:{source.name} is of model_type {config.model_type!r}; supported are "
            f"{listed(sorted(FAMILIES), most=20)}. timm has more image models"
        )
    return config


def configured(config: Any, model_args: Mapping[str, Any], name: str) -> Any:
    """The configuration with other fields; those of the image tower where it has several.

    Raises:
        ValueError: for a field it does not have, a value it does not take, or sizes that do not go
            together.
    """
    vision = vision_config(config)
    known = set(type(vision)().to_dict()) - set(_NOT_FIELDS)
    changed: dict[str, Any] = {}
    for given, value in model_args.items():
        if given in _NOT_FIELDS:
            raise ValueError(f"model_args holds {given}: it is not the configuration's to say")
        names = [key for key in (given, *_ALIASES.get(given, ())) if key in known]
        if not names:
            near = nearest(given, known)
            hint = f"close matches: {', '.join(near)}" if near else "see its config.json"
            raise ValueError(
                f"model_args: the configuration of hf:{name} ({config.model_type}) has no field "
                f"{given!r}; {hint}"
            )
        if names[0] in changed:
            raise ValueError(f"model_args gives {names[0]} twice, once as {given}")
        changed[names[0]] = value
    own = InputShape.of(config).size
    try:
        new = type(vision).from_dict({**vision.to_dict(), **changed})
    except Exception as error:  # the strict dataclass's own
        raise ValueError(f"hf:{name} does not take model_args={dict(changed)}: {error}") from error
    if vision is config:
        config = new
    else:
        config.vision_config = new
    shape = InputShape.of(config)
    height, width = shape.size
    if height != width and not FAMILIES[config.model_type].oblong:
        raise ValueError(f"hf:{name} takes square images only, found {height}x{width} px")
    shape.check(f"hf:{name}", shape.frames, shape.size, own)
    if getattr(new, "attention_type", None) == "space_only":
        raise ValueError(
            f"hf:{name}: attention_type space_only gives logits for each frame, none for the clip; "
            "use divided_space_time or joint_space_time"
        )
    return config


def new_model(source: Source, config: Any) -> nn.Module:
    """A classifier with random weights, of torch's generator."""
    if source.kind == "folder" and any(Path(source.place).glob("*.safetensors")):
        _logger.info("hf:%s: pretrained is off, so its weights are not read", source.name)
    try:
        model = _auto(config).from_config(config, dtype=torch.float32)
    except Exception as error:  # each model has errors of its own
        raise ValueError(f"hf:{source.name} cannot be built: {error}") from error
    return _classifier(model)


def load_model(source: Source, config: Any) -> nn.Module:
    """A classifier with the source's weights; what they lack of the head is fresh.

    Raises:
        ValueError: if they lack anything else, or cannot be read without running code.
    """
    load = functools.partial(
        _auto(config).from_pretrained,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # checked below
        output_loading_info=True,
        trust_remote_code=False,
    )
    try:
        try:
            model, told = load(source.place)
        except OSError:
            if source.kind == "folder" or source.place == source.name:
                raise
            # some of its files are in the cache, not all
            require_model(source.name)
            model, told = load(source.name)
    except ConnectionError:
        raise
    except Exception as error:  # each of the formats has errors of its own
        raise ValueError(f"the weights of hf:{source.name} cannot be loaded: {error}") from error
    model = _classifier(model)
    _check_loaded(model, told, source.name)
    return model


def _check_loaded(model: nn.Module, told: Mapping[str, Any], name: str) -> None:
    """As for language models; but what is missing or misshapen of a whole part of the head was
    drawn at random, and stays so."""
    missing = set(told["missing_keys"])
    shapes = {key: pair for key, *pair in told["mismatched_keys"]}
    fresh = []
    for path in head_paths(model):
        own = {f"{path}.{key}" for key, _ in model.get_submodule(path).named_parameters()}
        if own and own <= missing | shapes.keys():
            fresh.append(path)
            missing -= own
            shapes = {key: pair for key, pair in shapes.items() if key not in own}
    wrong = [(key, *map(list, pair)) for key, pair in shapes.items()]
    check_loaded(
        f"hf:{name}",
        {**told, "missing_keys": missing, "mismatched_keys": wrong},
        hint=" (in the file, in the model; tables of positions are not resized: leave image_size "
        "and num_frames as in its config.json)",
    )
    unexpected = told["unexpected_keys"]
    _logger.info(
        "hf:%s: fresh are %s; %d tensors of the file are not used%s",
        *(name, ", ".join(fresh) or "none", len(unexpected)),
        f", such as {min(unexpected)}" if unexpected else "",
    )


def preprocessing(source: Source, video: bool) -> dict[str, Any]:
    """What the source's preprocessing file tells, as `input_of` does; {} where it has none."""
    kind = "video" if video else "image"
    auto = importlib.import_module(f"transformers.models.auto.{kind}_processing_auto")
    try:
        settings = getattr(auto, f"get_{kind}_processor_config")(source.place)
    except OSError as error:
        raise ValueError(
            f"the preprocessing file of hf:{source.name} cannot be read: {error}"
        ) from error
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"the preprocessing file of hf:{source.name} should hold a JSON object, it holds "
            f"{type(settings).__name__}"
        )
    return input_of(settings)


def _auto(config: Any) -> Any:
    """transformers' factory of the architecture's classifiers; of its base models, without any."""
    import transformers

    if config.model_type == _WITHOUT_CLASSIFIER:
        return transformers.AutoModel
    if FAMILIES[config.model_type].video:
        return transformers.AutoModelForVideoClassification
    return transformers.AutoModelForImageClassification


def _classifier(model: nn.Module) -> nn.Module:
    own = model.config.model_type == _WITHOUT_CLASSIFIER
    return TokensClassifier(model) if own else model


class TokensClassifier(nn.Module):
    """A linear classifier of the class token and the mean patch, as DINOv2 is evaluated, for
    DINOv3, of which transformers has no classifier."""

    base_model_prefix = "trunk"  # in the names of checkpoints

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.trunk = base_model
        config = base_model.config
        self.prefix = 1 + config.num_register_tokens
        self.classifier = linear(
            2 * config.hidden_size, config.num_labels, config.initializer_range
        )

    def forward(self, pixel_values: Tensor, **keywords: Any) -> Any:
        x = self.trunk(pixel_values, **keywords).last_hidden_state
        pooled = torch.cat([x[:, 0], x[:, self.prefix :].mean(1)], dim=1)
        return types.SimpleNamespace(logits=self.classifier(pooled))


def linear(dim: int, num_classes: int, std: float, **factory: Any) -> nn.Linear:
    """A classifier as transformers draws it."""
    new = nn.Linear(dim, num_classes, **factory)
    nn.init.trunc_normal_(new.weight, std=std)
    nn.init.zeros_(new.bias)
    return new


def head_paths(model: nn.Module) -> list[str]:
    """What stands outside the base model, and the pooler that BEiT has inside it."""
    base = model.base_model_prefix
    base = base if hasattr(model, base) else "vision_model"  # one tower of CLIP's or SigLIP's
    pooler = [f"{base}.pooler"] if getattr(model.get_submodule(base), "pooler", None) else []
    return pooler + [name for name, _ in model.named_children() if name != base]
