"""A tree of class folders, as ImageNet has it: root/train/CLASS/*.jpeg, root/val/CLASS/*.jpeg."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from mmpreproj.data.image.files import load_image
from mmpreproj.data.image.sources import SourceDataModule

EXTENSIONS = frozenset(IMG_EXTENSIONS)
TEST_NAMES = ("val", "validation", "test")


class FolderSource:
    """The images below folder/CLASS/, in the order of their names. Classes are the sorted folder
    names.

    Files may lie in deeper folders; whatever starts with a dot is left out; links are followed. A
    million paths are two numpy arrays here: lists of str would be copied into every worker, page by
    page, as their reference counts change.

    Raises: FileNotFoundError, NotADirectoryError; ValueError where there are no class folders or no
    images.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.fspath(folder)
        self.classes = class_folders(self.folder)
        if not self.classes:
            raise ValueError(
                f"no class folders in {self.folder!r}: images are expected in {self.folder}/CLASS/"
            )
        names: list[bytes] = []
        sizes, ignored = [], []
        for name in self.classes:
            found = sorted(_image_files(os.path.join(self.folder, name), "", ignored, ()))
            names.extend(map(os.fsencode, found))
            sizes.append(len(found))
        if not names:
            raise ValueError(
                f"no images below {self.folder!r} (in {len(self.classes)} class folders); "
                f"files of these kinds are looked for: {' '.join(sorted(EXTENSIONS))}"
            )
        if ignored:
            warnings.warn(
                f"{len(ignored)} files below {self.folder!r} are left out, since their names are "
                f"not those of images, "
                f"for example {min(ignored)!r}",
                stacklevel=2,
            )
        self.names = np.array(names)
        self.targets = np.repeat(np.arange(len(self.classes)), sizes)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return os.path.join(
            self.folder, self.classes[self.targets[index]], os.fsdecode(bytes(self.names[index]))
        )

    def load(self, index: int, channels: int) -> Image.Image:
        return load_image(self.name(index), channels)

    def place(self) -> str:
        return os.path.realpath(self.folder)


def class_folders(folder: str) -> list[str]:
    """Sorted names of the folders in a folder, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
        )


def _image_files(folder: str, prefix: str, ignored: list[str], above: tuple[str, ...]) -> list[str]:
    """Paths of the image files in and below a folder, relative to the class folder."""
    found = []
    deeper = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            # By the name alone: no stat, and a broken link called x.jpg is an unreadable image, not
            # a missing one
            if os.path.splitext(name)[1].lower() in EXTENSIONS:
                found.append(prefix + name)
            elif entry.is_dir():
                deeper.append(entry)
            else:
                ignored.append(entry.path)
    if deeper:
        above = (*above, os.path.realpath(folder))
    for entry in deeper:
        if os.path.realpath(entry.path) not in above:  # a link to a folder above would never end
            found.extend(_image_files(entry.path, f"{prefix}{entry.name}/", ignored, above))
    return found


class ImageFolderDataModule(SourceDataModule):
    """Images in class folders: root/train/CLASS/… and root/val/CLASS/… (or validation, or test).

    The test part, which is reported, is the folder `test_split`; validation, on which the best
    checkpoint is chosen, is held out of the training folder (or is the folder `val_split`). Class
    ids are the sorted folder names of the training part, in every part.

    Args:
        root: the folder that holds the splits.
        train_split: name of the folder to train on.
        test_split: name of the folder to report on; None: val, validation or test, whichever is
            there.
        keywords: those of SourceDataModule and ImageDataModule.
    """

    def __init__(
        self, root: str, train_split: str = "train", test_split: str | None = None, **keywords: Any
    ):
        super().__init__(**keywords)
        self.root = root
        self.train_split = train_split
        self.test_split = test_split

    def open(self, split: str) -> FolderSource:
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(
                f"the image folder {str(root)!r} does not exist (or is not a folder); --data.root "
                "takes a tree of class folders: ROOT/train/CLASS/*, and ROOT/val or ROOT/test"
            )
        name = {"train": self.train_split, "val": self.val_split}.get(split) or self._test_name(
            root
        )
        if not (root / name).is_dir():
            there = class_folders(str(root))
            raise FileNotFoundError(
                f"no folder {name!r} in {str(root)!r} for the {split} part; "
                f"there are {there[:10] or 'no folders'}"
            )
        source = FolderSource(root / name)
        if split == "train":
            empty = np.flatnonzero(np.bincount(source.targets, minlength=len(source.classes)) == 0)
            if len(empty):
                raise ValueError(
                    f"no images to train on in class folder {source.classes[empty[0]]!r} of "
                    f"{source.folder!r} "
                    f"({len(empty)} such class folders): remove the folder, or fill it"
                )
        return source

    def _test_name(self, root: Path) -> str:
        if self.test_split is not None:
            return self.test_split
        used = (self.train_split, self.val_split)
        there = [name for name in TEST_NAMES if name not in used and (root / name).is_dir()]
        labelled = [
            name for name in there if class_folders(str(root / name))
        ]  # ImageNet's test folder has no classes
        candidates = labelled or there
        if len(candidates) != 1:
            what = (
                f"several folders could be it: {candidates}"
                if candidates
                else f"none of {list(TEST_NAMES)} is there"
            )
            raise ValueError(
                f"which folder of {str(root)!r} is the test part? {what}; say it with test_split"
            )
        return candidates[0]

    def describe(self) -> dict[str, Any]:
        test = (
            os.path.basename(self._parts["test"][0].folder)
            if "test" in self._parts
            else self.test_split
        )
        return super().describe() | {
            "root": self.root,
            "train_split": self.train_split,
            "test_split": test,
        }
