"""Data sets of the hub, by name. None of them may bring code along."""

from __future__ import annotations

import os
from typing import Any

from mmpreproj.backbones.hub import reachable


def hub_dataset(name: str) -> Any:
    """The data set that "hf:NAME[:config[:split]]" names; the split is "train" unless given.

    It is taken from the cache of `datasets`, or from the hub. Tried here first, because the hub's
    client retries for long without a network.

    Raises:
        ConnectionError: if it is neither in the cache nor to be reached.
        ValueError: if there is no such data set, configuration or split, or it needs code.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{name} needs datasets: pip install 'mmpreproj[text]'") from error
    from huggingface_hub import constants

    repository, config, split = (name.removeprefix("hf:").split(":") + ["", ""])[:3]
    if not repository or name.count(":") > 3:
        raise ValueError(f"{name!r}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    split = split or "train"
    offline = datasets.config.HF_HUB_OFFLINE
    found = not offline and reachable(constants.ENDPOINT)
    try:
        datasets.config.HF_HUB_OFFLINE = not found  # then its cache is asked, and nothing else
        return datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:
        if not found or isinstance(error, ConnectionError):
            why = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} cannot be reached"
            raise ConnectionError(
                f"{name}: {why}, and it is not in the cache "
                f"({datasets.config.HF_DATASETS_CACHE}). Download its parquet or JSON-lines files "
                "on a machine with a network, and name those files in place of hf:…"
            ) from error
        hint = ""
        if "script" in str(error):  # datasets 4 no longer runs them, and neither do we
            hint = ". Its code is not run: use the parquet files that the hub has converted it to"
        raise ValueError(f"{name}: {str(error)[:400]}{hint}") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def default_cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mmpreproj", "tokens")
