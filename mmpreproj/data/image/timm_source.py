"""One random-access dataset that timm opened, as a source of labelled images."""

import os

import numpy as np
from PIL import Image
from timm.data.dataset import ImageDataset
from torch.utils.data import Dataset
from torchvision.datasets import DatasetFolder

from mmpreproj.data.image.files import UnreadableImage, load_image, to_channels

CANNOT_READ = (OSError, SyntaxError, Image.DecompressionBombError)


class TimmSource:
    """Images of a map-style dataset that timm opened; targets are read without decoding an image.

    Raises: ValueError where the targets are not single class numbers, or cannot be had without
    decoding.
    """

    def __init__(self, dataset: Dataset, label: str):
        self.dataset = dataset
        self.label = label
        self.reader = (
            getattr(dataset, "reader", None) if isinstance(dataset, ImageDataset) else None
        )
        if hasattr(self.reader, "cache_tarfiles"):
            # An open tar shared by forked workers shares its file position: they would read each
            # other's bytes
            self.reader.cache_tarfiles = False
        targets = self._read_targets()
        if (
            targets.ndim != 1
            or not np.issubdtype(targets.dtype, np.integer)
            or (len(targets) and targets.min() < 0)
        ):
            raise ValueError(
                f"{label}: the targets are not class numbers, but {targets[:3].tolist()} …"
            )
        self.targets = targets.astype(np.int64)
        self.classes = class_names(dataset, int(targets.max(initial=-1)) + 1)

    def _read_targets(self) -> np.ndarray:
        if hasattr(self.reader, "targets"):
            return np.asarray(self.reader.targets)
        if hasattr(self.reader, "samples"):
            return np.array([target for _, target in self.reader.samples])
        if hasattr(self.reader, "iter_targets"):
            return np.array(list(self.reader.iter_targets()))
        if hasattr(self.dataset, "targets"):
            return np.asarray(self.dataset.targets)
        if getattr(self.dataset, "target_type", None) == ["full"]:  # torchvision's INaturalist
            return np.array([target for target, _ in self.dataset.index])
        raise ValueError(
            f"{self.label}: {type(self.dataset).__name__} does not give its classes in advance"
        )

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, index: int) -> str:
        if self.reader is not None:
            return f"{self.label}: {self.reader.filename(index, absolute=True) or index}"
        if isinstance(self.dataset, DatasetFolder):
            return self.dataset.samples[index][0]
        return f"{self.label}[{index}]"

    def load(self, index: int, channels: int) -> Image.Image:
        if isinstance(self.dataset, DatasetFolder):
            return load_image(self.name(index), channels)
        try:
            if self.reader is None:
                return to_channels(self.dataset[index][0], channels)
            file = self.reader[index][0]
        except CANNOT_READ as error:
            raise UnreadableImage(f"cannot read image {self.name(index)!r} ({error})") from error
        return load_image(file, channels, name=self.name(index))

    def place(self) -> str:
        if hasattr(self.reader, "samples"):
            return os.path.realpath(self.reader.root)
        if isinstance(self.dataset, DatasetFolder):
            return os.path.realpath(self.dataset.root)
        if hasattr(self.dataset, "train"):  # torchvision knows two parts by many names
            return f"{self.dataset.root}, train={self.dataset.train}"
        return self.label


def class_names(dataset: Dataset, at_least: int) -> list[str]:
    """Class names by class number; a number without a name is its own name."""
    reader = getattr(dataset, "reader", None)
    numbers = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
    if numbers:
        names = {index: str(name) for name, index in numbers.items()}
    else:
        listed = getattr(dataset, "wnids", None) or getattr(dataset, "classes", None)
        listed = listed or getattr(dataset, "all_categories", None) or []
        names = {index: str(name) for index, name in enumerate(listed)}
    return [names.get(index, str(index)) for index in range(max([at_least - 1, *names]) + 1)]
