"""Clips a second of our loader against other ways to read the same frames of the same files.

    python tools/benchmark.py loading --workers 1 2

Files of 300 frames are written by PyAV; 16 frames of each are read, resized and cropped, in a
DataLoader. Every reader gets the same frame numbers and the same resize, so that only decoding
differs. The peers: decord2 by hand (VideoReader, get_batch), a sequential PyAV decode that converts
only the sampled frames, and torchcodec, where it can be imported.
With 0 workers what is measured is processor time, threads included, which a busy machine disturbs
less. Then resident memory is watched over many videos.
"""

import argparse
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import av
import numpy as np
import torch
from torch.utils.data import DataLoader

from mmpreproj.data.video import read_frames
from mmpreproj.data.video.clips import EvalClips, dense, span, uniform_views

N_FRAMES = 300
WIDTH, HEIGHT = 320, 240
GOPS = (12, 250)
"""Frames between key frames: as in clips made for training, and as encoders do by default."""
CLIP = {"num_frames": 16, "stride": 4}
TRANSFORM = EvalClips(
    {"input_size": [3, 16, 224, 224], "mean": [0.45] * 3, "std": [0.225] * 3}
    | {"interpolation": "bilinear"}
)


def write_video(path: Path, seed: int, gop: int) -> None:
    """300 frames of drifting texture with grain, H.264 as x264 makes it by default."""
    rng = np.random.default_rng(seed)
    texture = rng.integers(0, 256, (HEIGHT // 8, WIDTH // 4, 3), dtype=np.uint8)
    texture = texture.repeat(8, 0).repeat(8, 1)
    grain = rng.integers(0, 13, (8, HEIGHT, WIDTH, 3), dtype=np.uint8)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=30, options={"crf": "23", "preset": "medium"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", gop
        for i in range(N_FRAMES):
            left = 2 * i % WIDTH
            frame = texture[:, left : left + WIDTH] // 2 + grain[i % 8]
            top, side = 3 * i % (HEIGHT - 60), 5 * i % (WIDTH - 60)
            frame[top : top + 60, side : side + 60] = (240, i % 256, 60)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())


# Readers: path, frame numbers (ascending) -> uint8 [T, H, W, 3]


def with_ours(path: str, numbers: list[int]) -> np.ndarray:
    return read_frames(path, numbers)


def with_decord(path: str, numbers: list[int], threads: int = 0) -> np.ndarray:
    import decord

    return decord.VideoReader(path, num_threads=threads).get_batch(numbers).asnumpy()


def with_sequential_pyav(path: str, numbers: list[int]) -> np.ndarray:
    frames, wanted = {}, set(numbers)
    with av.open(path) as file:
        for i, frame in enumerate(file.decode(video=0)):
            if i in wanted:
                frames[i] = frame.to_ndarray(format="rgb24")
            if i == numbers[-1]:
                break
    return np.stack([frames[i] for i in numbers])


def with_torchcodec(path: str, numbers: list[int], mode: str = "exact") -> np.ndarray:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, dimension_order="NHWC", seek_mode=mode)
    return decoder.get_frames_at(numbers).data.numpy()


READERS: dict[str, Callable[[str, list[int]], np.ndarray]] = {
    "mmpreproj": with_ours,
    "decord2": with_decord,
    "decord2, 1 thread": partial(with_decord, threads=1),
    "PyAV, sequential": with_sequential_pyav,
    "torchcodec, exact": with_torchcodec,
    "torchcodec, approximate": partial(with_torchcodec, mode="approximate"),
}


def asked(files: list[str], kind: str, n: int) -> list[tuple[str, list[int]]]:
    """n times a file and the numbers of the frames of a clip, which follow from its place."""
    found = []
    for index in range(n):
        start = int(np.random.default_rng(index).integers(N_FRAMES - span(**CLIP) + 1))
        numbers = dense(N_FRAMES, **CLIP, start=start)
        if kind == "uniform":
            numbers = uniform_views(N_FRAMES, CLIP["num_frames"])[0]
        found.append((files[index % len(files)], numbers))
    return found


def batch(reader: Callable, wanted: list[tuple[str, list[int]]]) -> torch.Tensor:
    return torch.cat([TRANSFORM(reader(path, numbers)[None]) for path, numbers in wanted])


def available(path: str) -> dict[str, Callable]:
    """The readers that work here; prints why others do not, and how far all agree."""
    numbers = list(range(100, 164, 4))
    expected = with_sequential_pyav(path, numbers)
    readers = {}
    for name, reader in READERS.items():
        try:
            frames = reader(path, numbers)
        except Exception as error:  # a package that is absent, or cannot load its libraries
            reason = " ".join(str(error).split())[:200]
            print(f"  {name}: not available: {type(error).__name__}: {reason}")
            continue
        readers[name] = reader
        difference = int(np.abs(frames.astype(int) - expected).max())
        print(f"  {name}: largest difference from a sequential decode {difference} of 255")
    return readers


def rate(loader: DataLoader) -> float:
    """Clips a second; without workers, a second of processor time."""
    clock = time.perf_counter if loader.num_workers else time.process_time
    start = clock()
    n = sum(len(clips) for clips in loader)
    return n / (clock() - start)


def memory(files: list[str], n: int) -> dict[str, object]:
    """Resident memory of this process after every tenth of n videos."""
    seen = []
    for index, wanted in enumerate(asked(files, "dense", n), 1):
        batch(with_ours, [wanted])
        if index % max(n // 10, 1) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append(pages * 4096 / 2**20)
    print(f"\nResident memory over {n} videos, MiB: {' '.join(f'{m:.1f}' for m in seen)}")
    growth = seen[-1] - seen[0]
    print(f"  growth from the first tenth to the last: {growth:+.1f} MiB")
    return {"title": f"resident memory over {n} videos", "unit": "MiB", "runs": seen}


def with_pyavs_ffmpeg() -> None:
    """Starts this process anew so that torchcodec finds the FFmpeg libraries inside PyAV's wheel.

    torchcodec takes the system's FFmpeg (libavcodec.so.62 and so on), which may not be there; the
    wheel holds the same libraries under names of its own.
    """
    if "MMPREPROJ_FFMPEG" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="ffmpeg-")
    for library in Path(av.__file__).parent.with_name("av.libs").iterdir():
        names = [library.name]
        if match := re.match(r"(lib(?:av\w+|sw\w+))-\w+(\.so\.\d+)", library.name):
            names.append("".join(match.groups()))
        for name in names:
            Path(folder, name).symlink_to(library)
    paths = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    added = {"LD_LIBRARY_PATH": ":".join(paths), "MMPREPROJ_FFMPEG": folder}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **added})


