"""Reading chosen frames of a video file: exact first, then fast.

Frame i is the i-th frame that PyAV gives when it decodes the file from its start, turned upright
as the file says (phones store a rotation). Indices count frames, not time: where the frame rate
varies, equal steps are not equal times. Pixels are not stretched for a sample aspect ratio.

A file is read once, packet by packet, without decoding; that gives the number of frames and where
the key frames are. Decoding then starts at the last key frame before a sampled frame and ends with
the last sampled one; stretches between key frames in which nothing is sampled are left out, and
only sampled frames are converted to RGB. In H.264, frames that no other frame refers to are not
decoded either, unless they are sampled. Files whose packets do not say surely which frame is
which (AVI, missing or repeated timestamps, codecs with hidden frames) and files in which an error
is met are decoded from the start and counted. What cannot be seen this way is damage elsewhere in a
file that makes the decoder leave out frames: those are counted as if they were there.

PyAV is the default, since it is exact, and as fast as decord or faster, as it decodes less
(tools/benchmark.py measures it). decord2 3.4 gave the wrong frames of HEVC, of MPEG-2 and MPEG-4,
and of H.264 with open or refreshed GOPs, interlaced, or in AVI; wrong colours in 10 bits; and it
refuses WebM without a duration. It can be chosen for files that are known to suit it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from typing import Literal

import numpy as np

from mmpreproj.data.video.container import (
    Indices,
    UnreadableVideo,
    VideoFile,
    check_file,
    degrees,
    display_matrix,
    turning,
)

Decoder = Literal["auto", "pyav", "decord"]


@dataclasses.dataclass(frozen=True)
class VideoInfo:
    """What a full decode of a file finds."""

    n_frames: int
    width: int
    """In pixels, of the upright frame; likewise the height."""
    height: int
    fps: float | None
    """The mean frame rate that the file states; None where it states none."""
    rotation: int
    """Degrees clockwise by which stored frames are turned to stand upright: 0, 90, 180, 270."""
    codec: str
    key_frames: tuple[int, ...]
    """Numbers of the frames at which decoding can start."""
    seekable: bool
    """False where the file is decoded from its start, since its packets do not tell the frames."""


def read_frames(
    path: str | os.PathLike, indices: Indices, decoder: Decoder = "auto", threads: int = 1
) -> np.ndarray:
    """The frames of these numbers, in the order given; repeated and descending numbers are fine.

    Args:
        indices: frame numbers, or a function of the number of frames that gives them (it may be
            called again, where the file turns out to hold other frames than it said).
        decoder: "auto" is PyAV; "decord" trusts decord with everything, the rotation too.
        threads: of the decoder; 0 is as many as it likes. Workers side by side want 1.
    Shape: uint8 [T, H, W, 3], RGB, upright.
    Raises:
        UnreadableVideo: missing, empty, not a video, no video stream, or damaged.
        IndexError: a number outside 0 … n - 1.
        ImportError: the decoder is not installed.
    """
    path = os.fspath(path)
    if decoder == "decord":
        return _read_with_decord(path, indices, threads)
    if decoder not in ("auto", "pyav"):
        raise ValueError(f"decoder is 'auto', 'pyav' or 'decord', got {decoder!r}")
    with VideoFile(path, threads) as file:
        return file.read(indices)


def probe(path: str | os.PathLike) -> VideoInfo:
    """Decodes the whole file and tells what is in it. Raises: UnreadableVideo, ImportError."""
    with VideoFile(os.fspath(path), threads=1) as file:
        n, keys, first = 0, [], None
        for frame in file.in_order():
            first = first or frame
            if frame.key_frame:
                keys.append(n)
            n += 1
        height, width = turning(first)(np.empty((first.height, first.width))).shape
        rate = file.stream.average_rate
        return VideoInfo(
            n_frames=n,
            width=width,
            height=height,
            fps=float(rate) if rate else None,
            rotation=degrees(display_matrix(first)),
            codec=file.stream.codec_context.codec.canonical_name,
            key_frames=tuple(keys),
            seekable=file.tidy and n == file.n_frames,
        )


@functools.lru_cache(maxsize=1)
def _import_decord():
    from importlib.metadata import PackageNotFoundError, version

    try:
        import decord
    except ImportError as error:
        raise ImportError(
            "decoder='decord' needs decord2: pip install 'mmpreproj[video]'"
        ) from error
    try:
        expected = version("decord2")
    except PackageNotFoundError:
        expected = None
    if decord.__version__ != expected:
        warnings.warn(
            f"the decord that imports (version {decord.__version__}, {decord.__file__}) is not "
            "decord2, the maintained one: pip uninstall decord, then pip install decord2",
            stacklevel=2,
        )
    decord.logging.set_level(decord.logging.QUIET)
    return decord


def _read_with_decord(path: str, indices: Indices, threads: int) -> np.ndarray:
    decord = _import_decord()
    check_file(path)
    try:
        reader = decord.VideoReader(path, num_threads=threads)
        n_frames = len(reader)
        wanted = [int(i) for i in (indices(n_frames) if callable(indices) else indices)]
        if not all(0 <= i < n_frames for i in wanted):
            raise IndexError(f"frames {wanted} of {path!r}, which has {n_frames} frames")
        return reader.get_batch(wanted).asnumpy()
    except (decord.DECORDError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnreadableVideo(f"cannot read video {path!r} with decord: {lines[-1]}") from error
