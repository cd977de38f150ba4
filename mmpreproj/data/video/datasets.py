"""Datasets over labelled video files: clips drawn by seed, unreadable files, padding.

A file is opened, read and closed for each item: nothing is open when workers fork, and memory does
not grow with the number of videos seen.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from mmpreproj.data.bad_files import FileDataset
from mmpreproj.data.sampling import seeded
from mmpreproj.data.targets import PADDING, unreadable
from mmpreproj.data.video import sampling
from mmpreproj.data.video.decode import Decoder, UnreadableVideo, read_frames
from mmpreproj.data.video.lists import VideoList

MAX_FAILURES_IN_A_ROW = 50
BadVideos = Literal["warn", "error"]
Item = tuple[torch.Tensor, torch.Tensor]


class FrameSampler:
    """Frame numbers of a clip from the number of frames; see mmpreproj.data.video.sampling."""

    def __init__(
        self,
        kind: sampling.Sampling,
        num_frames: int,
        stride: int,
        views: int = 1,
        padding: sampling.Padding = "repeat",
    ):
        self.kind = kind
        self.num_frames = num_frames
        self.stride = stride
        self.views = views
        self.padding = padding

    def train(self, n_frames: int) -> list[int]:
        """T numbers, from torch's default generator."""
        if self.kind == "uniform":
            return sampling.uniform_train(n_frames, self.num_frames)
        return sampling.dense_train(n_frames, self.num_frames, self.stride, self.padding)

    def test(self, n_frames: int) -> list[int]:
        """V * T numbers, view by view."""
        if self.kind == "uniform":
            views = sampling.uniform_views(n_frames, self.num_frames, self.views)
        else:
            views = sampling.dense_views(
                n_frames, self.num_frames, self.stride, self.views, self.padding
            )
        return [i for view in views for i in view]


class LabelledVideos(FileDataset):
    """Some videos of a list; keeps a record of the unreadable ones."""

    def __init__(
        self,
        videos: VideoList,
        indices: np.ndarray,
        targets: np.ndarray,
        sampler: FrameSampler,
        transform: Callable[[np.ndarray], torch.Tensor],
        decoder: Decoder = "auto",
        threads: int = 1,
        bad_videos: BadVideos = "warn",
    ):
        """targets: int64 [N, L], a row for each video of the list, numbered as in training."""
        self.videos = videos
        super().__init__(indices)
        self.targets = targets
        self.sampler = sampler
        self.transform = transform
        self.decoder = decoder
        self.threads = threads
        self.bad_videos = bad_videos

    def name(self, index: int) -> str:
        return self.videos.name(index)

    def target(self, position: int) -> torch.Tensor:
        """int64 [L]."""
        return torch.from_numpy(self.targets[self.indices[position]])

    def load(self, position: int, numbers: Callable[[int], Sequence[int]]) -> np.ndarray | None:
        """Frames uint8 [N, H, W, 3]; None (recorded, warned about once) where unreadable, if
        tolerated."""
        path = self.name(int(self.indices[position]))
        try:
            return read_frames(path, numbers, self.decoder, self.threads)
        except UnreadableVideo as error:
            if self.bad_videos == "error":
                raise
            self.record(position, error)
            return None


class TrainVideos(LabelledVideos):
    """For training. Items: (clip uint8 [C, T, H, W], targets int64 [L]).

    Indices may carry the epoch (see mmpreproj/data/sampling.py). Where the clip starts and how it
    is augmented follow from (seed, epoch, index) alone. In place of an unreadable video another one
    is drawn.
    """

    consequence = "another video takes its place in training"

    def __init__(self, *args, seed: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.seed = seed

    def __getitem__(self, index: int) -> Item:
        epoch, position = divmod(index, len(self))
        with seeded(self.seed, epoch, position):
            for _ in range(MAX_FAILURES_IN_A_ROW):
                frames = self.load(position, self.sampler.train)
                if frames is not None:
                    return self.transform(frames), self.target(position)
                failed, position = position, int(torch.randint(len(self), ()))
        raise ValueError(
            f"{MAX_FAILURES_IN_A_ROW} training videos in a row cannot be read, the last one "
            f"{self.videos.name(int(self.indices[failed]))!r}: is the disk still there?"
        )


class EvalVideos(LabelledVideos):
    """For evaluation. Items: (clips uint8 [V * S, C, T, H, W], targets int64 [L]).

    n items for n videos, whatever can be read, and then padding (see mmpreproj/data/targets.py: all
    L targets of an item are marked, or none). Items that are marked have black clips.
    """

    consequence = "it is counted as wrong"

    def __init__(self, *args, clip_shape: tuple[int, ...], n_padding: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.clip_shape = clip_shape
        self.n_padding = n_padding

    def __len__(self) -> int:
        return len(self.indices) + self.n_padding

    def __getitem__(self, position: int) -> Item:
        if position >= len(self.indices):
            if position >= len(self):
                raise IndexError(f"item {position} of {len(self)}")
            return self._black(), torch.full((self.targets.shape[1],), PADDING)
        frames = self.load(position, self.sampler.test)
        target = self.target(position)
        if frames is None:
            return self._black(), torch.tensor([unreadable(t) for t in target.tolist()])
        return self.transform(frames.reshape(self.sampler.views, -1, *frames.shape[1:])), target

    def _black(self) -> torch.Tensor:
        return torch.zeros(self.clip_shape, dtype=torch.uint8)
