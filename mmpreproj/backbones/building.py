"""A model ready to train: created, given weights, attached to, frozen. Errors come early.

Models are timm's, by timm's names (`vit_preproj_base`, `hf-hub:…`), or image and video classifiers
of transformers: `hf:` before a hub name or a folder (`mmpreproj.backbones.hf_vision`).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from timm.data import resolve_model_data_config
from timm.models import get_model_input_config, load_state_dict
from torch import Tensor, nn

from mmpreproj.attach import attach, freeze_base, preproj_modules
from mmpreproj.hub_cache import require_hub
from mmpreproj.messages import nearest
from mmpreproj.preproj import PreProjConfig

__all__ = [
    "build_model",
    "check_image_size",
    "check_kind",
    "check_name",
    "classifier_names",
    "freeze",
    "input_config",
    "num_frames",
    "set_frozen_modes",
]

HUGGING_FACE = "hf:"
# What timm looks for in a hub repository
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
# What starts a name that timm takes from a repository or a folder, not from its registry
REPOSITORIES = ("hf-hub:", "hf_hub:", "local-dir:")


def build_model(
    name: str,
    num_classes: int,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    weights: str | os.PathLike[str] | None = None,
    preproj: PreProjConfig | None = None,
) -> nn.Module:
    """Create a model and attach the method to it, after its weights are there.

    Args:
        name: any name that timm.create_model takes, or "hf:" and a hub name or folder of
            transformers.
        num_classes: width of the classifier. Another one than the weights': fresh.
        model_args: further keywords of the model; of a transformers model, fields of its
            configuration.
        pretrained: take the weights that timm names, from the hub or its local cache; of a
            transformers model, those beside its configuration.
        weights: for timm's models, take them from this local file (safetensors, a state dict, or a
            checkpoint of `ImageClassifier`), resized as timm resizes its own. No code in the file
            is run.
        preproj: what to attach; None attaches nothing.

    Raises:
        ValueError: for an unknown model, an argument it does not take, weights that do not fit.
        FileNotFoundError: if `weights` is not there.
        ConnectionError: if pretrained weights are neither cached nor reachable.
    """
    check_name(name)
    arguments = dict(model_args or {})
    for key in ("num_classes", "pretrained"):
        if key in arguments:
            raise ValueError(f"model_args holds {key}: give it as the module's own {key} instead")
    method: Mapping[str, Tensor] = {}
    if name.startswith(HUGGING_FACE):
        if weights is not None:
            raise ValueError(
                f"weights={str(weights)!r} go with timm's models; for transformers' give the "
                f"folder that holds config.json and the weights, as model={HUGGING_FACE}FOLDER "
                "with pretrained: true"
            )
        from mmpreproj.backbones.hf_vision import create_hf_classifier

        found = name.removeprefix(HUGGING_FACE)
        model = create_hf_classifier(found, num_classes, arguments, pretrained)
    else:
        source = None
        if weights is not None:
            source, method = local_source(name, Path(weights))
        elif pretrained:
            source = hub_source(name)
        model = _create(name, {**arguments, "num_classes": num_classes}, source, weights)
    if preproj is not None:
        if preproj_modules(model):
            raise ValueError(
                f"preproj= attaches the method, but {name} carries it already; set its options in "
                "model_args instead (expansion, layers, ...), or leave preproj out"
            )
        attach(model, preproj)
    if method:
        fill_method(model, method, weights)
    return model


def check_name(name: str) -> None:
    """Raises ValueError, with close matches, if timm has no model of that name.

    What stands behind "hf:", "hf-hub:" or "local-dir:" is looked for when the model is built.
    """
    if name.startswith(HUGGING_FACE) and name != HUGGING_FACE:
        return
    if name.startswith(REPOSITORIES) or timm.is_model(name.split(".")[0]):
        return
    if "/" in name:
        raise ValueError(
            f"model={name!r} is not a timm model; for one of transformers, a hub name or a folder, "
            f"write {HUGGING_FACE}{name}, for a timm repository hf-hub:{name}"
        )
    near = nearest(name.split(".")[0], timm.list_models(), most=5, cutoff=0.5)
    hint = f"close matches: {', '.join(near)}" if near else "timm.list_models() gives all names"
    raise ValueError(f"model={name!r} is not a timm model; {hint}")


def with_whole_path(name: str) -> str:
    """The name; a local folder behind "hf:" from the root on, so that a run finds it anywhere."""
    folder = Path(name.removeprefix(HUGGING_FACE)).expanduser()
    local = name.startswith(HUGGING_FACE) and folder.is_dir()
    return f"{HUGGING_FACE}{folder.resolve()}" if local else name


def classifier_names(model: nn.Module) -> list[str]:
    """Paths of the classifier's modules (`head`, say), as its timm configuration names them."""
    named = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    modules = dict(model.named_modules())
    found = [path for path in _each(named) if path in modules]
    if not found and hasattr(model, "get_classifier"):
        heads = _each(model.get_classifier())
        found = [path for path, module in modules.items() if any(module is head for head in heads)]
    return [path for path in found if list(modules[path].parameters())]  # an Identity has none


