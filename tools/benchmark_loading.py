"""Clips a second of our loader against other ways to read the same frames of the same files.

    python tools/benchmark.py loading --workers 1 2

Files of 300 frames are written by PyAV; 16 frames of each are read, resized and cropped, in a
DataLoader. Every reader gets the same frame numbers and the same resize, so that only decoding
differs. The peers: decord2 by hand (VideoReader, get_batch), a sequential PyAV decode that converts
only the sampled frames, torchcodec and pytorchvideo, the latter two where they can be imported.
With 0 workers what is measured is processor time, threads included, which a busy machine disturbs
less. Then resident memory is watched over many videos.
"""

import argparse
import functools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from measuring import alternate, report
from torch.utils.data import DataLoader, Dataset

from mmpreproj.data.video import read_frames
from mmpreproj.data.video.sampling import dense, span, uniform_views
from mmpreproj.data.video.transforms import EvalClips

N_FRAMES = 300
WIDTH, HEIGHT = 320, 240
GOPS = (12, 250)
"""Frames between key frames: as in clips made for training, and as encoders do by default."""
CLIP = {"num_frames": 16, "stride": 4}
CONFIG = {
    "input_size": [3, 16, 224, 224],
    "mean": [0.45] * 3,
    "std": [0.225] * 3,
    "interpolation": "bilinear",
}


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


def with_pytorchvideo(path: str, numbers: list[int]) -> np.ndarray:
    from pytorchvideo.data.encoded_video import EncodedVideo

    # it reads by time: all frames of the stretch, from which those of the clip are taken
    video = EncodedVideo.from_path(path, decode_audio=False)
    first, last = numbers[0], numbers[-1]
    clip = video.get_clip(Fraction(first, 30), Fraction(last + 1, 30))["video"]
    video.close()
    chosen = clip[:, [i - first for i in numbers]]
    return chosen.to(torch.uint8).permute(1, 2, 3, 0).contiguous().numpy()


READERS: dict[str, Callable[[str, list[int]], np.ndarray]] = {
    "mmpreproj": with_ours,
    "decord2": with_decord,
    "decord2, 1 thread": functools.partial(with_decord, threads=1),
    "PyAV, sequential": with_sequential_pyav,
    "torchcodec, exact": with_torchcodec,
    "torchcodec, approximate": functools.partial(with_torchcodec, mode="approximate"),
    "pytorchvideo": with_pytorchvideo,
}


class Clips(Dataset):
    """Clips of files by a reader; the frame numbers of item i follow from i."""

    def __init__(self, files: list[str], reader: Callable, kind: str, n: int):
        self.files, self.reader, self.kind, self.n = files, reader, kind, n
        self.transform = EvalClips(CONFIG)

    def __len__(self) -> int:
        return self.n

    def numbers(self, index: int) -> list[int]:
        if self.kind == "uniform":
            return uniform_views(N_FRAMES, CLIP["num_frames"])[0]
        spare = N_FRAMES - span(**CLIP)
        start = int(np.random.default_rng(index).integers(spare + 1))
        return dense(N_FRAMES, **CLIP, start=start)

    def __getitem__(self, index: int) -> torch.Tensor:
        frames = self.reader(self.files[index % len(self.files)], self.numbers(index))
        return self.transform(frames[None])[0]


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
        if frames.shape != expected.shape:
            print(f"  {name}: frames of shape {frames.shape}, expected {expected.shape}")
        else:
            difference = int(np.abs(frames.astype(int) - expected).max())
            print(f"  {name}: largest difference from a sequential decode {difference} of 255")
    return readers


def rates(
    readers: dict[str, Callable], files: list[str], kind: str, workers: int, options
) -> dict[str, list[float]]:
    """Clips a second of each reader, round by round; worker start-up is not counted."""
    loaders = {
        name: DataLoader(
            Clips(files, reader, kind, options.clips),
            batch_size=4,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        for name, reader in readers.items()
    }

    clock = time.perf_counter if workers else time.process_time

    def run(loader: DataLoader) -> float:
        start = clock()
        n = sum(len(batch) for batch in loader)
        return n / (clock() - start)

    runs = {name: functools.partial(run, loader) for name, loader in loaders.items()}
    return alternate(runs, options.repeats)  # the first round, which starts workers, is left out


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def memory(files: list[str], n: int) -> dict[str, object]:
    """Resident memory of this process after every tenth of n videos."""
    clips = Clips(files, with_ours, "dense", n)
    seen = []
    for index in range(n):
        clips[index]
        if (index + 1) % max(n // 10, 1) == 0:
            seen.append(resident_mib())
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


def main(options: argparse.Namespace) -> list[dict[str, object]]:
    if options.pyavs_ffmpeg:
        with_pyavs_ffmpeg()
    torch.set_num_threads(1)
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for gop in options.gops:
            files = [str(Path(folder, f"gop{gop}-{k}.mp4")) for k in range(options.files)]
            for seed, path in enumerate(files):
                write_video(Path(path), seed, gop)
            size = statistics.mean(Path(path).stat().st_size for path in files) / 1024
            print(f"\n{len(files)} files, {N_FRAMES} frames {WIDTH}x{HEIGHT}, GOP {gop}, ", end="")
            print(f"{size:.0f} KiB each")
            readers = available(files[0])
            for kind in options.kinds:
                for workers in options.workers:
                    title = f"16 of {N_FRAMES} frames, {kind}, GOP {gop}, {workers} workers"
                    timed = rates(readers, files, kind, workers, options)
                    unit = "clips/s" if workers else "clips a second of processor time"
                    results.append(report(title, timed, unit))
                    best = max(list(timed)[1:], key=lambda name: statistics.median(timed[name]))
                    print(f"  best of the others: {best}")
        results.append(memory(files, options.memory_videos))
    return results


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """The part "loading" of tools/benchmark.py."""
    parser = subparsers.add_parser("loading", help=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=["dense", "uniform"])
    parser.add_argument("--gops", type=int, nargs="+", default=list(GOPS))
    parser.add_argument("--files", type=int, default=8, help="of each kind")
    parser.add_argument("--clips", type=int, default=48, help="in a round")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-videos", type=int, default=500)
    parser.add_argument("--pyavs-ffmpeg", action="store_true", help="let torchcodec use PyAV's")
    return parser


if __name__ == "__main__":
    main_parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_parser(main_parser.add_subparsers(required=True))
    main(main_parser.parse_args())
