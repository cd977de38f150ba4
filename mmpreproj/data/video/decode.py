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
is met are decoded from the start and counted. A file that breaks off has the frames before that.
What cannot be seen this way is damage elsewhere in a
file that makes the decoder leave out frames: those are counted as if they were there.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from mmpreproj.data.video.video_faults import UnreadableVideo, check_file, fault, pyav

if TYPE_CHECKING:
    import av

__all__ = ["Decoder", "Indices", "UnreadableVideo", "VideoFile", "VideoInfo", "check_file"]
__all__ += ["probe", "read_frames"]

Decoder = Literal["auto", "pyav", "decord"]
Indices = Sequence[int] | Callable[[int], Sequence[int]]
"""Frame numbers, or what gives them once the number of frames is known."""

MAX_HELD = 256 * 2**20
"""Bytes of packets, or of decoded frames of an untidy file, kept in memory while one is read; of
what is larger, the file is read a second time instead."""
PACKET_IS_FRAME = frozenset({"h264", "hevc", "vp9", "av1", "mjpeg", "prores", "dnxhd"})
"""Codecs of which each packet gives one frame. Not so VP8 (hidden frames) or MPEG-4 in AVI."""
STATES_TIMES = frozenset({"mov", "matroska", "mpegts", "flv"})
"""Containers that store when a frame is shown. In AVI, FFmpeg makes that up, at times wrongly."""


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
        from mmpreproj.data.video.decord_reader import read_with_decord

        return read_with_decord(path, indices, threads)
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
            rotation=round(-first.rotation / 90) * 90 % 360,
            codec=file.stream.codec_context.codec.canonical_name,
            key_frames=tuple(keys),
            seekable=file.tidy and n == file.n_frames,
        )


class _Unlike(Exception):
    """The file holds other frames than its packets said."""