def _each(found: Any) -> tuple[Any, ...]:
    """timm gives one of a thing, several, or None."""
    return tuple(found) if isinstance(found, tuple | list) else () if found is None else (found,)


def freeze(model: nn.Module) -> None:
    """Leave the new parameters and the classifier trainable; without the method, the classifier.

    Raises:
        ValueError: if nothing would be left to train.
    """
    heads = classifier_names(model)
    if not heads and not preproj_modules(model):
        raise ValueError(
            f"freeze_base on {type(model).__name__}: it has no classifier and no preproj= to train"
        )
    freeze_base(model, also=heads)


def set_frozen_modes(model: nn.Module) -> None:
    """Put a frozen model in train mode: only what trains leaves eval mode.

    The base's dropout, drop path and batch statistics stay as in evaluation. `head_drop`, timm's
    dropout before the classifier, belongs to the classifier.
    """
    model.eval()
    if hasattr(model, "train_blocks"):  # for gradient checkpointing alone
        model.train_blocks()
    for preproj in preproj_modules(model).values():
        preproj.train()
    for path in classifier_names(model):
        model.get_submodule(path).train()
    if isinstance(getattr(model, "head_drop", None), nn.Module):
        model.head_drop.train()


def input_config(model: nn.Module) -> dict[str, Any]:
    """The model's input as plain types: input_size (C, H, W), or (C, T, H, W) for clips,
    interpolation, mean, std, crop_pct, crop_mode. A grey model gets the mean of its colour model's
    channel statistics."""
    channels, *size = get_model_input_config(model)["input_size"]
    config = resolve_model_data_config(model, args={"input_size": (channels, *size)})
    for key in ("mean", "std"):
        values = [float(value) for value in config[key]]
        if channels == 1 and len(values) != 1:
            values = [sum(values) / len(values)]
        config[key] = values
    frames = num_frames(model)
    sizes = (channels, *size) if frames is None else (channels, frames, *size)
    return {**config, "input_size": [int(size) for size in sizes]}


def num_frames(model: nn.Module) -> int | None:
    """Frames of the clips that a video model is meant for; None for an image model."""
    return getattr(model, "num_frames", None)


def check_kind(model: nn.Module, data: str, gives: str | None) -> None:
    """Raises ValueError if a data module gives images to a video model, or clips to another.

    Args:
        data: the data module's name.
        gives: "images" or "clips"; None: not known.
    """
    takes, kind = "images" if num_frames(model) is None else "clips", type(model).__name__
    goes = {
        "images": "an image model; VideoDataModule gives clips",
        "clips": "a video model, such as video_vit_preproj_small",
    }
    if gives in goes and gives != takes:
        raise ValueError(
            f"the data give {gives}, {kind} takes {takes}: with {data} goes {goes[gives]}"
        )


def check_image_size(model: nn.Module, used: Mapping[str, Any] | None) -> None:
    """Raises ValueError, naming both, if the data's images or clips are not what the model takes.

    Args:
        used: the data's input configuration, input_size (C, H, W) or (C, T, H, W).
    """
    if not used or not used.get("input_size"):
        return
    _, *frames, height, width = used["input_size"]
    check_kind(model, "them", "clips" if frames else "images")
    if hasattr(model, "check_input_size"):
        model.check_input_size(*frames, height, width)
    elif frames and hasattr(model.patch_embed, "check"):
        model.patch_embed.check(*frames, height, width)
    config = get_model_input_config(model)
    wanted = tuple(config["input_size"])[-2:]
    if config.get("fixed_input_size") and (height, width) != wanted:
        raise ValueError(
            f"the data give images of {height}x{width} px, the model takes "
            f"{wanted[0]}x{wanted[1]} only; leave data img_size out, or set model_args "
            f"img_size={height} (or dynamic_img_size=true, where the model has it)"
        )


