"""What can be had of Hugging Face's hub: from its cache, over the network, or not at all; told in
seconds."""

from __future__ import annotations

import dataclasses
import re
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Literal

from mmpreproj.messages import need

__all__ = ["Source", "cached_snapshot", "hub_dataset", "local_snapshot", "reachable"]
__all__ += ["require_hub", "require_model"]

_WEIGHTS = tuple(
    f"{stem}{index}"
    for stem in ("model.safetensors", "pytorch_model.bin")
    for index in ("", ".index.json")
)
MODEL_FILES = (("config.json",), _WEIGHTS)
"""What a model of transformers has: one file of each."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model comes from, once it is found.

    Args:
        name: as it was given.
        kind: "hub", "folder" (of transformers) or "gguf".
        place: the hub's name, the folder, or the GGUF file.
        revision: of a hub name.
    """

    name: str
    kind: Literal["hub", "folder", "gguf"]
    place: str
    revision: str | None = None


def reachable(endpoint: str, seconds: float = 5.0) -> bool:
    """Whether an address of the form https://host[:port] takes connections."""
    parts = urllib.parse.urlsplit(endpoint)
    if urllib.request.getproxies().get(parts.scheme):
        return True  # through a proxy, only a real request can tell
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=seconds).close()
    except OSError:
        return False
    return True


def cached_snapshot(
    repository: str, *wanted: tuple[str, ...], revision: str | None = None
) -> Path | None:
    """The folder in the local cache that has one file of each tuple of a hub repository.

    Its name is the commit.
    """
    from huggingface_hub import try_to_load_from_cache

    found: list[Path] = []
    for files in wanted:
        paths = (try_to_load_from_cache(repository, file, revision=revision) for file in files)
        found += [Path(path).parent for path in paths if isinstance(path, str)][:1]
    return found[0] if len(found) == len(wanted) else None


def local_snapshot(source: str, revision: str | None = None) -> Path:
    """A local folder as it is, or what a hub repository has of safetensors, JSON and vocabularies.

    Raises:
        FileNotFoundError: if it is neither a folder nor the form of a hub name.
        ConnectionError: if the hub is neither to be reached nor its cache has it.
    """
    if Path(source).is_dir():
        return Path(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise FileNotFoundError(f"{source} is no folder")
    hub = need("huggingface_hub", source, "text")
    from huggingface_hub.errors import LocalEntryNotFoundError

    closed = _closed(hub.constants.HF_HUB_OFFLINE) is not None
    kinds = [f"*.{kind}" for kind in ("safetensors", "json", "jinja", "txt", "model")]
    try:
        return Path(
            hub.snapshot_download(
                source, revision=revision, allow_patterns=kinds, local_files_only=closed
            )
        )
    except LocalEntryNotFoundError:
        require_model(source)
        raise


def require_hub(what: str, advice: str) -> None:
    """Raises ConnectionError, with the cache's folder and advice, if the hub cannot be asked."""
    from huggingface_hub import constants

    if why := _closed(constants.HF_HUB_OFFLINE):
        raise ConnectionError(
            f"{what}: {why}, and it is not in the cache ({constants.HF_HUB_CACHE}). {advice}"
        )


def require_model(name: str) -> None:
    """The same for a model of transformers, which would have to come from the hub."""
    require_hub(
        f"{name} is no local folder, so it is taken for a hub name",
        "Download it on a machine with a network (hf download NAME --local-dir FOLDER), and give "
        "that folder",
    )


def hub_dataset(name: str) -> Any:
    """The data set that "hf:NAME[:config[:split]]" names; the split is "train" unless given.

    It is taken from the cache of `datasets`, or from the hub. None of them may bring code along.

    Raises:
        ConnectionError: if it is neither in the cache nor to be reached.
        ValueError: if there is no such data set, configuration or split, or it needs code.
    """
    datasets = need("datasets", name, "text")
    repository, config, split = (name.removeprefix("hf:").split(":") + ["", ""])[:3]
    if not repository or name.count(":") > 3:
        raise ValueError(f"{name!r}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    offline = datasets.config.HF_HUB_OFFLINE
    why = _closed(offline)
    try:
        datasets.config.HF_HUB_OFFLINE = bool(why)  # then its cache is asked, and nothing else
        return datasets.load_dataset(repository, config or None, split=split or "train")
    except Exception as error:
        if why or isinstance(error, ConnectionError):
            raise ConnectionError(
                f"{name}: {why or 'the hub cannot be reached'}, and it is not in the cache "
                f"({datasets.config.HF_DATASETS_CACHE}). Download its parquet or JSON-lines files "
                "on a machine with a network, and name those files in place of hf:…"
            ) from error
        hint = ""
        if "script" in str(error):  # datasets 4 no longer runs them, and neither do we
            hint = ". Its code is not run: use the parquet files that the hub has converted it to"
        raise ValueError(f"{name}: {str(error)[:400]}{hint}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _closed(offline: bool) -> str | None:
    """Why the hub cannot be asked; None if it can.

    Tried here first, because the hub's own client retries for most of a minute without a network.
    """
    from huggingface_hub import constants

    if offline:
        return "HF_HUB_OFFLINE is set"
    return None if reachable(constants.ENDPOINT) else f"{constants.ENDPOINT} cannot be reached"
