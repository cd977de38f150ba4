"""Whatever timm.data.create_dataset opens: folders, tars, torchvision, Hugging Face, webdataset."""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from PIL import Image
from timm.data import create_dataset
from timm.data.dataset import ImageDataset, IterableImageDataset
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision.datasets import DatasetFolder

from mmpreproj.data.image.image_files import UnreadableImage, to_channels
from mmpreproj.data.image.image_module import ImageFilesDataModule
from mmpreproj.data.labelled_files import Source
from mmpreproj.data.loaders import run_seed
from mmpreproj.messages import listed

__all__ = ["TimmDataModule"]

CANNOT_READ = (OSError, SyntaxError, Image.DecompressionBombError)
PACKAGES = {
    "hfds": "datasets",
    "hfids": "datasets",
    "wds": "webdataset",
    "tfds": "tensorflow-datasets",
}
"""What timm's readers need, by the prefix of a name."""


class TimmSource(Source):
    """Images of a map-style dataset that timm opened; targets are read without decoding an image.

    Raises: ValueError where the targets are not single class numbers, or cannot be had without
    decoding.
    """

    def __init__(self, dataset: Dataset, label: str):
        self.dataset = dataset
        self.reader = dataset.reader if isinstance(dataset, ImageDataset) else None
        if hasattr(self.reader, "cache_tarfiles"):
            # An open tar shared by forked workers shares its file position: they would read each
            # other's bytes
            self.reader.cache_tarfiles = False
        targets = self._read_targets(label)
        numbers = targets.ndim == 1 and np.issubdtype(targets.dtype, np.integer)
        if not numbers or targets.min(initial=0) < 0:
            raise ValueError(
                f"{label}: the targets are not class numbers, but {targets[:3].tolist()} …"
            )
        classes = class_names(dataset, int(targets.max(initial=-1)) + 1)
        super().__init__(label, {"class": classes}, targets.astype(np.int64)[:, None])

    def _read_targets(self, label: str) -> np.ndarray:
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
            f"{label}: {type(self.dataset).__name__} does not give its classes in advance"
        )

    def name(self, index: int) -> str:
        if self.reader is not None:
            return f"{self.origin}: {self.reader.filename(index, absolute=True) or index}"
        if isinstance(self.dataset, DatasetFolder):
            return self.dataset.samples[index][0]
        return f"{self.origin}[{index}]"

    def load(self, index: int, read: Callable[..., Image.Image]) -> Image.Image:
        if isinstance(self.dataset, DatasetFolder):
            return read(self.name(index))
        try:
            image = (self.dataset if self.reader is None else self.reader)[index][0]
        except CANNOT_READ as error:
            raise UnreadableImage(f"cannot read image {self.name(index)!r} ({error})") from error
        return read(image, name=self.name(index))

    def place(self) -> str:
        if hasattr(self.reader, "samples"):
            return os.path.realpath(self.reader.root)
        if isinstance(self.dataset, DatasetFolder):
            return os.path.realpath(self.dataset.root)
        if hasattr(self.dataset, "train"):  # torchvision knows two splits by many names
            return f"{self.dataset.root}, train={self.dataset.train}"
        return self.origin


def class_names(dataset: Dataset, at_least: int) -> list[str]:
    """Class names by class number; a number without a name is its own name."""
    reader = getattr(dataset, "reader", None)
    numbers = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
    if numbers:
        names = {index: str(name) for name, index in numbers.items()}
    else:
        given = getattr(dataset, "wnids", None) or getattr(dataset, "classes", None)
        given = given or getattr(dataset, "all_categories", None) or []
        names = {index: str(name) for index, name in enumerate(given)}
    return [names.get(index, str(index)) for index in range(max([at_least - 1, *names]) + 1)]


class Stream(IterableDataset):
    """A dataset that timm can only go through. Its readers skip, with a log line, bad images."""

    def __init__(self, dataset: IterableImageDataset, transform, channels: int, num_workers: int):
        self.dataset = dataset
        self.transform = transform
        self.channels = channels
        # Counted in each (persistent) worker: nothing else tells a worker that an epoch began
        self.epoch = 0
        dataset.set_loader_cfg(num_workers=num_workers)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        self.dataset.set_epoch(self.epoch)
        self.epoch += 1
        for image, target in self.dataset:
            yield self.transform(to_channels(image, self.channels)), int(target)