def _create(
    name: str,
    arguments: dict[str, Any],
    source: dict[str, Any] | None,
    weights: str | os.PathLike[str] | None,
) -> nn.Module:
    told: dict[str, list[str]] = {"Missing": [], "Unexpected": []}

    def note(record: logging.LogRecord) -> bool:
        found = re.match(r"(Missing|Unexpected) keys \((.*?)\) ", record.getMessage())
        if found:
            told[found[1]] += found[2].split(", ")
        return record.levelno >= shown

    builder = logging.getLogger("timm.models._builder")
    level, shown = builder.level, builder.getEffectiveLevel()
    builder.addFilter(note)
    builder.setLevel(min(shown, logging.INFO))  # at which timm tells of keys, and nowhere else
    try:
        model = timm.create_model(
            name, pretrained=source is not None, pretrained_cfg_overlay=source, **arguments
        )
    except TypeError as error:
        shown = {key: value for key, value in arguments.items() if key != "num_classes"}
        raise ValueError(f"model={name!r} does not take model_args={shown}: {error}") from error
    except (RuntimeError, KeyError) as error:
        if weights is None:
            raise ValueError(f"model={name!r} with model_args={arguments}: {error}") from error
        message = str(error)[:600]
        raise ValueError(f"weights={str(weights)!r} do not fit {name}: {message}") from error
    finally:
        builder.removeFilter(note)
        builder.setLevel(level)
    (getattr(model, "pretrained_cfg", None) or {}).pop("state_dict", None)  # timm keeps it
    heads = tuple(classifier_names(model))
    lost = [key for key in told["Unexpected"] if ".preproj." in key]
    if lost:
        raise ValueError(
            f"weights={str(weights)!r} hold {len(lost)} tensors of the method that {name} with "
            f"model_args={arguments} has no place for, such as {lost[0]!r}"
        )
    missing = [
        key for key in told["Missing"] if not key.startswith(heads) and ".preproj." not in key
    ]
    if missing:
        raise ValueError(
            f"the weights for {name} ({weights or 'pretrained'}) lack {len(missing)} tensors of "
            f"the model, such as {missing[0]!r}; is it a checkpoint of another architecture?"
        )
    return model


def fill_method(
    model: nn.Module, method: Mapping[str, Tensor], weights: str | os.PathLike[str] | None
) -> None:
    """Load a checkpoint's tensors of the method into a model that it was attached to."""
    own = {name: p.shape for name, p in model.named_parameters() if ".preproj." in name}
    given = {name: tensor.shape for name, tensor in method.items()}
    wrong = sorted({name for name, _ in own.items() ^ given.items()})
    if wrong:
        raise ValueError(
            f"weights={str(weights)!r} hold the method, in another form than this model has it: "
            f"{wrong[0]!r} and {len(wrong) - 1} others do not agree. Give the preproj: settings "
            "that the checkpoint was trained with"
        )
    model.load_state_dict(method, strict=False)


def local_source(name: str, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """timm's pretrained_cfg for a local file, and the method's tensors if they are to be attached.

    A timm model knows nothing of the method; `vit_preproj_*` and the like load it by themselves.
    """
    if not path.is_file():
        raise FileNotFoundError(f"weights={str(path)!r}: there is no such file")
    if path.suffix == ".npz":
        return {"file": str(path), "custom_load": True}, {}
    try:
        tensors = load_state_dict(str(path), device="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"weights={str(path)!r} cannot be read as safetensors or as a PyTorch state dict "
            f"(without running code): {error}"
        ) from error
    own = {key: t for key, t in tensors.items() if key.startswith(("model.", "ema.module."))}
    if path.suffix == ".ckpt" and own:  # a run of ours: the weights that were evaluated
        prefix = "ema.module." if any(key.startswith("ema.") for key in own) else "model."
        tensors = {key.removeprefix(prefix): t for key, t in own.items() if key.startswith(prefix)}
    method: dict[str, Tensor] = {}
    if not timm.models.model_entrypoint(name.split(".")[0]).__module__.startswith("mmpreproj."):
        method = {key: tensor for key, tensor in tensors.items() if ".preproj." in key}
        tensors = {key: tensor for key, tensor in tensors.items() if key not in method}
    overlay: dict[str, Any] = {"state_dict": tensors, "custom_load": False}
    for head in _each(getattr(timm.get_pretrained_cfg(name), "classifier", None)):
        weight = tensors.get(f"{head}.weight")
        if isinstance(weight, Tensor):  # timm drops a head of another width by this number
            overlay["num_classes"] = weight.shape[0]
    return overlay, method


def hub_source(name: str) -> dict[str, Any]:
    """timm's pretrained_cfg for its own weights: from the cache if there, else the hub's."""
    if name.startswith(REPOSITORIES):
        return {}
    configuration = timm.get_pretrained_cfg(name)
    if configuration is None or not configuration.has_weights:
        tagged = timm.list_pretrained(f"{name.split('.')[0]}*")[:5]
        hint = f"; with weights: {', '.join(tagged)}" if tagged else ""
        raise ValueError(
            f"timm has no pretrained weights for {name}{hint}; set pretrained: false, or weights: "
            "to a local file"
        )
    hub_id = configuration.hf_hub_id
    if not hub_id:
        return {}
    from huggingface_hub import try_to_load_from_cache

    for filename in WEIGHTS_FILES:
        cached = try_to_load_from_cache(hub_id, filename)
        if isinstance(cached, str):
            return {"file": cached, "custom_load": False}
    require_hub(
        f"pretrained weights of {name} ({hub_id})",
        f"Download {WEIGHTS_FILES[0]} of {hub_id} on a machine with a network, then: "
        "--model.pretrained false --model.weights FILE",
    )
    return {}
