"""Data modules over labelled image files: one class mapping for all splits, the hold-out."""

import warnings
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from mmpreproj.data.image.base import ImageDataModule
from mmpreproj.data.image.datasets import (
    BadImages,
    EvalImages,
    ImageSource,
    LabelledImages,
    TrainImages,
)
from mmpreproj.data.image.transforms import AugmentConfig, pixel_transform, train_transform
from mmpreproj.data.sampling import run_seed
from mmpreproj.data.splits import stratified_holdout


class SourceDataModule(ImageDataModule):
    """Base of the data modules that read image files one by one.

    Subclasses define `open(split)`, which gives an ImageSource.

    Args:
        augment: training augmentation; validation and test are only resized and cropped.
        val_split: a split to validate on, in place of a part held out of training (val_fraction is
            then unused).
        bad_images: an unreadable image is an error, or ("warn") named once and counted; in training
            another image takes its place, in evaluation it counts as wrong.
        keywords: those of ImageDataModule.
    """

    def __init__(
        self,
        augment: AugmentConfig | None = None,
        val_split: str | None = None,
        bad_images: BadImages = "warn",
        **keywords: Any,
    ):
        super().__init__(**keywords)
        self.augment = augment or AugmentConfig()
        self.val_split = val_split
        self.bad_images = bad_images
        self._parts: dict[
            str, tuple[ImageSource, np.ndarray, np.ndarray]
        ] = {}  # source, indices, targets

    def open(self, split: str) -> ImageSource:
        """The images of "train", "val" (with val_split) or "test"."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Finds the images, those to test on before training too: faults show at the start."""
        needs_train = stage in (None, "fit", "validate") or self._classes is None
        if needs_train and "train" not in self._parts:
            train = self.open("train")
            if self._classes is None:
                self._classes = list(train.classes)
            targets = self._adopt(train, "train")
            if self.val_split is not None:
                kept = np.arange(len(targets))
                val = self.open("val")
                val_targets = self._adopt(val, f"{self.val_split!r} (val_split)")
                self._parts["val"] = (val, np.arange(len(val_targets)), val_targets)
            else:
                kept, held = stratified_holdout(
                    targets, fraction=self.val_fraction, seed=self.split_seed
                )
                self._parts["val"] = (train, held, targets)
            self._parts["train"] = (train, kept, targets)
        if stage in (None, "fit", "test") and "test" not in self._parts:
            test = self.open("test")
            targets = self._adopt(test, "test")
            self._parts["test"] = (test, np.arange(len(targets)), targets)
        held_out = () if self.val_split is not None else ("val",)
        refuse_shared({s: p[0].place() for s, p in self._parts.items() if s not in held_out})

    def _adopt(self, source: ImageSource, split: str) -> np.ndarray:
        """Targets of a source as indices into `classes`, int64 [N]. Names decide, not positions."""
        if len(source.targets) == 0:
            raise ValueError(f"the {split} split has no images")
        index = {name: i for i, name in enumerate(self.classes)}
        present = [source.classes[k] for k in np.unique(source.targets).tolist()]
        unknown = [name for name in present if name not in index]
        if unknown:
            raise ValueError(
                f"the {split} split has classes that training does not know: {_listed(unknown)}; "
                f"known are {_listed(self.classes)}"
            )
        missing = [name for name in self.classes if name not in set(present)]
        if missing:
            warnings.warn(f"the {split} split has no images of {_listed(missing)}", stacklevel=3)
        return np.array([index.get(name, -1) for name in source.classes], dtype=np.int64)[
            source.targets
        ]

    def split_size(self, split: str) -> int | None:
        return len(self._parts[split][1]) if split in self._parts else None

    def dataset(self, split: str, n_padding: int = 0) -> Dataset:
        if split not in self._parts:
            raise RuntimeError(f"call setup() before asking for the {split} part")
        source, indices, targets = self._parts[split]
        config = self.resolved_data_config
        channels, *image_size = config["input_size"]
        if split == "train":
            transform = train_transform(config, self.augment)
            seeds = {"seed": run_seed(), "rank": self._world()[1]}
            return TrainImages(
                source, indices, targets, transform, channels, self.bad_images, **seeds
            )
        padding = {"image_size": tuple(image_size), "n_padding": n_padding}
        return EvalImages(
            source, indices, targets, pixel_transform(config), channels, self.bad_images, **padding
        )

    def describe(self) -> dict[str, Any]:
        read = {
            split: data for split, data in self.datasets.items() if isinstance(data, LabelledImages)
        }
        bad = {split: data.bad_files() for split, data in read.items()}
        return super().describe() | {
            "n_unreadable": {split: len(names) for split, names in bad.items()},
            "unreadable": {split: names[:20] for split, names in bad.items()},
        }


def refuse_shared(places: dict[str, str]) -> None:
    """Raises: ValueError if two parts would be the same images."""
    splits = list(places)
    for i, one in enumerate(splits):
        for other in splits[:i]:
            if places[one] == places[other]:
                raise ValueError(
                    f"{other} and {one} would be the same images, {places[one]!r}: name different "
                    "ones by train_split, val_split and test_split (where timm finds no folder of "
                    "a split's name it takes all of its root)"
                )


def _listed(names: list[str], most: int = 10) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f", … ({len(names)} in all)" if len(names) > most else "")