class TimmDataModule(ImageFilesDataModule):
    """Data through timm's readers, by the names timm uses.

    "" with a folder or a .tar, "torch/cifar10", "hfds/NAME", and the streams "hfids/NAME",
    "wds/NAME", "tfds/NAME".

    Random-access data (all but the streams) are treated as in ImageFolderDataModule: validation is
    held out of training class by class. A stream has no fixed items to hold out: give it
    `val_split`, or val_fraction 0. Its unreadable images are skipped by timm, with a line in the
    log, and are not in n; with several processes its evaluation is only as even as its shards.

    Args:
        name: as in timm.data.create_dataset.
        root: folder or file of the data, or where timm's readers keep them.
        train_split: the split to train on; for folders, a folder below root.
        test_split: the split to report on.
        test_root: root of the test split, where the splits are files of their own, as with one .tar
            each.
        val_root: the same for val_split.
        num_classes: needed for streams whose classes have no names.
        class_map: a file, as in timm; classes that it does not name are left out, as timm does.
        input_key: the column or entry with the image, for readers that have them.
        target_key: the column or entry with the class.
        num_samples: images of a training stream, for readers that cannot tell.
        download: let torchvision (or tfds, hfids) fetch the data.
        keywords: those of ImageFilesDataModule.
    """

    STREAMS = ("hfids", "wds", "tfds")
    split_keys = (
        "train_split, val_split and test_split (where timm finds no folder of a split's name it "
        "takes all of its root)"
    )

    def __init__(
        self,
        name: str = "",
        root: str | None = None,
        train_split: str = "train",
        test_split: str = "validation",
        test_root: str | None = None,
        val_root: str | None = None,
        num_classes: int | None = None,
        class_map: str | None = None,
        input_key: str | None = None,
        target_key: str | None = None,
        num_samples: int | None = None,
        download: bool = False,
        **keywords: Any,
    ):
        super().__init__(**keywords)
        self.name = name
        self.root = root
        self.splits |= {"train": train_split, "test": test_split}
        self.roots = {"train": root, "val": val_root or root, "test": test_root or root}
        self.wanted_classes = num_classes
        self.reader_keywords = {
            "class_map": class_map,
            "input_key": input_key,
            "target_key": target_key,
        }
        self.num_samples = num_samples
        self.download = download
        prefix, slash, _ = name.partition("/")
        self.prefix = prefix.lower() if slash else ""
        self.is_stream = self.prefix in self.STREAMS
        if self.prefix in ("", "torch") and root is None:
            raise ValueError(f"the dataset {name!r} needs a root: a folder (or a .tar file)")
        if self.is_stream:
            if self.splits["val"] is None and self.val_fraction > 0:
                raise ValueError(
                    f"{name!r} is a stream, out of which no fixed part can be held: "
                    "give val_split, or val_fraction 0"
                )
            if self.aug_repeats > 1 or self.on_bad == "error":
                raise ValueError(
                    f"{name!r} is a stream: aug_repeats and bad_images='error' need random access"
                )
        self._streams: dict[str, IterableImageDataset] = {}

    def _create(self, split: str) -> Dataset:
        root = self.roots[split]
        download = {"download": self.download}
        keywords = download if self.prefix == "torch" else self.reader_keywords
        if self.is_stream:
            training = split == "train"
            n = self.num_samples if training else None
            how = {"is_training": training, "batch_size": self.batch_size, "num_samples": n}
            keywords = keywords | download | how | {"seed": run_seed()}
        # Mode "" is no conversion: reading transparency, 16 bits, … is image_files.py's business.
        # tfds wants a mode.
        mode = "RGB" if self.prefix == "tfds" else ""
        try:
            return create_dataset(
                self.name, root=root, split=self.splits[split], input_img_mode=mode, **keywords
            )
        except ImportError as error:
            raise ImportError(
                f"the dataset {self.name!r} needs a package that is not installed: "
                f"pip install {PACKAGES.get(self.prefix, error.name)}"
            ) from error
        except (AssertionError, RuntimeError, FileNotFoundError) as error:
            raise ValueError(
                f"timm cannot open the {split} part (split {self.splits[split]!r}) of "
                f"{self.name!r} at {root!r}: {str(error) or 'nothing is there'}"
            ) from error

    def open(self, split: str) -> TimmSource:
        return TimmSource(
            self._create(split), f"{self.name or self.roots[split]}:{self.splits[split]}"
        )

    def setup(self, stage: str | None = None) -> None:
        if not self.is_stream:
            super().setup(stage)
        elif not self._streams:
            self._setup_streams()

    def _setup_streams(self) -> None:
        used = [split for split, name in self.splits.items() if name is not None]
        self.refuse_shared({split: f"{self.roots[split]}, {self.splits[split]}" for split in used})
        self._streams = {split: self._create(split) for split in used}
        names = class_names(self._streams["train"], self.wanted_classes or 0)
        if not names:
            raise ValueError(
                f"the reader of {self.name!r} does not tell its classes: give num_classes"
            )
        if self._label_sets is None:
            self._label_sets = {"class": names}
        elif self.classes != names:
            raise ValueError(
                f"the classes of {self.name!r}, {listed(names)}, are not the model's, "
                f"{listed(self.classes)}"
            )

    def split_size(self, split: str) -> int | None:
        if not self.is_stream:
            return super().split_size(split)
        if self.splits[split] is None:
            return 0
        return len(self._streams[split]) or None if split in self._streams else None

    def dataset(self, split: str, n_padding: int = 0) -> Dataset:
        if not self.is_stream:
            return super().dataset(split, n_padding)
        if split not in self._streams:
            raise RuntimeError(f"call setup() before asking for the {split} split")
        _, transform, (channels, *_) = self.reading(split)
        return Stream(self._streams[split], transform, channels, self.num_workers)

    def train_dataloader(self) -> DataLoader:
        if not self.is_stream:
            return super().train_dataloader()
        return self._stream_loader("train", self.batch_size, drop_last=self.drop_last)

    def _eval_loader(self, split: str) -> DataLoader:
        if not self.is_stream:
            return super()._eval_loader(split)
        world = self._world()[0]
        if world > 1:
            warnings.warn(
                f"{self.name!r} is a stream: n may differ from one process to {world}", stacklevel=2
            )
        return self._stream_loader(split, self.eval_batch_size)

    def _stream_loader(self, split: str, batch_size: int, **keywords: Any) -> DataLoader:
        self.datasets[split] = self.dataset(split)
        # workers are seeded by rank and number
        seed = functools.partial(pl_worker_init_function, rank=self._world()[1])
        return self._loader(self.datasets[split], batch_size, worker_init_fn=seed, **keywords)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "dataset": self.name,
            "roots": self.roots,
            "splits": self.splits,
        }