def loading(options: argparse.Namespace) -> Iterator[dict]:
    """Clips a second of our loader against other ways to read the same frames of the same files."""
    if options.pyavs_ffmpeg:
        with_pyavs_ffmpeg()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for gop in options.gops:
            files = [str(Path(folder, f"gop{gop}-{k}.mp4")) for k in range(options.files)]
            for seed, path in enumerate(files):
                write_video(Path(path), seed, gop)
            size = statistics.mean(Path(path).stat().st_size for path in files) / 1024
            what = f"{N_FRAMES} frames {WIDTH}x{HEIGHT}, GOP {gop}, {size:.0f} KiB each"
            print(f"\n{len(files)} files, {what}")
            readers = available(files[0])
            for kind, workers in itertools.product(options.kinds, options.workers):
                loaders = {
                    name: DataLoader(
                        asked(files, kind, options.clips),
                        batch_size=4,
                        num_workers=workers,
                        collate_fn=partial(batch, reader),
                        persistent_workers=workers > 0,
                    )
                    for name, reader in readers.items()
                }
                yield {
                    "title": f"16 of {N_FRAMES} frames, {kind}, GOP {gop}, {workers} workers",
                    "unit": "clips/s" if workers else "clips a second of processor time",
                    "runs": {name: partial(rate, loader) for name, loader in loaders.items()},
                }
        yield memory(files, options.memory_videos)


def add_parsers(parts: "argparse._SubParsersAction") -> None:
    one = parts.add_parser("loading", help=loading.__doc__)
    one.set_defaults(compare=loading)
    one.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    one.add_argument("--kinds", nargs="+", default=["dense", "uniform"])
    one.add_argument("--gops", type=int, nargs="+", default=list(GOPS))
    one.add_argument("--files", type=int, default=8, help="of each kind")
    one.add_argument("--clips", type=int, default=48, help="in a round")
    one.add_argument("--repeats", type=int, default=7)
    one.add_argument("--memory-videos", type=int, default=500)
    one.add_argument("--pyavs-ffmpeg", action="store_true", help="let torchcodec use PyAV's")
