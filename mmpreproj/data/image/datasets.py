"""Datasets over labelled image files: what happens to unreadable ones, padding, seeds."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from PIL import Image

from mmpreproj.data.bad_files import FileDataset
from mmpreproj.data.image.files import UnreadableImage
from mmpreproj.data.sampling import seeded
from mmpreproj.data.targets import PADDING, unreadable

MAX_FAILURES_IN_A_ROW = 50
BadImages = Literal["warn", "error"]
Item = tuple[torch.Tensor, int]


class ImageSource(Protocol):
    """Labelled images, read one by one, in a fixed order. Picklable, for spawned workers."""

    classes: list[str]
    """Names of the classes that occur."""
    targets: np.ndarray
    """int64 [N], indices into `classes`."""

    def load(self, index: int, channels: int) -> Image.Image:
        """Raises UnreadableImage."""

    def name(self, index: int) -> str:
        """A path, or whatever tells a person which image it is."""

    def place(self) -> str:
        """Where the images come from; two sources with one place hold the same images."""


class LabelledImages(FileDataset):
    """Some images of a source, as uint8 [C, H, W]; keeps a record of the unreadable ones."""

    def __init__(
        self,
        source: ImageSource,
        indices: np.ndarray,
        targets: np.ndarray,
        transform: Callable[[Image.Image], torch.Tensor],
        channels: int,
        bad_images: BadImages = "warn",
    ):
        """targets: int64, one for each image of the source, numbered as in training."""
        self.source = source
        super().__init__(indices)
        self.targets = targets
        self.transform = transform
        self.channels = channels
        self.bad_images = bad_images

    def name(self, index: int) -> str:
        return self.source.name(index)

    def target(self, position: int) -> int:
        return int(self.targets[self.indices[position]])

    def load(self, position: int) -> Image.Image | None:
        """The image; None (recorded, warned about once) where it is unreadable, if tolerated."""
        try:
            return self.source.load(int(self.indices[position]), self.channels)
        except UnreadableImage as error:
            if self.bad_images == "error":
                raise
            self.record(position, error)
            return None


class TrainImages(LabelledImages):
    """For training: an unreadable image is replaced by the next readable one.

    Indices may carry the epoch (see sampling.py); the augmentation of a batch follows from (seed,
    rank, epoch, first index of the batch).
    """

    consequence = "another image takes its place in training"

    def __init__(self, *args, seed: int = 0, rank: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.seed = seed
        self.rank = rank

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        epoch, first = divmod(indices[0], len(self))
        with seeded(self.seed, self.rank, epoch, first):
            return [self._item(index % len(self)) for index in indices]

    def _item(self, position: int) -> Item:
        for _ in range(MAX_FAILURES_IN_A_ROW):
            image = self.load(position)
            if image is not None:
                return self.transform(image), self.target(position)
            position = (position + 1) % len(self)
        names = [
            self.source.name(int(self.indices[(position - k) % len(self)]))
            for k in (MAX_FAILURES_IN_A_ROW, 1)
        ]
        raise ValueError(
            f"{MAX_FAILURES_IN_A_ROW} training images in a row cannot be read, from "
            f"{names[0]!r} to {names[1]!r}: "
            "is the disk still there?"
        )


class EvalImages(LabelledImages):
    """For evaluation: n items for n images, whatever can be read, and then padding (see
    targets.py).

    Items that are marked have black images.
    """

    consequence = "it is counted as wrong"

    def __init__(self, *args, image_size: tuple[int, int], n_padding: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.image_size = image_size
        self.n_padding = n_padding

    def __len__(self) -> int:
        return len(self.indices) + self.n_padding

    def __getitem__(self, position: int) -> Item:
        if position >= len(self.indices):
            if position >= len(self):
                raise IndexError(f"item {position} of {len(self)}")
            return self._black(), PADDING
        image = self.load(position)
        if image is None:
            return self._black(), unreadable(self.target(position))
        return self.transform(image), self.target(position)

    def _black(self) -> torch.Tensor:
        return torch.zeros(self.channels, *self.image_size, dtype=torch.uint8)
