"""Files that are no videos, or damaged: what is said of them."""

from __future__ import annotations

import functools
import os
from types import ModuleType

from mmpreproj.data.labelled_files import UnreadableFile
from mmpreproj.messages import need

__all__ = ["UnreadableVideo", "check_file", "fault", "pyav"]

TEXT = frozenset({7, 8, 9, 10, 12, 13, 27} | set(range(32, 256)) - {127})
PLAYLISTS = (b"#EXTM3U", b"ffconcat version", b"<MPD")


class UnreadableVideo(UnreadableFile):
    """A video file that cannot be decoded; the message names the file and the likely reason."""


@functools.cache
def pyav() -> ModuleType:
    """PyAV. Raises: ImportError, saying how it is installed."""
    return need("av", "reading videos (with another decoder than 'decord')", "video")


def check_file(path: str) -> None:
    """Raises: UnreadableVideo for what needs no decoder to be told, with the reason."""
    try:
        if os.path.isdir(path):
            raise fault(path, "it is a folder")
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError as error:
        raise fault(path, "it cannot be opened", error) from error
    if not head:
        raise fault(path, "the file is empty (0 bytes)")
    # Every container has other bytes than text near its start. FFmpeg would follow a playlist in
    # a file that is called .mp4 to other files, or addresses.
    if all(byte in TEXT for byte in head) or any(mark in head for mark in PLAYLISTS):
        raise fault(path, "it is not a video file, but text")


def fault(path: str, what: str, error: Exception | None = None) -> UnreadableVideo:
    """The error to raise, with its cause.

    Raises: a MemoryError again: it says something about this machine, not about the file. FFmpeg's
    own does not; it stands for an absurd size in a damaged header.
    """
    if isinstance(error, MemoryError) and not isinstance(error, pyav().error.FFmpegError):
        raise error
    if error is not None:
        what += f" ({type(error).__name__}: {getattr(error, 'strerror', None) or error})"
    return UnreadableVideo(f"cannot read video {path!r}: {what}")
