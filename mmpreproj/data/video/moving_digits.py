"""scikit-learn's handwritten digits in motion, the default: real video files that need no download.

Each video shows one digit that moves at a constant speed in one of eight directions. There are two
label sets: which digit (content: any one frame tells it) and which direction (motion: only the
order of the frames tells it). The files are H.264, in Kinetics layout.

Why one frame does not tell the direction. The picture is a torus: what leaves on one side comes
back on the other. The digit starts at a place drawn uniformly from those whose row and column are
multiples of `speed`, whatever its direction. Moving is adding a fixed multiple of `speed` modulo
the picture's size, which permutes these places, as the size is a multiple of `speed` too. So at
every time the place is distributed uniformly over them, alike for all directions. It is also why a
video played backwards is a video of the opposite direction, from another start that was as likely.

What the codec leaves in a frame does depend on the frames before it; at the default quality that is
less than a grey level on average.

Why the places are few. A token that sees digits at every shift tells little of them on average
until the features are far from linear: with every place allowed, small transformers stayed at
chance on the digits for the minutes that the default is meant to take.
"""

import csv
import dataclasses
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from mmpreproj.data.image.digits import N_TEST, SIDE, load_digits, resample
from mmpreproj.data.loaders import stratified_holdout
from mmpreproj.data.video.clips import VideoAugment
from mmpreproj.data.video.video_module import VideoDataModule
from mmpreproj.data.vision import SPLITS
from mmpreproj.files import cache_folder, whole_folder
from mmpreproj.messages import need

__all__ = ["MovingDigits", "MovingDigitsDataModule", "encode", "opposite", "places", "plan"]
__all__ += ["render", "write_moving_digits"]

VERSION = 1
"""Part of the cache folder's name. To be raised whenever equal settings give other videos; what
AVX-512 changed (see ASSEMBLY) is too little."""

STEPS = {
    "east": (0, 1),
    "north-east": (-1, 1),
    "north": (-1, 0),
    "north-west": (-1, -1),
    "west": (0, -1),
    "south-west": (1, -1),
    "south": (1, 0),
    "south-east": (1, 1),
}
"""Direction -> what a step adds to (row, column). Counter-clockwise; north is up."""

DIRECTIONS = tuple(STEPS)
COLUMNS = ("digit", "direction", "youtube_id", "time_start", "time_end", "split")
SETTINGS_FILE = "moving_digits.json"
FPS = 8
X86 = platform.machine().lower() in ("x86_64", "amd64")
ASSEMBLY = {"x264-params": "asm=MMX2,SSE2,SSE2Fast,SSSE3,SSE4.2"} if X86 else {}
"""Without x264's assembly for AVX-512: of the default's 5,316 files that gave 35 other bytes when
they were written again, and to 57 always others than this, by 0.06 grey levels on average."""


@dataclasses.dataclass(frozen=True)
class MovingDigits:
    """What the videos are like. Raises: ValueError for settings out of range."""

    n_frames: int = 16
    """Of each video, at 8 frames a second."""
    size: int = 32
    """Height and width of the videos, in pixels; even."""
    digit_size: int = 16
    """Height and width to which the digits of 8 x 8 pixels are enlarged."""
    speed: int = 8
    """Pixels a frame, along each axis that the digit moves on (diagonals are faster by the root of
    2), and what rows and columns of its places are multiples of. `size` must be a multiple."""
    clips_per_image: tuple[int, int, int] = (4, 2, 1)
    """Videos of each training, validation and test image, each in a direction of its own."""
    val_fraction: float = 0.1
    """Part of the images outside the test split that is held out for validation."""
    crf: int = 12
    """Quality of the encoding, 0 (lossless) to 51."""
    seed: int = 0
    """Decides on directions, starts and validation images. Not the run's seed, so that all seeds
    of a study see the same files."""

    def __post_init__(self) -> None:
        if self.n_frames < 1:
            raise ValueError(f"n_frames must be 1 or more, got {self.n_frames}")
        if self.size % 2 or self.size < 16:
            raise ValueError(f"size must be even, as YUV 4:2:0 is, and 16 or more, got {self.size}")
        if not SIDE <= self.digit_size <= self.size:
            raise ValueError(
                f"digit_size must be from {SIDE} to size={self.size}, got {self.digit_size}"
            )
        if self.speed < 1 or self.size % self.speed or self.size // self.speed < 3:
            raise ValueError(
                f"speed must go into size={self.size} three times or more without a rest (after "
                f"half the size opposite directions look alike), got {self.speed}"
            )
        counts = self.clips_per_image
        if len(counts) != 3 or not all(1 <= count <= len(DIRECTIONS) for count in counts):
            raise ValueError(
                "clips_per_image must be three numbers (train, val, test) from 1 to 8, got "
                f"{counts}"
            )
        if not 0.0 < self.val_fraction < 1.0:
            raise ValueError(f"val_fraction must be between 0 and 1, got {self.val_fraction}")
        if not 0 <= self.crf <= 51:
            raise ValueError(f"crf must be from 0 to 51, got {self.crf}")

    def facts(self) -> dict[str, Any]:
        """Plain types, with the version."""
        settings = dataclasses.asdict(self)
        return {"version": VERSION, **settings, "clips_per_image": list(self.clips_per_image)}

    def root(self) -> Path:
        """The cache folder of these settings: moving_digits-v<version>-<hash of the settings> in
        $XDG_CACHE_HOME/mmpreproj (~/.cache/mmpreproj)."""
        text = json.dumps(self.facts(), sort_keys=True).encode()
        key = hashlib.blake2b(text, digest_size=6).hexdigest()
        return cache_folder(f"moving_digits-v{VERSION}-{key}")


