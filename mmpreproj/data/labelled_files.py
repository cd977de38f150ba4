"""Labelled files, pictures or videos: where they are listed, and the datasets over them.

What differs by kind is how a file is read and what becomes of it: `read` and `transform`.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from mmpreproj.data.loaders import seeded
from mmpreproj.data.targets import PADDING, unreadable

__all__ = ["EvalFiles", "FileList", "FolderSource", "LabelledFiles", "OnBad", "Source"]
__all__ += ["TrainFiles", "UnreadableFile", "class_folders", "files_below"]

MAX_FAILURES_IN_A_ROW = 50
MAX_WARNINGS = 20
OnBad = Literal["warn", "error"]
Item = tuple[torch.Tensor, torch.Tensor]


class UnreadableFile(ValueError):
    """A file that cannot be decoded; the message names the file and the reason."""


# Where files are listed


@dataclasses.dataclass(eq=False)
class Source:
    """Labelled items in a fixed order, read one by one. Picklable, for spawned workers."""

    origin: str
    """The folder, list or data set that they come from, for messages."""
    label_sets: dict[str, list[str]]
    """Class names by the name of the label set; usually there is one, "class"."""
    targets: np.ndarray
    """int64 [N, L], an index into each label set."""

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def classes(self) -> list[str]:
        """Class names of the first label set, which usually is the only one."""
        return next(iter(self.label_sets.values()))

    def name(self, index: int) -> str:
        """A path, or whatever tells a person which item it is."""
        raise NotImplementedError

    def load(self, index: int, read: Callable[[str], Any]) -> Any:
        """The item as `read` reads a path. Raises: UnreadableFile."""
        return read(self.name(index))

    def place(self) -> str:
        """Where the items are; two sources with one place hold the same ones."""
        return os.path.realpath(self.origin)


@dataclasses.dataclass(eq=False)
class FileList(Source):
    """Files by their paths."""

    names: np.ndarray
    """Paths as bytes. A list of str would be copied into every worker, page by page, as reference
    counts change."""
    folder: str = ""
    """What the paths start from."""

    def name(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(bytes(self.names[index])))

    def paths(self) -> np.ndarray:
        """As they are opened, bytes."""
        if not self.folder:
            return self.names
        return encoded(self.name(i) for i in range(len(self)))

    def missing(self) -> np.ndarray:
        """Numbers of the files that are not there, int64."""
        return np.flatnonzero([not os.path.exists(bytes(path)) for path in self.paths()])

    def without(self, indices: np.ndarray) -> "FileList":
        """The same list, label sets included, less some files."""
        names, targets = (np.delete(array, indices, 0) for array in (self.names, self.targets))
        return FileList(self.origin, self.label_sets, targets, names, self.folder)


class FolderSource(FileList):
    """The files below folder/CLASS/, in the order of their names; classes are the sorted names.

    Files may lie in deeper folders; whatever starts with a dot is left out; links are followed.

    Args:
        extensions: in lower case, of the files to look for.
        items: what they are called in messages.
    Raises: FileNotFoundError, NotADirectoryError; ValueError where there are no class folders or no
        files.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        extensions: Collection[str] = IMG_EXTENSIONS,
        items: str = "images",
    ):
        folder = os.fspath(folder)
        classes = class_folders(folder)
        if not classes:
            raise ValueError(
                f"no class folders in {folder!r}: {items} are expected in {folder}/CLASS/"
            )
        paths: list[str] = []
        sizes, ignored = [], []
        for name in classes:
            found = sorted(files_below(os.path.join(folder, name), extensions, ignored))
            paths.extend(path[len(os.path.join(folder, "")) :] for path in found)
            sizes.append(len(found))
        if not paths:
            raise ValueError(
                f"no {items} below {folder!r} (in {len(classes)} class folders); files of these "
                f"kinds are looked for: {' '.join(sorted(extensions))}"
            )
        if ignored:
            warnings.warn(
                f"{len(ignored)} files below {folder!r} are left out, since their names are not "
                f"those of {items}, for example {min(ignored)!r}",
                stacklevel=2,
            )
        with os.scandir(folder) as entries:
            kinds = {e.name: os.path.splitext(e.name)[1].lower() for e in entries if e.is_file()}
        loose = [name for name in kinds if name[0] != "." and kinds[name] in extensions]
        if loose:
            warnings.warn(
                f"{len(loose)} {items} lie in {folder!r} beside its class folders, and are left "
                f"out, for example {min(loose)!r}",
                stacklevel=2,
            )
        targets = np.repeat(np.arange(len(classes)), sizes)[:, None]
        super().__init__(folder, {"class": classes}, targets, encoded(paths), folder)


def encoded(paths: Iterable[str]) -> np.ndarray:
    """Paths as bytes, in an array."""
    return np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)


