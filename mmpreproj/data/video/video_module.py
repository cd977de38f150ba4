"""The data module over labelled video files."""

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from mmpreproj.data.labelled_files import FileList, OnBad
from mmpreproj.data.video.clips import (
    ClipReader,
    ClipsOfFile,
    EvalClips,
    Padding,
    Sampling,
    TrainClip,
    VideoAugment,
)
from mmpreproj.data.video.decode import Decoder
from mmpreproj.data.video.video_lists import read_videos, split_path
from mmpreproj.data.vision import VisionDataModule
from mmpreproj.messages import listed

__all__ = ["VideoDataModule"]

Missing = Literal["error", "skip", "keep"]
CHOICES = {
    "sampling": Sampling,
    "padding": Padding,
    "missing": Missing,
    "bad_videos": OnBad,
    "decoder": Decoder,
}


class VideoDataModule(VisionDataModule):
    """Clips of labelled video files: Kinetics, class folders, or lists of paths and labels.

    Training batches are (clips [B, C, T, H, W], targets int64 [B, L]), evaluation batches (clips
    [B, V * S, C, T, H, W], targets int64 [B, L]) with V temporal views times S crops of each video,
    whose scores are to be averaged; L is the number of label sets, usually 1. Marks are in all L
    columns of the targets at once.

    The test split is what is reported; validation, on which the best checkpoint is chosen, is `val`
    or held out of training. Class ids are those of the training split, in every split.

    Args:
        root: folder that names of splits and relative paths in lists start from (never the working
            directory).
        train: list or folder to train on, relative to root. "train" is train.csv, .txt, .tsv,
            .list, or the class folders in train/, whichever is there first. Kinetics clips are
            looked for in train/ beside train.csv, else anywhere below root.
        val: the same to validate on; None: held out of training.
        test: the same to report on; None: val, validate, validation or test, whichever is there.
        label_columns: columns of lists with a header that hold labels, a label set each; None:
            the column "label", as the set "class".
        missing: files that lists name but that are not there are an error, or left out ("skip",
            told at the start and in the run's record), or kept as unreadable ("keep"). One rule for
            all splits.
        bad_videos: an unreadable video is an error, or ("warn") named once and counted; in training
            another one takes its place, in evaluation it counts as wrong.
        num_frames: T; None, here and in the following, is what the model's configuration says.
        size: side, or (height, width), of the model's input.
        interpolation: "bilinear" or "bicubic".
        sampling: "dense", frames `stride` apart, or "uniform", one from each of T segments.
        stride: of dense clips, in frames.
        padding: of videos shorter than a dense clip: "repeat" the last frame, or "loop".
        views: V, in testing; validation has one, in the middle.
        crops: S, in testing, along the longer side; validation has one, in the middle.
        short_side: pixels of the shorter side from which evaluation crops; None: the model's.
        augment: training augmentation.
        decoder: "auto" or "decord"; see mmpreproj.data.video.decode.
        decoder_threads: of each worker.
        batch_size: clips in a training batch, on each process. In an evaluation batch they are
            videos, V * S clips each.
        label_sets: class names in the order of the model's outputs, from a checkpoint; None: the
            training split's. Numbers in a list are then indices into them.
        keywords: those of VisionDataModule.
    """

    gives = "clips"
    items = "videos"
    opposites: ClassVar[dict[str, dict[str, str]]] = {}
    """{label set: {class: class of the reversed video}}, where that is known."""

    def __init__(
        self,
        root: str,
        train: str = "train",
        val: str | None = None,
        test: str | None = None,
        label_columns: list[str] | None = None,
        missing: Missing = "error",
        bad_videos: OnBad = "warn",
        num_frames: int | None = None,
        size: int | tuple[int, int] | None = None,
        interpolation: Literal["bilinear", "bicubic"] | None = None,
        sampling: Sampling = "dense",
        stride: int = 4,
        padding: Padding = "repeat",
        views: int = 1,
        crops: int = 1,
        short_side: int | None = None,
        augment: VideoAugment | None = None,
        decoder: Decoder = "auto",
        decoder_threads: int = 1,
        batch_size: int = 8,
        label_sets: dict[str, list[str]] | None = None,
        **keywords: Any,
    ):
        super().__init__(batch_size=batch_size, **keywords)
        if min(stride, views, crops) < 1 or decoder_threads < 0:
            raise ValueError(
                f"stride, views and crops must be 1 or more, got {stride}, {views}, {crops}, and "
                f"decoder_threads 0 or more, got {decoder_threads}"
            )
        given = (sampling, padding, missing, bad_videos, decoder)
        for value, (name, kind) in zip(given, CHOICES.items(), strict=True):
            if value not in get_args(kind):
                raise ValueError(f"{name} is one of {', '.join(get_args(kind))}, got {value!r}")
        self.root = root
        self.splits = {"train": train, "val": val, "test": test}
        self.label_columns = label_columns
        self.missing = missing
        self.on_bad = bad_videos
        self.overrides |= {
            "num_frames": num_frames,
            "img_size": size,
            "interpolation": interpolation,
        }
        self.sampling, self.stride, self.padding = sampling, stride, padding
        self.views, self.crops = views, crops
        self.short_side = short_side
        self.augment = augment or VideoAugment()
        if self.augment.re_prob > 0:
            self.erasing = {"probability": self.augment.re_prob, "mode": "pixel"}
        self.decoder, self.decoder_threads = decoder, decoder_threads
        self._label_sets = label_sets
        self._numbers_count = label_sets is not None
        self.n_missing: dict[str, int] = {}

    # Splits

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        for (one, a), (other, b) in itertools.combinations(self._sources().items(), 2):
            both = np.intersect1d(a.paths(), b.paths())
            if len(both):
                names = listed(repr(os.fsdecode(bytes(name))) for name in both)
                warnings.warn(
                    f"{len(both)} videos are in {one} and in {other}: {names}", stacklevel=2
                )

    def has_split(self, split: str) -> bool:
        return bool(self.split_size(split))

    def open(self, split: str) -> FileList:
        """The list of a split, without what is missing where that is tolerated.

        Raises: FileNotFoundError for missing files (`missing="error"`), naming how many and some.
        """
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(
                f"the video folder {str(root)!r} does not exist (or is not a folder); --data.root "
                "takes a folder with train.csv or train/CLASS/*, and the same for val or test"
            )
        videos = read_videos(split_path(root, self.splits, split), root, self.label_columns)
        gone = videos.missing()
        self.n_missing[split] = len(gone)
        if len(gone):
            names = listed((repr(videos.name(i)) for i in gone), most=5)
            message = f"{len(gone)} of {len(videos)} videos of {videos.origin} are missing: {names}"
            if self.missing == "error" or len(gone) == len(videos):
                raise FileNotFoundError(
                    f"{message}; relative paths start from {str(root)!r}. To go on without them "
                    "set missing to skip (--data.missing skip), or to keep, to count them as wrong"
                )
            done = "left out" if self.missing == "skip" else "kept, as unreadable"
            warnings.warn(f"{message}; {done}", stacklevel=2)
            if self.missing == "skip":
                videos = videos.without(gone)
        return videos

    # Datasets

    def _reader(self, views: int = 1) -> ClipReader:
        frames = self.resolved_data_config["input_size"][1]
        how = (self.sampling, frames, self.stride, self.padding)
        return ClipReader(*how, views, self.decoder, self.decoder_threads)

    def reading(self, split: str) -> tuple[Callable, Callable, Sequence[int]]:
        config = self.resolved_data_config
        if split == "train":
            return self._reader().train, TrainClip(config, self.augment), config["input_size"]
        views, crops = (self.views, self.crops) if split == "test" else (1, 1)
        transform = EvalClips(config, crops, self.short_side)
        return self._reader(views).test, transform, (views * crops, *config["input_size"])

    def eval_transform(self) -> ClipsOfFile:
        """A callable, path of a video -> normalised float [V * S, C, T, H, W], as in testing."""
        transform = EvalClips(self.resolved_data_config, self.crops, self.short_side)
        return ClipsOfFile(self.resolved_data_config, self._reader(self.views), transform)

    def describe(self) -> dict[str, Any]:
        origins = {split: part[0].origin for split, part in self._parts.items()}
        return {
            **super().describe(),
            "root": self.root,
            **self.splits,
            **origins,
            "label_sets": self._label_sets,
            "sampling": self.sampling,
            "stride": self.stride if self.sampling == "dense" else None,
            "padding": self.padding,
            "views": self.views,
            "crops": self.crops,
            "decoder": self.decoder,
            "missing": self.missing,
            "n_missing": dict(self.n_missing),
        }