class VideoFile:
    """An open file; closed at the end of the `with`, so that nothing stays open across a fork."""

    def __init__(self, path: str, threads: int):
        self.path = path
        self.threads = threads
        check_file(path)
        self.container, self.stream = self._open()
        try:
            self._scan()
        except BaseException:
            self.container.close()
            raise

    def __enter__(self) -> VideoFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.container.close()

    def _open(self) -> tuple[av.container.InputContainer, av.video.stream.VideoStream]:
        av = pyav()
        try:
            # an absolute path: FFmpeg would take "a:b.mp4" for a protocol
            container = av.open(os.path.abspath(self.path))
        except Exception as error:  # on damaged files PyAV raises IndexError and others, too
            what = "not a video file, or its start or index is missing"
            raise fault(self.path, what, error) from error
        streams = [s for s in container.streams if s.type == "video" and s.codec_context]
        # the cover picture of a song is a video stream to FFmpeg
        cover = av.stream.Disposition.attached_pic
        streams = [s for s in streams if cover not in av.stream.Disposition(s.disposition)]
        if not streams:
            kinds = sorted({s.type for s in container.streams}) or ["nothing"]
            container.close()
            what = f"no video stream that can be decoded (there is {', '.join(kinds)})"
            raise fault(self.path, what)
        best = container.streams.best("video")  # FFmpeg's choice, and decord's: the default one
        stream = best if best in streams else streams[0]
        stream.codec_context.thread_count = self.threads
        return container, stream

    def _scan(self) -> None:
        """Reads all packets; finds out if they tell which frame is which."""
        packets, pts, self.times, keys = [], [], [], []
        held, tidy = 0, True
        try:
            for packet in whole(self.container.demux(self.stream)):
                held += packet.size
                if held <= MAX_HELD:
                    packets.append(packet)
                time = packet.pts
                if time is None or packet.is_corrupt:
                    tidy = False
                else:
                    if packet.is_keyframe:
                        keys.append((time, len(pts)))
                    if not packet.is_discard:
                        self.times.append(time)
                pts.append(time)
        except Exception as error:
            what = f"damaged, reading stops after packet {len(pts)}"
            raise fault(self.path, what, error) from error
        if not pts:
            raise fault(self.path, "its video stream is empty")
        self.packets = packets if held <= MAX_HELD else None
        self.times.sort()
        self.keys = sorted(keys)
        self.n_frames = len(self.times)
        tidy = tidy and self.stream.codec_context.codec.canonical_name in PACKET_IS_FRAME
        tidy = tidy and self.container.format.name.split(",")[0] in STATES_TIMES
        # a frame shown before the first key frame may not be decodable
        tidy = tidy and bool(keys) and keys[0] == (min(pts), 0)
        self.tidy = tidy and len(set(pts)) == len(pts) and self.n_frames > 0
        self.place = {time: i for i, time in enumerate(pts)} if self.tidy else {}

    def read(self, indices: Indices) -> np.ndarray:
        """As read_frames."""
        if self.tidy:
            wanted = self._resolve(indices, self.n_frames)
            try:
                frames = self._read_tidy({self.times[i] for i in wanted})
                return self._to_rgb([frames[self.times[i]] for i in wanted], wanted)
            except _Unlike:
                pass
        return self._read_in_order(indices)

    def _resolve(self, indices: Indices, n_frames: int) -> list[int]:
        wanted = [int(i) for i in (indices(n_frames) if callable(indices) else indices)]
        if not wanted:
            raise ValueError(f"no frame numbers given for {self.path!r}")
        outside = [i for i in wanted if not 0 <= i < n_frames]
        if outside:
            raise IndexError(
                f"frame {outside[0]} of {self.path!r}, which has {n_frames} frames, from 0 to "
                f"{n_frames - 1}"
            )
        return wanted

    # Decoding

    def _read_tidy(self, wanted: set[int]) -> dict[int, av.VideoFrame]:
        """Frames by timestamp. Raises: _Unlike where one does not come out as expected."""
        context = self.stream.codec_context
        context.thread_type = "AUTO"
        may_skip = context.codec.canonical_name == "h264"
        frames: dict[int, av.VideoFrame] = {}
        try:
            for start, stop in self._runs(wanted):
                first, last = None, None
                for packet in itertools.chain(self._packets(start, stop), [None]):
                    if may_skip:
                        # FFmpeg drops a picture with nal_ref_idc 0 unread: nothing refers to it.
                        # HEVC's like can be referred to from higher temporal layers.
                        needed = packet is None or packet.pts in wanted
                        context.skip_frame = "DEFAULT" if needed else "NONREF"
                    first = packet.pts if first is None else first
                    for frame in context.decode(packet):
                        # after a jump into an open GOP, what is shown before the key frame is
                        # corrupt by right; anything else, and how it is concealed depends on
                        # what was decoded before
                        damaged = frame.is_corrupt and frame.pts >= first
                        if damaged or (last is not None and frame.pts <= last):
                            raise _Unlike
                        last = frame.pts
                        if last in wanted:
                            frames[last] = frame
                context.flush_buffers()
        except Exception as error:
            raise _Unlike from fault(self.path, "damaged", error)
        if len(frames) < len(wanted):
            raise _Unlike
        return frames

    def _runs(self, wanted: set[int]) -> list[tuple[int, int]]:
        """Stretches of packets to decode, (first, behind last), each from a key frame on."""
        runs: list[tuple[int, int]] = []
        for time in sorted(wanted):
            start = self.keys[bisect.bisect_right(self.keys, (time, len(self.place))) - 1][1]
            stop = self.place[time] + 1
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        return runs

    def _packets(self, start: int, stop: int) -> Iterator[av.Packet]:
        if self.packets is not None:
            yield from self.packets[start:stop]
            return
        container, stream = self._open()
        with container:
            yield from itertools.islice(whole(container.demux(stream)), start, stop)

    def in_order(self) -> Iterator[av.VideoFrame]:
        """All frames, from the start. Raises: UnreadableVideo at the first that fails."""
        container, stream = self._open()
        n = 0
        with container:
            try:
                for packet in itertools.chain(whole(container.demux(stream)), [None]):
                    for frame in stream.codec_context.decode(packet):
                        yield frame
                        n += 1
            except Exception as error:
                what = f"damaged after frame {n} of {self.n_frames or 'an unknown number'}"
                raise fault(self.path, what, error) from error
        if n == 0:
            raise fault(self.path, "no frame can be decoded")

    def _read_in_order(self, indices: Indices) -> np.ndarray:
        frames: list[av.VideoFrame] | None = []
        n, held = 0, 0
        for frame in self.in_order():
            n += 1
            if frames is not None:
                held += sum(plane.buffer_size for plane in frame.planes)
                frames.append(frame)
                if held > MAX_HELD:
                    frames = None
        self.n_frames = n
        wanted = self._resolve(indices, n)
        found = dict(enumerate(frames or ()))
        if frames is None:
            chosen, last = set(wanted), max(wanted) + 1
            in_order = itertools.islice(enumerate(self.in_order()), last)
            found = {i: frame for i, frame in in_order if i in chosen}
        for i in wanted:
            if found[i].is_corrupt:
                raise fault(self.path, f"frame {i} is damaged, and what it shows is made up")
        return self._to_rgb([found[i] for i in wanted], wanted)

    # Pixels

    def _to_rgb(self, frames: list[av.VideoFrame], wanted: list[int]) -> np.ndarray:
        """uint8 [T, H, W, 3]; each different frame is converted once."""
        av = pyav()
        converter = av.video.reformatter.VideoReformatter()
        # from 17 on PyAV would start a thread a core for each frame; before, it had none
        one_thread = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}
        width, height = frames[0].width, frames[0].height
        turned = turning(frames[0])
        first_at: dict[int, int] = {}
        clip = None
        for position, (index, frame) in enumerate(zip(wanted, frames, strict=True)):
            if index in first_at:
                clip[position] = clip[first_at[index]]
                continue
            first_at[index] = position
            # a stream may change its size on the way: the first sampled frame's is kept
            converted = converter.reformat(frame, width, height, "rgb24", **one_thread)
            rgb = converted.planes[0]
            pixels = np.frombuffer(rgb, np.uint8).reshape(-1, rgb.line_size)
            pixels = turned(pixels[:height, : 3 * width].reshape(height, width, 3))
            if clip is None:
                clip = np.empty((len(frames), *pixels.shape), np.uint8)
            clip[position] = pixels
        return clip


def turning(frame: av.VideoFrame) -> Callable[[np.ndarray], np.ndarray]:
    """What makes a stored image [H, W, …] upright: quarter turns and mirrors, as views.

    A point (x, y) is shown at (a x + c y, b x + d y). Other angles go to the nearest quarter turn.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")  # a, b, u, c, d, v, x, y, w
    if matrix is None:
        return lambda image: image
    a, b, _, c, d = np.frombuffer(matrix, "=i4")[:5].tolist()
    if abs(a) >= abs(b):
        return lambda image: image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return lambda image: image.swapaxes(0, 1)[:: -1 if b < 0 else 1, :: -1 if c < 0 else 1]


def whole(packets: Iterator[av.Packet]) -> Iterator[av.Packet]:
    """Those with data; without the last one, if the file breaks off in it."""
    short = None
    for packet in packets:
        if packet.size:  # else it marks the end
            if short is not None:
                yield short
            short = packet if packet.is_corrupt else None
            if short is None:
                yield packet