def class_folders(folder: str | os.PathLike) -> list[str]:
    """Sorted names of the folders in a folder, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())


def files_below(
    folder: str,
    extensions: Collection[str],
    ignored: list[str],
    strict: bool = True,
    above: tuple[str, ...] = (),
) -> Iterator[str]:
    """Paths of the files of these kinds in and below a folder; those of others go to `ignored`.

    Args:
        strict: a folder that cannot be listed is an error; else it is left out.
        above: the folders that led here.
    """
    above = (*above, os.path.realpath(folder))
    try:
        entries = os.scandir(folder)
    except OSError:
        if strict:
            raise
        return
    with entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            wanted = os.path.splitext(entry.name)[1].lower() in extensions
            # A link called x.jpg is taken by its name: no stat, and a broken one is an unreadable
            # file, not a missing one
            if entry.is_dir(follow_symlinks=not wanted):
                if os.path.realpath(entry.path) not in above:  # a link upwards would never end
                    yield from files_below(entry.path, extensions, ignored, strict, above)
            elif wanted:
                yield entry.path
            else:
                ignored.append(entry.path)


# Datasets


@dataclasses.dataclass(eq=False)
class LabelledFiles(Dataset):
    """Some files of a source; keeps a record of the unreadable ones.

    A file is opened, read and closed for each item: nothing is open when workers fork, and memory
    does not grow with the number of files seen.
    """

    consequence: ClassVar[str] = "left out"
    """What happens to an unreadable file, as the warning tells it."""
    source: Source
    indices: np.ndarray
    """int64, of items of the source."""
    targets: np.ndarray
    """int64 [N] or [N, L], of all items of the source, numbered as in training."""
    read: Callable[[str], Any]
    """Of a path; see Source.load."""
    transform: Callable[[Any], torch.Tensor]
    """From what was read to uint8 pixels."""
    items: str = "files"
    """What they are called in messages."""
    on_bad: OnBad = "warn"
    """An unreadable file is an error, or ("warn") recorded."""

    def __post_init__(self) -> None:
        # One flag a file in shared memory: workers on either side of a fork or spawn set the same
        # flags, and setting one twice does no harm, so this needs no lock and counts files, not
        # attempts.
        self.bad = torch.zeros(len(self.indices), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, position: int) -> str:
        return self.source.name(int(self.indices[position]))

    def target(self, position: int) -> torch.Tensor:
        """int64, a scalar or [L]."""
        return torch.as_tensor(self.targets[self.indices[position]])

    def load(self, position: int) -> Any:
        """What was read; None where the file is unreadable, if that is tolerated: it is counted,
        and named the first time."""
        try:
            return self.source.load(int(self.indices[position]), self.read)
        except UnreadableFile as error:
            if self.on_bad == "error":
                raise
            if not self.bad[position]:
                self.bad[position] = 1
                count = int(self.bad.sum())
                if count <= MAX_WARNINGS:
                    last = count == MAX_WARNINGS
                    more = "; further ones are counted without a message" if last else ""
                    warnings.warn(f"{error}: {self.consequence}{more}", stacklevel=2)
            return None

    def bad_files(self) -> list[str]:
        """Names of the files found unreadable so far, by this process and its workers."""
        return [self.name(position) for position in self.bad.nonzero()[:, 0].tolist()]


@dataclasses.dataclass(eq=False)
class TrainFiles(LabelledFiles):
    """For training: an unreadable file is replaced by another.

    Indices may carry the epoch (see loaders.py). The random numbers of an item follow from (seed,
    epoch, index) alone, and another file is drawn in place of an unreadable one. Given a rank, the
    numbers of a batch are one stream instead, which follows from (seed, rank, epoch, first index of
    the batch), so that small pictures are not seeded one by one; the next readable file takes the
    place of an unreadable one.
    """

    consequence = "another one takes its place in training"
    seed: int = 0
    rank: int | None = None

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        if self.rank is not None:
            return self._stream(indices, self.seed, self.rank)
        return [item for index in indices for item in self._stream([index], self.seed)]

    def _stream(self, indices: Sequence[int], *seeds: int) -> list[Item]:
        epoch, first = divmod(indices[0], len(self))
        with seeded(*seeds, epoch, first):
            return [self._item(index % len(self)) for index in indices]

    def _item(self, position: int) -> Item:
        for _ in range(MAX_FAILURES_IN_A_ROW):
            loaded = self.load(position)
            if loaded is not None:
                return self.transform(loaded), self.target(position)
            failed, position = position, (position + 1) % len(self)
            if self.rank is None:
                position = int(torch.randint(len(self), ()))
        raise ValueError(
            f"{MAX_FAILURES_IN_A_ROW} training {self.items} in a row cannot be read, the last one "
            f"{self.name(failed)!r}: is the disk still there?"
        )


@dataclasses.dataclass(eq=False)
class EvalFiles(LabelledFiles):
    """For evaluation: n items for n files, whatever can be read, and then padding (see targets.py:
    all L targets of an item are marked, or none). Items that are marked are black."""

    consequence = "it is counted as wrong"
    shape: Sequence[int] = ()
    """Of an item's pixels."""
    n_padding: int = 0

    def __len__(self) -> int:
        return len(self.indices) + self.n_padding

    def __getitem__(self, position: int) -> Item:
        if position >= len(self):
            raise IndexError(f"item {position} of {len(self)}")
        if position >= len(self.indices):
            return self._black(), torch.full(self.targets.shape[1:], PADDING)
        loaded = self.load(position)
        if loaded is None:
            return self._black(), unreadable(self.target(position))
        return self.transform(loaded), self.target(position)

    def _black(self) -> torch.Tensor:
        return torch.zeros(*self.shape, dtype=torch.uint8)
