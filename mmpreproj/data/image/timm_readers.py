"""Whatever timm.data.create_dataset opens: folders, tars, torchvision, Hugging Face, webdataset."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from timm.data import create_dataset
from timm.data.dataset import IterableImageDataset
from torch.utils.data import Dataset, IterableDataset

from mmpreproj.data.image.files import to_channels
from mmpreproj.data.image.sources import SourceDataModule, refuse_shared
from mmpreproj.data.image.timm_source import TimmSource, class_names
from mmpreproj.data.image.transforms import pixel_transform, train_transform
from mmpreproj.data.sampling import run_seed


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


class TimmDataModule(SourceDataModule):
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
        test_root: root of the test part, where the splits are files of their own, as with one .tar
            each.
        val_root: the same for val_split.
        num_classes: needed for streams whose classes have no names.
        class_map: a file, as in timm; classes that it does not name are left out, as timm does.
        input_key: the column or entry with the image, for readers that have them.
        target_key: the column or entry with the class.
        num_samples: images of a training stream, for readers that cannot tell.
        download: let torchvision (or tfds, hfids) fetch the data.
        keywords: those of SourceDataModule and ImageDataModule.
    """

    STREAMS = ("hfids", "wds", "tfds")

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
        self.splits = {"train": train_split, "val": self.val_split, "test": test_split}
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
            if self.val_split is None and self.val_fraction > 0:
                raise ValueError(
                    f"{name!r} is a stream, out of which no fixed part can be held: "
                    "give val_split, or val_fraction 0"
                )
            if self.aug_repeats > 1 or self.bad_images == "error":
                raise ValueError(
                    f"{name!r} is a stream: aug_repeats and bad_images='error' need random access"
                )
        self._streams: dict[str, IterableImageDataset] = {}

    def _create(self, split: str) -> Dataset:
        root = self.roots[split]
        if self.prefix == "torch":
            keywords: dict[str, Any] = {"download": self.download}
        else:
            keywords = dict(self.reader_keywords)
        if self.is_stream:
            training = split == "train"
            keywords |= {"is_training": training, "batch_size": self.batch_size, "seed": run_seed()}
            keywords |= {
                "num_samples": self.num_samples if training else None,
                "download": self.download,
            }
        # Mode "" is no conversion: reading transparency, 16 bits, … is the business of images.py.
        # tfds wants a mode.
        mode = "RGB" if self.prefix == "tfds" else ""
        try:
            return create_dataset(
                self.name, root=root, split=self.splits[split], input_img_mode=mode, **keywords
            )
        except ImportError as error:
            package = {
                "hfds": "datasets",
                "hfids": "datasets",
                "wds": "webdataset",
                "tfds": "tensorflow-datasets",
            }
            raise ImportError(
                f"the dataset {self.name!r} needs a package that is not installed: "
                f"pip install {package.get(self.prefix, error.name)}"
            ) from error
        except (AssertionError, RuntimeError, FileNotFoundError) as error:
            raise ValueError(
                f"timm cannot open the {split} part (split {self.splits[split]!r}) of "
                f"{self.name!r} at {root!r}: "
                f"{error or 'nothing is there'}"
            ) from error

    def open(self, split: str) -> TimmSource:
        return TimmSource(
            self._create(split), f"{self.name or self.roots[split]}:{self.splits[split]}"
        )

    def setup(self, stage: str | None = None) -> None:
        if self.is_stream:
            self._setup_streams()
            return
        super().setup(stage)

    def _setup_streams(self) -> None:
        if self._streams:
            return
        used = [split for split, name in self.splits.items() if name is not None]
        refuse_shared({split: f"{self.roots[split]}, {self.splits[split]}" for split in used})
        self._streams = {split: self._create(split) for split in used}
        names = class_names(self._streams["train"], self.wanted_classes or 0)
        if not names:
            raise ValueError(
                f"the reader of {self.name!r} does not tell its classes: give num_classes"
            )
        if self._classes is None:
            self._classes = names
        elif self._classes != names:
            raise ValueError(
                f"the classes of {self.name!r}, {names[:10]} …, are not the model's, "
                f"{self._classes[:10]} …"
            )

    def split_size(self, split: str) -> int | None:
        if not self.is_stream:
            return super().split_size(split)
        if split == "val" and self.val_split is None:
            return 0
        return len(self._streams[split]) or None if split in self._streams else None

    def dataset(self, split: str, n_padding: int = 0) -> Dataset:
        if not self.is_stream:
            return super().dataset(split, n_padding)
        if split not in self._streams:
            raise RuntimeError(f"call setup() before asking for the {split} part")
        config = self.resolved_data_config
        transform = (
            train_transform(config, self.augment) if split == "train" else pixel_transform(config)
        )
        return Stream(self._streams[split], transform, config["input_size"][0], self.num_workers)

    def _eval_loader(self, split: str):
        if self.is_stream and self._world()[0] > 1:
            warnings.warn(
                f"{self.name!r} is a stream: n may differ from one process to {self._world()[0]}",
                stacklevel=2,
            )
        if self.is_stream:
            self.datasets[split] = self.dataset(split)
            return self._loader(self.datasets[split], self.eval_batch_size)
        return super()._eval_loader(split)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "dataset": self.name,
            "roots": self.roots,
            "splits": self.splits,
        }
