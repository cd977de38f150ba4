"""The method's settings as a PEFT config, and the rule for adapters of several methods."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig

from mmpreproj.card import write_card
from mmpreproj.files import parse_json, write_whole
from mmpreproj.folders import PEFT_CONFIG, PEFT_WEIGHTS, read_folder
from mmpreproj.preproj import PreProjConfig

__all__ = ["AdapterConfigs", "PreProjPeftConfig", "PreProjPeftType", "check_name_is_free"]


class PreProjPeftType(str, enum.Enum):
    """An entry like those of PEFT's own list of methods, which is closed."""

    PREPROJ = "PREPROJ"


@dataclasses.dataclass
class PreProjPeftConfig(PeftConfig):
    """`mmpreproj.PreProjConfig` as a PEFT config: the same fields, and PEFT's own.

    Args:
        expansion, pre_projection, content_skip, layers, init_std, skip_rank, sites, activation,
            attention, join, within: as in `PreProjConfig`.
        dtype: as in `PreProjConfig`; PEFT raises float16 and bfloat16 to float32 afterwards unless
            told `autocast_adapter_dtype=False`.
        modules_to_save: modules, such as ["head"], of which each adapter trains a copy that is
            saved beside the new parameters; PEFT matches the ends of their paths.
        target_modules: PEFT looks for it. Leave it None: where the method goes is known.
        base: what a saved adapter's base was, with a fingerprint of its weights: another base is
            refused. Saving writes it; set it to None to load onto other weights.
        beside: what a saved adapter had beside it on the same model, of other methods. Saving
            writes it, and loading says so.

    Raises:
        ValueError: naming the field, what it holds and what it takes.
    """

    expansion: float = 1.25
    pre_projection: bool = True
    content_skip: bool = True
    layers: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    init_std: float = 0.0
    skip_rank: int | None = None
    sites: str = "attention"
    activation: str = "silu"
    dtype: str | None = None
    attention: str | Sequence[str] | None = None
    join: str | Sequence[str | None] | None = None
    within: str | None = None
    modules_to_save: list[str] | None = None
    target_modules: None = None
    base: dict[str, Any] | None = None
    beside: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PreProjPeftType.PREPROJ
        if self.target_modules is not None:
            raise ValueError(
                f"target_modules={self.target_modules!r}: the method finds the self-attentions by "
                "itself; choose blocks with layers, or give paths by hand in attention and join"
            )
        config = self.preproj_config()
        if not config.enabled:
            raise ValueError("nothing to add: pre_projection and content_skip are both False")
        self.layers = config.to_dict()["layers"]
        if isinstance(self.modules_to_save, str):  # PEFT would take it letter by letter
            self.modules_to_save = [self.modules_to_save]

    def to_dict(self) -> dict[str, Any]:
        """The fields; `base` and `beside` are those of the model that is being saved."""
        return super().to_dict() | getattr(self, "of_model", {})

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """As PEFT's, and what it takes to load the adapter in the card beside it."""
        super().save_pretrained(save_directory, **kwargs)
        _mark_beside(Path(save_directory))
        if Path(save_directory, PEFT_WEIGHTS).is_file():
            write_card(Path(save_directory), read_folder(Path(save_directory)), {}, "peft")

    def preproj_config(self) -> PreProjConfig:
        """The part that is the method's own."""
        names = [field.name for field in dataclasses.fields(PreProjConfig)]
        return PreProjConfig(**{name: getattr(self, name) for name in names})


def _mark_beside(folder: Path) -> None:
    """PEFT puts the "default" adapter into the folder above: where that is LoRA, loading it alone
    must not be silent. PEFT warns of keys that it does not know, and shows them."""
    above = folder.parent / PEFT_CONFIG
    if above.is_file():
        described = parse_json(above.read_bytes(), above)
        if described.get("peft_type") != PreProjPeftType.PREPROJ:
            note = f"mmpreproj: load_adapter({folder.name!r}) is needed, too: the model had both"
            write_whole(above, json.dumps({**described, note: True}, indent=2, sort_keys=True))


class AdapterConfigs(dict[str, PeftConfig]):
    """A model's adapters, name to config.

    A method that is added to the model later writes its own into the same dict: under a name that
    is taken it would replace the config here unseen.
    """

    def __setitem__(self, name: str, config: PeftConfig) -> None:
        check_name_is_free(self, name, config)
        saved = [n for n, own in self.items() if getattr(own, "modules_to_save", None)]
        if saved and config.peft_type != PreProjPeftType.PREPROJ:
            raise ValueError(
                f"adapter {saved[0]!r} has modules_to_save, which a method that comes later would "
                f"switch off: give the model {_kind(config)} first, then PreProjPeftConfig"
            )
        super().__setitem__(name, config)

    def update(self, configs: Mapping[str, PeftConfig]) -> None:
        for name, config in configs.items():
            self[name] = config


def check_name_is_free(taken: Mapping[str, PeftConfig], name: str, config: PeftConfig) -> None:
    """Raise ValueError if an adapter of another method has the name."""
    if name in taken and taken[name].peft_type != config.peft_type:
        raise ValueError(
            f"the model has an adapter {name!r} of {_kind(taken[name])} already; give the one of "
            f"{_kind(config)} a name of its own: get_peft_model(..., adapter_name='second')"
        )


def _kind(config: PeftConfig) -> str:
    return getattr(config.peft_type, "value", config.peft_type)
