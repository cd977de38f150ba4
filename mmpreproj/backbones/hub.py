"""What can be had of a hub: from its cache, over the network, or not at all; told in seconds."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path


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
    repository: str, files: Iterable[str], revision: str | None = None
) -> Path | None:
    """The folder in the local cache that holds any of `files` of a hub repository.

    Its name is the commit.
    """
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        path = try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(path, str):
            return Path(path).parent
    return None


def require_hub(what: str, advice: str) -> None:
    """Raises ConnectionError, with the cache's folder and advice, if the hub cannot be asked.

    Asked here first because the hub's own client retries for most of a minute without a network.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif not reachable(constants.ENDPOINT):
        why = f"{constants.ENDPOINT} cannot be reached"
    else:
        return
    raise ConnectionError(
        f"{what}: {why}, and it is not in the cache ({constants.HF_HUB_CACHE}). {advice}"
    )