class Clip(NamedTuple):
    """A video to be written."""

    image: int
    """Number of the image in scikit-learn's data set."""
    digit: int
    direction: str
    start: tuple[int, int]
    """Row and column of the digit's upper left corner in the first frame."""

    @property
    def name(self) -> str:
        """Of eleven characters, as an id of YouTube's: digit0042nw."""
        initials = "".join(word[0] for word in self.direction.split("-"))
        return f"digit{self.image:04d}{initials:_>2}"


def opposite(direction: str) -> str:
    """The direction of the same video played backwards.

    Raises: ValueError if there is no such direction.
    """
    if direction not in STEPS:
        raise ValueError(f"unknown direction {direction!r}; there are {', '.join(DIRECTIONS)}")
    return DIRECTIONS[(DIRECTIONS.index(direction) + 4) % 8]


def places(start: tuple[int, int], direction: str, settings: MovingDigits) -> np.ndarray:
    """Row and column of the digit's upper left corner in each frame.

    Shape: int64 [n_frames, 2], multiples of speed below size if the start is one.
    """
    step = settings.speed * np.array(STEPS[direction])
    return (np.array(start) + np.arange(settings.n_frames)[:, None] * step) % settings.size


def render(
    digit: np.ndarray, start: tuple[int, int], direction: str, settings: MovingDigits
) -> np.ndarray:
    """The frames of a video before it is encoded: moves are whole pixels, nothing is resampled.

    Shape: digit uint8 [digit_size, digit_size] -> uint8 [n_frames, size, size].
    """
    canvas = np.zeros((settings.size, settings.size), np.uint8)
    canvas[: digit.shape[0], : digit.shape[1]] = digit
    return np.stack(
        [np.roll(canvas, tuple(place), (0, 1)) for place in places(start, direction, settings)]
    )


