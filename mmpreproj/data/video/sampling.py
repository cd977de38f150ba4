"""Which frames of a video make a clip: numbers only, in whole-number arithmetic.

dense:   T frames, `stride` apart, from one place of the video (SlowFast, arXiv 1812.03982).
uniform: one frame from each of T equal segments of the whole video (TSN, arXiv 1608.00859).

In training places are drawn at random. In testing a video gives V temporal views, places that
follow from the number of frames alone.

Videos shorter than a dense clip's span, (T - 1) * stride + 1 frames, are padded by one rule:
"repeat" (the last frame again and again) or "loop" (from the first frame again). All test views of
such a video are the same clip; of a video with s spare frames at most s + 1 dense views differ.
Uniform clips need no padding: with fewer frames than segments, some frames come several times in a
row.
"""

from typing import Literal

import torch

Sampling = Literal["dense", "uniform"]
Padding = Literal["repeat", "loop"]


def span(num_frames: int, stride: int) -> int:
    """Frames of video that a dense clip reaches over, first and last included."""
    return (num_frames - 1) * stride + 1


def dense(
    n_frames: int, num_frames: int, stride: int, start: int, padding: Padding = "repeat"
) -> list[int]:
    """Frame numbers start, start + stride, …; beyond the last frame by the padding rule.

    Raises: ValueError for an empty video, or a start outside it.
    """
    _check(n_frames, num_frames, stride)
    if not 0 <= start < n_frames:
        raise ValueError(f"a clip cannot start at frame {start} of {n_frames}")
    numbers = range(start, start + span(num_frames, stride), stride)
    if padding == "repeat":
        return [min(i, n_frames - 1) for i in numbers]
    if padding == "loop":
        return [i % n_frames for i in numbers]
    raise ValueError(f"padding is 'repeat' or 'loop', got {padding!r}")


def dense_train(
    n_frames: int,
    num_frames: int,
    stride: int,
    padding: Padding = "repeat",
    generator: torch.Generator | None = None,
) -> list[int]:
    """A dense clip from a random start: each of 0 … max(n_frames - span, 0) equally likely."""
    spare = max(n_frames - span(num_frames, stride), 0)
    return dense(n_frames, num_frames, stride, _randint(spare + 1, generator), padding)


def dense_views(
    n_frames: int, num_frames: int, stride: int, views: int = 1, padding: Padding = "repeat"
) -> list[list[int]]:
    """V dense clips, starts spread evenly over what is spare; a single one is central.

    With s = max(n_frames - span, 0), view v starts at v s // (V - 1), so the first at the first
    frame and the last with the last frame in it; for V = 1 at s // 2.
    """
    _check(n_frames, num_frames, stride, views)
    spare = max(n_frames - span(num_frames, stride), 0)
    starts = [v * spare // (views - 1) for v in range(views)] if views > 1 else [spare // 2]
    return [dense(n_frames, num_frames, stride, start, padding) for start in starts]


def segments(n_frames: int, num_frames: int) -> list[tuple[int, int]]:
    """T segments, (first frame, number of frames): segment k is k n // T … (k + 1) n // T - 1.

    With n < T a segment that would be empty is the one frame k n // T.
    """
    _check(n_frames, num_frames)
    bounds = [k * n_frames // num_frames for k in range(num_frames + 1)]
    return [(a, max(b - a, 1)) for a, b in zip(bounds, bounds[1:], strict=False)]


def uniform_train(
    n_frames: int, num_frames: int, generator: torch.Generator | None = None
) -> list[int]:
    """One frame drawn from each segment, each of its frames equally likely."""
    return [a + _randint(size, generator) for a, size in segments(n_frames, num_frames)]


def uniform_views(n_frames: int, num_frames: int, views: int = 1) -> list[list[int]]:
    """V clips: view v takes frame (2 v + 1) size // (2 V) of each segment, for V = 1 its middle."""
    _check(n_frames, num_frames, views=views)
    parts = segments(n_frames, num_frames)
    return [[a + (2 * v + 1) * size // (2 * views) for a, size in parts] for v in range(views)]


def _check(n_frames: int, num_frames: int, stride: int = 1, views: int = 1) -> None:
    if n_frames < 1:
        raise ValueError(f"a video has 1 frame or more, got {n_frames}")
    if num_frames < 1 or stride < 1 or views < 1:
        raise ValueError(
            f"num_frames, stride and views must be 1 or more, got {num_frames}, {stride}, {views}"
        )


def _randint(n: int, generator: torch.Generator | None) -> int:
    return int(torch.randint(n, (), generator=generator))
