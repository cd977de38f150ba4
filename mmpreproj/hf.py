"""Models of transformers that carry the method, whole: what their folders hold, and loading them.

A folder of `save_pretrained` holds the model as transformers writes it, with the new parameters
among the others, so that a Trainer resumes; beside it the folder of `mmpreproj.save`, which says
what was attached; and in config.json a mark that makes transformers' own from_pretrained refuse:
it would take the base alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmpreproj.card import write_card
from mmpreproj.files import parse_json, write_whole
from mmpreproj.folders import CONFIG_FILE, read_folder
from mmpreproj.hub_cache import local_snapshot
from mmpreproj.messages import listed, need
from mmpreproj.saving import BESIDE, load, write

__all__ = ["from_pretrained"]

# The name of the weights' file in config.json: transformers shows it when it is no file's name.
MARK = "transformers_weights"
REFUSAL = (
    "none that transformers can read: this model carries mmpreproj's method. Load it with "
    "`import mmpreproj; mmpreproj.from_pretrained(FOLDER_OR_NAME)`"
)


def from_pretrained(
    source: str | os.PathLike[str],
    *,
    is_trainable: bool = False,
    allow_other_base: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """The trained model of a folder, or of a name on Hugging Face's hub, in eval mode.

    Args:
        source: what `save_pretrained` of a model with the method wrote (a Trainer's checkpoint,
            say); or an adapter folder, of `mmpreproj.save` or of PEFT, that names its base.
        is_trainable, allow_other_base: as `load` takes them.
        revision: branch, tag or commit of a hub name.
        kwargs: for from_pretrained of transformers (dtype, device_map, quantization_config …), or
            for timm.create_model where the base is one of timm's.

    Raises:
        FileNotFoundError: if there is no such folder, or it lacks a file.
        ConnectionError: if a hub name is neither in the cache nor to be reached.
        ValueError: if the base cannot be built without code of its own, or as `load` raises.
    """
    folder = local_snapshot(os.fspath(source), revision)
    whole = (folder / "config.json").is_file()
    model = _whole(folder, kwargs) if whole else _base(folder, kwargs)
    load(model, folder, allow_other_base, is_trainable=is_trainable)
    if whole:  # what is saved from now on still goes onto the first base
        model.name_or_path = model.config.name_or_path = read_folder(folder).base.get("name") or ""
    return model.eval()


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is what `save_pretrained` of a model with the method wrote."""
    path = Path(folder, "config.json")
    return path.is_file() and "mmpreproj" in str(parse_json(path.read_bytes(), path).get(MARK))


def _whole(folder: Path, kwargs: Mapping[str, Any]) -> nn.Module:
    if not is_whole(folder):
        raise ValueError(
            f"{folder} was not saved with the method by save_pretrained: transformers' own "
            "from_pretrained loads it"
        )
    transformers = need("transformers", "from_pretrained", "text")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    vars(config).pop(MARK, None)
    (name,) = config.architectures or ("",)
    cls = _class(transformers, name, folder)
    renamed = {r"\.base_layer\.": "."} if (folder / BESIDE).is_dir() else None
    with _quiet(transformers):
        model, told = cls.from_pretrained(
            folder, config=config, key_mapping=renamed, output_loading_info=True, **kwargs
        )
    missing = [*told["missing_keys"], *map(str, told["mismatched_keys"])]
    unknown = [k for k in told["unexpected_keys"] if ".preproj." not in k and ".lora_" not in k]
    if missing or unknown:
        raise ValueError(
            f"the weights of {folder} do not make up its {name}: missing or of another shape: "
            f"{listed(missing) or 'none'}; unknown: {listed(unknown) or 'none'}"
        )
    return model


def _base(folder: Path, kwargs: dict[str, Any]) -> nn.Module:
    held = read_folder(folder)
    base = held.base
    name, architecture = base.get("name"), str(base.get("architecture") or "")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{folder} does not name its base: build it, then mmpreproj.load(base, …)")
    if name.startswith("package:") or name.endswith(".gguf"):
        from mmpreproj.backbones.lm import load_language_model

        return load_language_model(name, **kwargs).model
    transformers = need("transformers", f"the base of {folder}", "text")
    if not hasattr(transformers, architecture):
        import timm

        classifier = getattr(timm.models.get_pretrained_cfg(name), "classifier", None)
        head = held.tensors.get(f"{classifier}.weight")
        own = {} if head is None else {"num_classes": len(head)}
        return timm.create_model(name, **{"pretrained": True, **own, **kwargs})
    if is_whole(name):
        return _whole(Path(name), kwargs)
    return _class(transformers, architecture, folder).from_pretrained(name, **kwargs)


def _class(transformers: Any, name: str, folder: Path) -> type:
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise ValueError(
            f"{folder} names {name!r}, which is no model of transformers: build the base in your "
            "own way, then mmpreproj.load(base, folder)"
        )
    return found


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the report of unexpected keys: they are looked at here."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def add_method(
    model: nn.Module,
    folder: str | os.PathLike[str],
    state: Mapping[str, Tensor] | None,
    here: bool,
) -> None:
    """The folder of `mmpreproj.save` beside what save_pretrained writes."""
    if state is not None and not state:  # DeepSpeed's, which has written the parameters elsewhere
        return
    write(model, Path(folder), state=state, here=here)
    if here:
        warnings.warn(
            f"{folder} holds a model with mmpreproj's method: load it with mmpreproj."
            "from_pretrained, for transformers' own from_pretrained refuses it",
            stacklevel=4,
        )


def mark(folder: str | os.PathLike[str]) -> None:
    """Make transformers refuse what it would load without the method, and renew the card."""
    path = Path(folder, "config.json")
    if path.is_file():  # not of what transformers saves as PEFT's
        config = parse_json(path.read_bytes(), path)
        write_whole(path, json.dumps({**config, MARK: REFUSAL}, indent=2, sort_keys=True) + "\n")
    if Path(folder, CONFIG_FILE).is_file():
        write_card(Path(folder), read_folder(Path(folder)), {}, "whole")
        for own in (*Path(folder).glob("preproj.*"), *Path(folder).glob(BESIDE)):
            os.utime(own)  # transformers uploads what is newer than its own beginning
