"""Reading chosen frames by decord, in place of PyAV: see decode.py.

PyAV is the default, since it is exact, and as fast as decord or faster, as it decodes less
(tools/benchmark.py measures it). decord2 3.4 gave the wrong frames of HEVC, of MPEG-2 and MPEG-4,
and of H.264 with open or refreshed GOPs, interlaced, or in AVI; wrong colours in 10 bits; and it
refuses WebM without a duration. It can be chosen for files that are known to suit it.
"""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import numpy as np

from mmpreproj.data.video.decode import Indices, UnreadableVideo, check_file
from mmpreproj.messages import need

__all__ = ["read_with_decord"]


@functools.lru_cache(maxsize=1)
def _decord() -> ModuleType:
    decord = need("decord", "decoder='decord'", "video")
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


def read_with_decord(path: str, indices: Indices, threads: int) -> np.ndarray:
    """`mmpreproj.data.video.read_frames`, by decord."""
    decord = _decord()
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
