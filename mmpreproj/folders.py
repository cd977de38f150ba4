"""The two formats of an adapter folder: ours, and PEFT's with `PreProjPeftConfig`.

Both are safetensors and JSON, and read without PEFT.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from mmpreproj.files import parse_json, write_whole
from mmpreproj.messages import about, listed, short
from mmpreproj.preproj import PreProjConfig

__all__ = ["CONFIG_FILE", "FORMAT", "PEFT_CONFIG", "PEFT_PREFIX", "PEFT_WEIGHTS", "WEIGHTS_FILE"]
__all__ += ["Folder", "read_folder", "write_peft"]

WEIGHTS_FILE = "preproj.safetensors"
CONFIG_FILE = "preproj.json"
FORMAT = 1
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."


@dataclasses.dataclass
class Folder:
    """What an adapter folder holds.

    Args:
        config: what was attached.
        also: paths of the base that trained, too.
        base: name, architecture, width, depth and fingerprint of the base; what PEFT's format
            does not say is missing.
        tensors: by their names in the attached model.
        format: "mmpreproj" or "peft".
    """

    config: PreProjConfig
    also: list[str]
    base: dict[str, Any]
    tensors: dict[str, Tensor]
    format: str = "mmpreproj"

    def to_dict(self) -> dict[str, Any]:
        """What `preproj.json` holds."""
        config = self.config.to_dict()
        return {"format": FORMAT, "config": config, "also": self.also, "base": self.base}


def read_folder(folder: Path) -> Folder:
    """What a folder of either format holds.

    Raises:
        FileNotFoundError: if it lacks a file, with what it is instead.
        ValueError: if a file cannot be read, or holds the adapter of another method.
    """
    if not (folder / CONFIG_FILE).is_file() and (folder / PEFT_CONFIG).is_file():
        with about(folder):
            return _read_peft(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            below = [
                p.parent.name for n in (CONFIG_FILE, PEFT_CONFIG) for p in folder.glob(f"*/{n}")
            ]
            hint = f"; there is one in {listed(sorted(below))}" if below else ""
            raise FileNotFoundError(
                f"{folder} has no {name}: load takes the folder that mmpreproj.save wrote, or one "
                f"that PEFT wrote of this method{hint}"
            )
    with about(folder):
        described = parse_json((folder / CONFIG_FILE).read_bytes(), CONFIG_FILE)
        if not isinstance(described, dict):
            raise ValueError(f"{CONFIG_FILE} holds {short(described)}, which is no object")
        found = described.get("format")
        if found != FORMAT:
            raise ValueError(f"format {short(found)}, this version of mmpreproj reads {FORMAT}")
        missing = {"config", "also", "base"} - set(described)
        if missing:
            raise ValueError(f"no {sorted(missing)}")
        also = described["also"]
        for name, holds, what in (
            ("config", isinstance(described["config"], dict), "an object"),
            ("base", isinstance(described["base"], dict), "an object"),
            ("also", isinstance(also, list) and all(isinstance(x, str) for x in also), "paths"),
        ):
            if not holds:
                raise ValueError(f"{name} must be {what}, found {short(described[name])}")
        config = PreProjConfig.from_dict(described["config"])
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
        return Folder(config, also, described["base"], tensors)


def _read_peft(folder: Path) -> Folder:
    described = parse_json((folder / PEFT_CONFIG).read_bytes(), PEFT_CONFIG)
    kind = described.get("peft_type") if isinstance(described, dict) else described
    if kind != "PREPROJ":
        raise ValueError(
            f"it is an adapter of PEFT's {short(kind)}, not of this method: "
            "peft.PeftModel.from_pretrained(model, folder) loads it"
        )
    if not (folder / PEFT_WEIGHTS).is_file():
        raise ValueError(
            f"no {PEFT_WEIGHTS} (an adapter_model.bin may run code: save it as safetensors)"
        )
    tensors = {}
    for key, tensor in safetensors.torch.load_file(folder / PEFT_WEIGHTS).items():
        name = key.removeprefix(PEFT_PREFIX).replace(".preproj.by_name.", ".preproj.")
        tensors[name] = tensor
    fields = [field.name for field in dataclasses.fields(PreProjConfig)]
    config = PreProjConfig(**{name: described[name] for name in fields if name in described})
    new = {tensor.dtype for name, tensor in tensors.items() if ".preproj." in name}
    if config.dtype is None and len(new) == 1:  # PEFT's need not be the base's
        config = dataclasses.replace(config, dtype=new.pop())
    also = sorted({name.rpartition(".")[0] for name in tensors if ".preproj." not in name})
    base = described.get("base")
    if not isinstance(base, dict):
        base = {"name": described.get("base_model_name_or_path")}
    return Folder(config, also, base, tensors, "peft")


def write_peft(folder: Path, held: Folder) -> None:
    """Write the files that PEFT reads.

    Raises:
        ValueError: if a single parameter was trained too, which PEFT has no words for.
    """
    tensors, modules = {}, set()
    for name, tensor in held.tensors.items():
        tensors[PEFT_PREFIX + name.replace(".preproj.", ".preproj.by_name.")] = tensor
        if ".preproj." not in name:
            modules.add(name.rpartition(".")[0])
    alone = sorted(path for path in held.also if path in held.tensors)
    if alone:
        raise ValueError(f"PEFT's modules_to_save takes modules, and {alone[0]!r} is a parameter")
    causal = str(held.base.get("architecture")).endswith("ForCausalLM")
    described = {
        **held.config.to_dict(),
        "peft_type": "PREPROJ",
        "base": held.base,
        "base_model_name_or_path": held.base.get("name"),
        "inference_mode": True,
        "modules_to_save": sorted(modules) or None,
        "task_type": "CAUSAL_LM" if causal else None,
    }
    write_whole(folder / PEFT_WEIGHTS, safetensors.torch.save(tensors, {"format": "pt"}))
    write_whole(folder / PEFT_CONFIG, json.dumps(described, indent=2, sort_keys=True) + "\n")
