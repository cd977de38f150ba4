"""The data module over labelled video files."""

import os
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from mmpreproj.data.loaders import LabelledDataModule
from mmpreproj.data.pixels import normalize
from mmpreproj.data.sampling import run_seed
from mmpreproj.data.splits import stratified_holdout
from mmpreproj.data.video import sampling as frame_sampling
from mmpreproj.data.video.datasets import (
    BadVideos,
    EvalVideos,
    FrameSampler,
    LabelledVideos,
    TrainVideos,
)
from mmpreproj.data.video.decode import Decoder, read_frames
from mmpreproj.data.video.lists import VideoList, read_videos, shown
from mmpreproj.data.video.parts import adopt, part_source, refuse_shared
from mmpreproj.data.video.transforms import (
    EvalClips,
    TrainClip,
    VideoAugment,
    erase,
    resolve_video_config,
)

Missing = Literal["error", "skip", "keep"]


class VideoDataModule(LabelledDataModule):
    """Clips of labelled video files: Kinetics, class folders, or lists of paths and labels.

    Training batches are (clips [B, C, T, H, W], targets int64 [B, L]), evaluation batches (clips
    [B, V * S, C, T, H, W], targets int64 [B, L]) with V temporal views times S crops of each video,
    whose scores are to be averaged; L is the number of label sets, usually 1. Loaders yield 8-bit
    pixels, which `on_after_batch_transfer` normalises on the device. Evaluation targets can be
    marks, in all L columns at once: see mmpreproj/data/targets.py.

    The test part is what is reported; validation, on which the best checkpoint is chosen, is `val`
    or held out of training. Class ids are those of the training part, in every part.

    Args:
        root: folder that part names and relative paths in lists start from (never the working
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
            all parts.
        bad_videos: an unreadable video is an error, or ("warn") named once and counted; in training
            another one takes its place, in evaluation it counts as wrong.
        num_frames: T; None, here and in the following, is what the model's configuration says.
        size: side, or (height, width), of the model's input.
        mean: of each channel, from 0 to 1.
        std: of each channel.
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
        batch_size: clips in a training batch, on each process.
        eval_batch_size: videos, V * S clips each, in an evaluation batch; None: batch_size.
        num_workers: worker processes of each loader; 0 reads in the main process.
        val_fraction: part of the training videos held out, class by class, where val is None.
        split_seed: decides which videos are held out; not the run's seed.
        drop_last: leave out the last, smaller training batch of an epoch.
        label_sets: class names in the order of the model's outputs, from a checkpoint; None: the
            training part's. Numbers in a list are then indices into them.
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
        bad_videos: BadVideos = "warn",
        num_frames: int | None = None,
        size: int | tuple[int, int] | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        interpolation: Literal["bilinear", "bicubic"] | None = None,
        sampling: frame_sampling.Sampling = "dense",
        stride: int = 4,
        padding: frame_sampling.Padding = "repeat",
        views: int = 1,
        crops: int = 1,
        short_side: int | None = None,
        augment: VideoAugment | None = None,
        decoder: Decoder = "auto",
        decoder_threads: int = 1,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        drop_last: bool = True,
        label_sets: dict[str, list[str]] | None = None,
    ):
        super().__init__(batch_size, eval_batch_size, num_workers, drop_last)
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"val_fraction must be 0 or more and below 1, got {val_fraction}")
        if min(stride, views, crops) < 1 or decoder_threads < 0:
            raise ValueError(
                f"stride, views and crops must be 1 or more, got {stride}, {views}, {crops}, and "
                f"decoder_threads 0 or more, got {decoder_threads}"
            )
        for name, value, allowed in (
            ("sampling", sampling, ("dense", "uniform")),
            ("padding", padding, ("repeat", "loop")),
            ("missing", missing, ("error", "skip", "keep")),
            ("bad_videos", bad_videos, ("warn", "error")),
            ("decoder", decoder, ("auto", "pyav", "decord")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, got {value!r}")
        self.root = root
        self.parts = {"train": train, "val": val, "test": test}
        self.label_columns = label_columns
        self.missing = missing
        self.bad_videos = bad_videos
        self.overrides = {
            "num_frames": num_frames,
            "size": size,
            "mean": mean,
            "std": std,
            "interpolation": interpolation,
        }
        self.sampling, self.stride, self.padding = sampling, stride, padding
        self.views, self.crops, self.short_side = views, crops, short_side
        self.augment = augment or VideoAugment()
        self.decoder, self.decoder_threads = decoder, decoder_threads
        self.val_fraction, self.split_seed = val_fraction, split_seed
        self._label_sets = {k: list(v) for k, v in label_sets.items()} if label_sets else None
        self._named = label_sets is not None
        self.data_config: dict[str, Any] | None = None
        """The model's input configuration, needed by loaders; the Lightning module sets it."""
        self._parts: dict[str, tuple[VideoList, np.ndarray, np.ndarray]] = {}  # + indices, targets
        self.n_missing: dict[str, int] = {}

    # Parts and classes

    def setup(self, stage: str | None = None) -> None:
        """Finds the videos, those to test on before training too: faults show at the start."""
        needs_train = stage in (None, "fit", "validate") or self._label_sets is None
        if needs_train and "train" not in self._parts:
            train = self.open("train")
            if self._label_sets is None:
                self._label_sets = {k: list(v) for k, v in train.label_sets.items()}
            targets = adopt(train, self._label_sets, "train", self._named)
            if self.parts["val"] is not None:
                kept = np.arange(len(targets))
                val = self.open("val")
                self._parts["val"] = (
                    val,
                    np.arange(len(val)),
                    adopt(val, self._label_sets, "val", self._named),
                )
            else:
                _, joint = np.unique(targets, axis=0, return_inverse=True)
                kept, held = stratified_holdout(
                    joint.reshape(-1), fraction=self.val_fraction, seed=self.split_seed
                )
                self._parts["val"] = (train, held, targets)
            self._parts["train"] = (train, kept, targets)
        if stage in (None, "fit", "test") and "test" not in self._parts and self._has_test(stage):
            test = self.open("test")
            self._parts["test"] = (
                test,
                np.arange(len(test)),
                adopt(test, self._label_sets, "test", self._named),
            )
        lists = {split: part[0] for split, part in self._parts.items()}
        if self.parts["val"] is None:
            lists.pop("val", None)  # held out of train
        refuse_shared(lists)

    def has_split(self, split: str) -> bool:
        return bool(self.split_size(split))

    def _has_test(self, stage: str | None) -> bool:
        """Whether there is a part to report. Training goes on without one that nobody named."""
        root = Path(self.root).expanduser()
        if stage == "test" or self.parts["test"] is not None or not root.is_dir():
            return True
        try:
            part_source(root, self.parts, "test")
        except FileNotFoundError as error:
            warnings.warn(f"nothing will be reported: {error}", stacklevel=3)
            return False
        return True

    def open(self, split: str) -> VideoList:
        """The list of a part, without what is missing where that is tolerated.

        Raises: FileNotFoundError for missing files (`missing="error"`), naming how many and some.
        """
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(
                f"the video folder {str(root)!r} does not exist (or is not a folder); --data.root "
                "takes a folder with train.csv or train/CLASS/*, and the same for val or test"
            )
        videos = read_videos(part_source(root, self.parts, split), root, self.label_columns)
        gone = videos.missing()
        self.n_missing[split] = len(gone)
        if len(gone):
            names = shown([videos.name(int(i)) for i in gone])
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

    @property
    def label_sets(self) -> dict[str, list[str]]:
        """Class names of each label set; the index is the class id. Raises: RuntimeError before
        setup()."""
        if self._label_sets is None:
            raise RuntimeError("the classes are known only after setup()")
        return self._label_sets

    @property
    def classes(self) -> list[str]:
        """Class names of the only label set. Raises: AttributeError where there are several."""
        if len(self.label_sets) != 1:
            raise AttributeError(f"there are {len(self.label_sets)} label sets: see label_sets")
        return next(iter(self.label_sets.values()))

    # Datasets

    @property
    def resolved_data_config(self) -> dict[str, Any]:
        """The input configuration in use, plain types. Raises: ValueError without data_config."""
        if self.data_config is None:
            raise ValueError(
                "the data do not know the model's input yet: set data_config on the data module, "
                "with input_size (C, T, H, W), mean and std, before asking for loaders"
            )
        return resolve_video_config(self.data_config, **self.overrides)

    def split_size(self, split: str) -> int | None:
        return len(self._parts[split][1]) if split in self._parts else None

    def _sampler(self, views: int = 1) -> FrameSampler:
        num_frames = self.resolved_data_config["input_size"][1]
        return FrameSampler(self.sampling, num_frames, self.stride, views, self.padding)

    def dataset(self, split: str, n_padding: int = 0) -> LabelledVideos:
        if split not in self._parts:
            raise RuntimeError(f"call setup() before asking for the {split} part")
        config = self.resolved_data_config
        how = (self.decoder, self.decoder_threads, self.bad_videos)
        if split == "train":
            transform = TrainClip(config, self.augment)
            return TrainVideos(
                *self._parts[split], self._sampler(), transform, *how, seed=run_seed()
            )
        views, crops = (self.views, self.crops) if split == "test" else (1, 1)
        transform = EvalClips(config, crops, self.short_side)
        shape = (views * crops, *config["input_size"])
        return EvalVideos(
            *self._parts[split],
            self._sampler(views),
            transform,
            *how,
            clip_shape=shape,
            n_padding=n_padding,
        )

    def eval_transform(self) -> "ClipsOfFile":
        """A callable, path of a video -> normalised float [V * S, C, T, H, W], as in testing."""
        transform = EvalClips(self.resolved_data_config, self.crops, self.short_side)
        return ClipsOfFile(
            self.resolved_data_config, self._sampler(self.views), transform, self.decoder
        )

    def describe(self) -> dict[str, Any]:
        """Plain facts for the record of a run; what is not known (yet) is None."""
        read = {k: data for k, data in self.datasets.items() if isinstance(data, LabelledVideos)}
        bad = {split: data.bad_files() for split, data in read.items()}
        return {
            "name": type(self).__name__,
            "root": self.root,
            **{split: self._origin(split) for split in self.parts},
            **{f"n_{split}": self.split_size(split) for split in self.parts},
            "val_fraction": self.val_fraction if self.parts["val"] is None else None,
            "split_seed": self.split_seed if self.parts["val"] is None else None,
            "label_sets": self._label_sets,
            "sampling": self.sampling,
            "stride": self.stride if self.sampling == "dense" else None,
            "padding": self.padding,
            "views": self.views,
            "crops": self.crops,
            "decoder": self.decoder,
            "missing": self.missing,
            "n_missing": dict(self.n_missing),
            "n_unreadable": {split: len(names) for split, names in bad.items()},
            "unreadable": {split: names[:20] for split, names in bad.items()},
        }

    def _origin(self, split: str) -> str | None:
        return self._parts[split][0].origin if split in self._parts else self.parts[split]

    # On the device

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        clips, targets = batch
        training = bool(self.trainer and self.trainer.training)
        return self.finish_clips(clips, targets, training), targets

    def finish_clips(
        self, clips: torch.Tensor, targets: torch.Tensor, training: bool = False
    ) -> torch.Tensor:
        """uint8 [B, …, C, T, H, W] -> normalised float; random erasing when training; zeros where
        the targets are marks.

        Called by Lightning through on_after_batch_transfer; call it yourself when reading a loader
        by hand.
        """
        if clips.dtype == torch.uint8:
            clips = normalize(clips, self.resolved_data_config, dims=3)
        if training:
            if self.augment.re_prob > 0:
                clips = erase(clips, self.augment.re_prob)
        else:
            marked = (targets < 0).any(1)
            clips = clips.masked_fill(marked.view(-1, *[1] * (clips.ndim - 1)), 0.0)
        return self.trainer.precision_plugin.convert_input(clips) if self.trainer else clips


class ClipsOfFile:
    """Path of a video -> normalised float32 [V * S, C, T, H, W], just as in testing."""

    def __init__(
        self,
        config: dict[str, Any],
        sampler: FrameSampler,
        transform: EvalClips,
        decoder: Decoder = "auto",
    ):
        self.config = config
        self.sampler = sampler
        self.transform = transform
        self.decoder = decoder

    def frames(self, path: str | os.PathLike) -> np.ndarray:
        """The sampled frames as they are in the file, upright: uint8 [V, T, H, W, 3]."""
        frames = read_frames(path, self.sampler.test, self.decoder)
        return frames.reshape(self.sampler.views, -1, *frames.shape[1:])

    def of_frames(self, frames: np.ndarray) -> torch.Tensor:
        """What `frames` gave -> normalised float32 [V * S, C, T, H, W]."""
        return normalize(self.transform(frames), self.config, dims=3)

    def __call__(self, path: str | os.PathLike) -> torch.Tensor:
        return self.of_frames(self.frames(path))
