"""Folders that are whole or not there at all, whatever is interrupted or runs at the same time."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to write in, which is renamed to it at the end.

    What is interrupted leaves no `folder`; of two processes that make the same, the first to end
    gives it, and what the other wrote is deleted. So are the rests of this machine's processes
    that were killed.

    Raises:
        OSError: if it cannot be made or renamed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    temporary = _beside(folder)
    temporary.mkdir()
    try:
        yield temporary
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Out of the way in one step, then deleted: nobody finds half of it."""
    away = _beside(folder)
    try:
        os.rename(folder, away)
    except FileNotFoundError:  # another process was first
        return
    shutil.rmtree(away, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.parent / f".{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f".{_host()}-*.tmp"):
        found = re.fullmatch(r"-(\d+)-[0-9a-f]{8}\.tmp", path.name.removeprefix(f".{_host()}"))
        if found and not _alive(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", socket.gethostname()) or "host"