def plan(targets: np.ndarray, settings: MovingDigits) -> dict[str, list[Clip]]:
    """Which videos there are, by split, in the order of the images.

    Images are dealt out first, so no image of one split is in another, and as the images of the
    digits are (`mmpreproj.data.DigitsDataModule`): 540 are the test split, the same ones for ever;
    validation is held out of the rest. Then the directions are dealt out in turn, to one class
    after the other: an image never gets one twice, and within a split, as within a class of one,
    any two directions come equally often or differ by one video.

    Shape: targets int [N], the digit of each image.
    """
    rest, test = stratified_holdout(targets, n_held=N_TEST, seed=0)
    kept, held = stratified_holdout(
        targets[rest], fraction=settings.val_fraction, seed=settings.seed
    )
    clips = {}
    for number, images in enumerate((rest[kept], rest[held], test)):
        count = settings.clips_per_image[number]
        generator = np.random.RandomState([settings.seed, number])  # its stream is frozen
        order = generator.permutation(len(images))
        order = order[np.argsort(targets[images[order]], kind="stable")]
        directions = np.empty((len(images), count), np.int64)
        directions[order] = np.arange(len(images) * count).reshape(-1, count) % len(DIRECTIONS)
        starts = generator.randint(settings.size // settings.speed, size=(len(images), count, 2))
        starts *= settings.speed
        clips[SPLITS[number]] = [
            Clip(int(image), int(targets[image]), DIRECTIONS[direction], tuple(start.tolist()))
            for image, *of_image in zip(images, directions, starts, strict=True)
            for direction, start in zip(*of_image, strict=True)
        ]
    return clips


def encode(path: str | os.PathLike, frames: np.ndarray, crf: int = 12, fps: int = FPS) -> None:
    """Writes grey frames as H.264 (YUV 4:2:0, with B-frames). One thread: equal bytes every time.

    Shape: frames uint8 [T, H, W], H and W even.
    Raises: ImportError without PyAV; RuntimeError if its FFmpeg has no H.264 encoder.
    """
    av = need("av", "writing videos", "video")
    if "libx264" not in av.codecs_available:
        raise RuntimeError(
            f"the FFmpeg in this PyAV ({av.__version__}) has no H.264 encoder (libx264); PyAV's "
            "own wheels have one: pip install --force-reinstall --only-binary av av"
        )
    with av.open(os.fspath(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames.shape[1:]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        stream.options = {"crf": str(crf), "bf": "2", **ASSEMBLY}
        for frame in frames:
            rgb = np.repeat(frame[:, :, None], 3, axis=2)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        container.mux(stream.encode())


def write_moving_digits(
    root: str | os.PathLike | None = None,
    settings: MovingDigits | None = None,
    progress: bool | None = None,
) -> Path:
    """Writes the videos, unless they are there, and returns their folder.

        train.csv, val.csv, test.csv    digit,direction,youtube_id,time_start,time_end,split
        train/digit0042nw_000000_000002.mp4, ...

    They are written into a folder beside it that is renamed at the end: what is interrupted leaves
    nothing that looks finished, and of two processes that write at once the first one's is kept.

    Args:
        root: the folder; None: one of the cache's, see `MovingDigits.root`.
        settings: None: the defaults.
        progress: show a bar; None: on a terminal.

    Raises:
        ValueError: if `root` holds something else, or moving digits of other settings.
    """
    settings = settings or MovingDigits()
    folder = settings.root() if root is None else Path(root).expanduser().absolute()
    if _is_written(folder, settings):
        return folder
    pixels, targets = load_digits()
    enlarged = resample(pixels, (settings.digit_size, settings.digit_size))[:, 0]
    images = enlarged.mul(255).round().to(torch.uint8).numpy()
    clips = plan(targets, settings)
    seconds = max(1, round(settings.n_frames / FPS))
    hidden = None if progress is None else not progress
    with (
        whole_folder(folder) as unfinished,
        tqdm(
            total=sum(map(len, clips.values())), desc="writing moving digits", disable=hidden
        ) as bar,
    ):
        for split in SPLITS:
            (unfinished / split).mkdir()
            rows = [COLUMNS]
            for clip in clips[split]:
                frames = render(images[clip.image], clip.start, clip.direction, settings)
                path = unfinished / split / f"{clip.name}_{0:06d}_{seconds:06d}.mp4"
                encode(path, frames, settings.crf)
                rows.append((clip.digit, clip.direction, clip.name, 0, seconds, split))
                bar.update()
            with open(unfinished / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
        text = json.dumps(settings.facts(), indent=2)
        (unfinished / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")
    _is_written(folder, settings)  # by another process, perhaps
    return folder


def _is_written(folder: Path, settings: MovingDigits) -> bool:
    """Raises ValueError if there is something else at the folder's place."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds something else than moving digits (there is no readable "
            f"{SETTINGS_FILE}); give another root, or remove it"
        ) from error
    wanted = settings.facts()
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    if differing:
        old, new = ({name: of.get(name) for name in differing} for of in (found, wanted))
        raise ValueError(
            f"{folder} was written with {old}, not {new}; give another root, or remove it"
        )
    return True


class MovingDigitsDataModule(VideoDataModule):
    """Handwritten digits that move in eight directions: videos with two label sets, "digit" and
    "direction". The files are written when training starts, once, and read like any other videos.

    Args:
        root: their folder; None: one of the cache's, see `MovingDigits.root`.
        videos: what they are like; None: the defaults.
        stride: of dense clips, in frames. At the default's speed, steps of 2 hide directions, and
            steps of 3 turn them around.
        augment: training augmentation; None: none. Mirror images are refused: they would turn
            directions, and digits into other shapes.
        batch_size: clips in a training batch, on each process.
        num_workers: worker processes of each loader.
        progress: show a bar while the files are written; None: on a terminal.
        keywords: those of VideoDataModule.
    """

    def __init__(
        self,
        root: str | None = None,
        videos: MovingDigits | None = None,
        stride: int = 1,
        augment: VideoAugment | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
        progress: bool | None = None,
        **keywords: Any,
    ):
        self.videos = videos or MovingDigits()
        self.progress = progress
        augment = augment or VideoAugment(no_aug=True)
        if not augment.no_aug and augment.hflip > 0:
            raise ValueError(
                f"a mirror image moves in another direction and is no digit: set augment.hflip to "
                f"0, got {augment.hflip}"
            )
        super().__init__(
            root=str(self.videos.root()) if root is None else root,
            train="train",
            val="val",
            test="test",
            label_columns=["digit", "direction"],
            stride=stride,
            augment=augment,
            batch_size=batch_size,
            num_workers=num_workers,
            **keywords,
        )

    opposites = {"direction": {name: opposite(name) for name in DIRECTIONS}}
    """Of each label set, the class of a video that is played backwards."""

    def prepare_data(self) -> None:
        write_moving_digits(self.root, self.videos, self.progress)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "videos": self.videos.facts()}
