"""Files and folders that are whole or not there at all, whatever is interrupted or runs beside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "parse_json", "remove_abandoned", "remove_folder", "whole_folder"]
__all__ += ["write_whole"]


def parse_json(content: str | bytes, place: str | os.PathLike[str]) -> Any:
    """What JSON holds; `place` is what to call it.

    Raises:
        ValueError: naming `place`, for what is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        return json.loads(content.decode() if isinstance(content, bytes) else content)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} "
            f"({error.reason})"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{place} is not read: its JSON is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits is one, too
        raise ValueError(f"{place} is not JSON: {error}") from error


def cache_folder(kind: str) -> Path:
    """mmpreproj/KIND in $XDG_CACHE_HOME, or in ~/.cache. It need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "mmpreproj" / kind


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file (text as UTF-8) in one step, over one that is there; folders are made.

    It is on the disk before it takes the name, so that a power cut leaves the old one or the new.

    Raises:
        OSError: naming `path`, and what was there stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


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
    remove_abandoned(folder.parent)
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


def _beside(path: Path) -> Path:
    return path.parent / f".{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"


def remove_abandoned(parent: Path) -> None:
    """Delete what processes of this machine that were killed were writing there."""
    for path in parent.glob(f".{_host()}-*.tmp"):
        found = re.fullmatch(r"-(\d+)-[0-9a-f]{8}\.tmp", path.name.removeprefix(f".{_host()}"))
        if found and not _alive(int(found.group(1))):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


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
