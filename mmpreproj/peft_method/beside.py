"""LoRA, or another of PEFT's methods, on a model that `mmpreproj.attach` gave this one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from mmpreproj.attach import attachment_of, freeze_base, preproj_modules
from mmpreproj.files import parse_json, write_whole
from mmpreproj.folders import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS

__all__ = ["keep_apart", "load_beside", "save_beside"]


def keep_apart(model: nn.Module, configs: dict[str, PeftConfig]) -> None:
    """Take adapters out of the method's own layers, where "all-linear" puts them, and let it train.

    PEFT calls no hook before it changes a model, and freezes what is not its own.
    """
    for new in preproj_modules(model).values():
        for name, module in list(new.named_children()):
            if isinstance(module, BaseTunerLayer):
                setattr(new, name, module.get_base_layer())
    others = [p for p, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    for config in configs.values():
        targets = getattr(config, "target_modules", None)
        if isinstance(targets, set | list):
            config.target_modules = {
                target
                for target in targets
                if any(path == target or path.endswith(f".{target}") for path in others)
            }
    freeze_base(model, attachment_of(model).also)
    warnings.warn(
        "the model carries mmpreproj's method as well: its layers get no adapter and train on. "
        "mmpreproj.save writes both as one folder and mmpreproj.load reads it; a PeftModel's own "
        "save_pretrained, and so a Trainer's checkpoints of a PeftModel, hold PEFT's part alone "
        "(peft.inject_adapter_in_model makes none)",
        stacklevel=4,
    )


def save_beside(model: nn.Module, folder: Path, dtype: Any = None) -> None:
    """Write the adapter that PEFT has put into `model` as a folder of PEFT's.

    Raises:
        ValueError: if there are several.
    """
    configs: dict[str, PeftConfig] = model.peft_config
    if len(configs) > 1:
        raise ValueError(
            f"the model has {len(configs)} adapters of PEFT beside the method, {sorted(configs)}; "
            "one goes into a folder: delete the others, or save each by PEFT"
        )
    ((name, config),) = configs.items()
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {
        _prefixed(key): tensor.detach().to(dtype or tensor.dtype).cpu()
        for key, tensor in tensors.items()
    }
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    write_whole(folder / PEFT_WEIGHTS, safetensors.torch.save(tensors))
    config.save_pretrained(os.fspath(folder))


def load_beside(model: nn.Module, folder: Path, is_trainable: bool) -> None:
    """Put the adapter of `save_beside` into `model`, or fill it in where it has one.

    Raises:
        ValueError: if a tensor is missing, unknown or of another shape.
    """
    described = parse_json((folder / PEFT_CONFIG).read_bytes(), PEFT_CONFIG)
    if described.get("megatron_config"):
        raise ValueError(f"{folder} names a module to import (megatron_config), which is not done")
    tensors = safetensors.torch.load_file(folder / PEFT_WEIGHTS)
    if not hasattr(model, "peft_config"):
        config = peft.PeftConfig.from_pretrained(os.fspath(folder))
        config.inference_mode = not is_trainable
        with warnings.catch_warnings():  # what keep_apart says is known here
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(config, model)
    (name,) = model.peft_config
    in_float32 = all(tensor.dtype == torch.float32 for tensor in tensors.values())
    cast_adapter_dtype(model, name, in_float32)  # as a PeftModel has them on a bfloat16 base
    found = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    shapes = {_prefixed(k): tuple(t.shape) for k, t in found.items()}
    if shapes != {key: tuple(tensor.shape) for key, tensor in tensors.items()}:
        _take_out(model)
        wrong = sorted(set(shapes) ^ set(tensors)) or ["tensors of another shape"]
        raise ValueError(f"{folder} does not fit this model: {wrong[0]}")
    set_peft_model_state_dict(model, tensors, adapter_name=name)


def _prefixed(key: str) -> str:
    """A key as PEFT's files have it, whether the model is a PeftModel or not."""
    return f"{PEFT_PREFIX}{key.removeprefix(PEFT_PREFIX)}"


def _take_out(model: nn.Module) -> None:
    for path, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module.get_base_layer())
    del model.peft_config
