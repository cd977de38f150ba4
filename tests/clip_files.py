"""Small video files, written by PyAV, whose frames name themselves."""

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

SIDE = 64


def counter_frame(i, width=SIDE, height=SIDE):
    """Frame i: its number in eight vertical bars, one bit each, light for 1; a light corner.

    Bars are 8 pixels wide or more and survive any codec; the bright square in the top left corner
    shows which way up the frame is.
    """
    frame = np.full((height, width, 3), 40, np.uint8)
    for bit in range(8):
        if i >> bit & 1:
            frame[height // 2 :, bit * width // 8 : (bit + 1) * width // 8] = 220
    frame[: height // 4, : width // 4] = (230, 60, 60)
    return frame


def number_of(frame):
    """The number that an upright counter frame shows."""
    height, width, _ = frame.shape
    bars = [frame[height * 3 // 4, (2 * bit + 1) * width // 16].mean() for bit in range(8)]
    return sum(1 << bit for bit, value in enumerate(bars) if value > 128)


def write_clip(
    path,
    n=20,
    codec="libx264",
    size=(SIDE, SIDE),
    pix_fmt="yuv420p",
    options=None,
    gop=12,
    rate=30,
    times=None,
    audio_seconds=0.0,
    frame=counter_frame,
    container_options=None,
):
    """Writes n frames of (width, height) `size`; times: of each, in 1/600 s, in place of `rate`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=container_options or {}) as out:
        video = out.add_stream(codec, rate=rate, options=options or {})
        video.width, video.height, video.pix_fmt, video.gop_size = *size, pix_fmt, gop
        if times is not None:
            video.codec_context.time_base = Fraction(1, 600)
        audio = out.add_stream("aac", rate=16000, layout="mono") if audio_seconds else None
        for i in range(n):
            picture = av.VideoFrame.from_ndarray(frame(i, *size), format="rgb24")
            if times is not None:
                picture.pts, picture.time_base = times[i], Fraction(1, 600)
            out.mux(video.encode(picture))
        out.mux(video.encode())
        if audio is not None:
            write_sound(out, audio, audio_seconds)
    return path


def write_sound(out, stream, seconds):
    for start in range(0, int(seconds * 16000), 1024):
        sound = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        sound.sample_rate, sound.pts, sound.time_base = 16000, start, Fraction(1, 16000)
        out.mux(stream.encode(sound))
    out.mux(stream.encode())


def write_audio_only(path, seconds=0.5):
    with av.open(str(path), "w") as out:
        write_sound(out, out.add_stream("aac", rate=16000, layout="mono"), seconds)
    return Path(path)


MATRICES = {  # a, b, c, d of the display matrix: (x, y) is shown at (a x + c y, b x + d y)
    0: (1, 0, 0, 1),
    90: (0, 1, -1, 0),
    180: (-1, 0, 0, -1),
    270: (0, -1, 1, 0),
    "mirror": (-1, 0, 0, 1),
}


def set_rotation(path, turn):
    """Writes a display matrix into the track header of an MP4 file, in place."""
    data = bytearray(Path(path).read_bytes())
    track = data.index(b"tkhd") + 4
    version = data[track]
    at = track + 4 + (32 if version else 20) + 16
    a, b, c, d = (value << 16 if value >= 0 else -(-value << 16) for value in MATRICES[turn])
    struct.pack_into(">9i", data, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    Path(path).write_bytes(data)
    return path


def reference_frames(path):
    """All frames by a plain sequential PyAV decode, turned upright by PyAV's own angle."""
    with av.open(str(path)) as container:
        return [
            np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            for frame in container.decode(video=0)
        ]


def video_folder(root, counts=(("train", 8), ("val", 4)), classes=("jump", "shake hands"), n=20):
    """Class folders root/PART/CLASS/k.mp4."""
    for part, count in counts:
        for k in range(count):
            write_clip(root / part / classes[k % len(classes)] / f"{k}.mp4", n)
    return root


CONFIG = {"input_size": (3, 4, 32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}
