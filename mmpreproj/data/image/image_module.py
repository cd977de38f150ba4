"""The data modules over image files: the base of all, and trees of class folders, as ImageNet's."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from mmpreproj.data.image.image_files import (
    AugmentConfig,
    eval_transform,
    load_image,
    pixel_transform,
    train_transform,
)
from mmpreproj.data.labelled_files import FolderSource, OnBad, class_folders
from mmpreproj.data.loaders import RepeatedAugmentation, run_seed
from mmpreproj.data.vision import VisionDataModule

__all__ = ["ImageDataModule", "ImageFilesDataModule", "ImageFolderDataModule"]

TEST_NAMES = ("val", "validation", "test")


class ImageDataModule(VisionDataModule):
    """Base of the image data modules.

    A batch is (images float [B, C, H, W], targets int64 [B]) once it has passed
    `on_after_batch_transfer`; loaders of image files yield uint8.

    Args:
        batch_size: images in a training batch, on each process.
        img_size: side, or (height, width), of the model's input; None, here and in the following,
            is what the model's own configuration says.
        crop_pct: part of the resized image that evaluation keeps.
        crop_mode: timm's "center", "squash" or "border", in evaluation.
        interpolation: in evaluation; in training it is part of the augmentation.
        aug_repeats: repeated augmentation (DeiT), times each image comes in a row; 0 or 1: off.
        classes: class names in the order of the model's outputs, from a checkpoint; None: the
            training split's.
        keywords: those of VisionDataModule.
    """

    gives = "images"
    items = "images"

    def __init__(
        self,
        batch_size: int = 64,
        img_size: int | tuple[int, int] | None = None,
        crop_pct: float | None = None,
        crop_mode: str | None = None,
        interpolation: str | None = None,
        aug_repeats: int = 0,
        classes: list[str] | None = None,
        **keywords: Any,
    ):
        super().__init__(batch_size=batch_size, **keywords)
        if aug_repeats < 0:
            raise ValueError(f"aug_repeats must not be negative, got {aug_repeats}")
        if classes is not None and len(set(classes)) != len(classes):
            raise ValueError(f"class names must differ, got {classes}")
        self.aug_repeats = aug_repeats
        self.overrides |= {
            "img_size": img_size,
            "crop_pct": crop_pct,
            "crop_mode": crop_mode,
            "interpolation": interpolation,
        }
        self._label_sets = {"class": list(classes)} if classes is not None else None

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def train_sampler(self, dataset: Dataset) -> Sampler:
        if self.aug_repeats > 1:
            return RepeatedAugmentation(dataset, self.aug_repeats, *self._world(), run_seed())
        return super().train_sampler(dataset)

    def eval_transform(self) -> Callable:
        """A callable, PIL image of any kind -> normalised float [C, H, W], as in evaluation."""
        return eval_transform(self.resolved_data_config)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"classes": self._label_sets and self.classes}


class ImageFilesDataModule(ImageDataModule):
    """Base of the data modules that read image files one by one.

    Args:
        augment: training augmentation; validation and test are only resized and cropped.
        val_split: a split to validate on, in place of a part held out of training (val_fraction is
            then unused).
        bad_images: an unreadable image is an error, or ("warn") named once and counted; in training
            another image takes its place, in evaluation it counts as wrong.
        keywords: those of ImageDataModule.
    """

    split_keys = "train_split, val_split and test_split"

    def __init__(
        self,
        augment: AugmentConfig | None = None,
        val_split: str | None = None,
        bad_images: OnBad = "warn",
        **keywords: Any,
    ):
        super().__init__(**keywords)
        self.augment = augment = augment or AugmentConfig()
        if augment.re_prob > 0:
            how = {"mode": augment.re_mode, "max_count": augment.re_count}
            self.erasing = {"probability": augment.re_prob, **how}
        self.splits["val"] = val_split
        self.on_bad = bad_images

    def reading(self, split: str) -> tuple[Callable, Callable, Sequence[int]]:
        config = self.resolved_data_config
        read = functools.partial(load_image, channels=config["input_size"][0])
        training = split == "train"
        transform = train_transform(config, self.augment) if training else pixel_transform(config)
        return read, transform, config["input_size"]


class ImageFolderDataModule(ImageFilesDataModule):
    """Images in class folders: root/train/CLASS/… and root/val/CLASS/… (or validation, or test).

    The test split, which is reported, is the folder `test_split`; validation, on which the best
    checkpoint is chosen, is held out of the training folder (or is the folder `val_split`). Class
    ids are the sorted folder names of the training split, in every split.

    Args:
        root: the folder that holds the splits.
        train_split: name of the folder to train on.
        test_split: name of the folder to report on; None: val, validation or test, whichever is
            there.
        keywords: those of ImageFilesDataModule.
    """

    def __init__(
        self, root: str, train_split: str = "train", test_split: str | None = None, **keywords: Any
    ):
        super().__init__(**keywords)
        self.root = root
        self.splits |= {"train": train_split, "test": test_split}

    def open(self, split: str) -> FolderSource:
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(
                f"the image folder {str(root)!r} does not exist (or is not a folder); --data.root "
                "takes a tree of class folders: ROOT/train/CLASS/*, and ROOT/val or ROOT/test"
            )
        name = self.splits[split] or self._test_name(root)
        if not (root / name).is_dir():
            there = class_folders(root)
            raise FileNotFoundError(
                f"no folder {name!r} in {str(root)!r} for the {split} split; "
                f"there are {there[:10] or 'no folders'}"
            )
        source = FolderSource(root / name)
        if split == "train":
            sizes = np.bincount(source.targets[:, 0], minlength=len(source.classes))
            empty = np.flatnonzero(sizes == 0)
            if len(empty):
                raise ValueError(
                    f"no images to train on in class folder {source.classes[empty[0]]!r} of "
                    f"{source.folder!r} ({len(empty)} such class folders): remove the folder, or "
                    "fill it"
                )
        return source

    def _test_name(self, root: Path) -> str:
        used = (self.splits["train"], self.splits["val"])
        there = [name for name in TEST_NAMES if name not in used and (root / name).is_dir()]
        # ImageNet's test folder has no classes
        candidates = [name for name in there if class_folders(root / name)] or there
        if len(candidates) == 1:
            return candidates[0]
        found = f"several folders could be it: {candidates}"
        what = found if candidates else f"none of {list(TEST_NAMES)} is there"
        raise ValueError(
            f"which folder of {str(root)!r} is the test split? {what}; say it with test_split"
        )

    def describe(self) -> dict[str, Any]:
        test = self._parts["test"][0].origin if "test" in self._parts else None
        return super().describe() | {
            "root": self.root,
            "train_split": self.splits["train"],
            "test_split": os.path.basename(test) if test else self.splits["test"],
        }
