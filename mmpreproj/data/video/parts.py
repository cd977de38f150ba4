"""The parts of a data set of videos: which list is which part, one class mapping for all."""

import itertools
import os
import warnings
from pathlib import Path

import numpy as np

from mmpreproj.data.video.lists import VideoList, shown

LIST_SUFFIXES = (".csv", ".txt", ".tsv", ".list")
TEST_NAMES = ("val", "validate", "validation", "test")


def find_part(root: Path, name: str) -> Path | None:
    """A part by name: a file or folder as named, or a list called so, before a folder."""
    path = root / Path(name).expanduser()
    if path.is_file():
        return path
    for suffix in LIST_SUFFIXES:
        if (with_suffix := path.with_name(path.name + suffix)).is_file():
            return with_suffix
    return path if path.is_dir() else None


def part_source(root: Path, parts: dict[str, str | None], split: str) -> Path:
    """The list or folder of a part; a test part without a name is the only one that could be it.

    Raises: FileNotFoundError, ValueError, telling what is there.
    """
    name = parts[split]
    if name is not None:
        found = find_part(root, name)
        if found is None:
            there = sorted(path.name for path in root.iterdir() if path.name[0] != ".")[:10]
            raise FileNotFoundError(
                f"no {name!r} (nor {', '.join(name + suffix for suffix in LIST_SUFFIXES)}) in "
                f"{str(root)!r} for the {split} part; there are {there or 'no files'}"
            )
        return found
    used = [find_part(root, n) for n in (parts["train"], parts["val"]) if n is not None]
    found = {name: find_part(root, name) for name in TEST_NAMES}
    found = {k: path for k, path in found.items() if path is not None and path not in used}
    which = f"which list or folder of {str(root)!r} is the test part?"
    if not found:
        raise FileNotFoundError(
            f"{which} none of {list(TEST_NAMES)} is there; say it with test (--data.test)"
        )
    if len(found) > 1:
        raise ValueError(
            f"{which} several could be it: {sorted(found)}; say it with test (--data.test)"
        )
    return next(iter(found.values()))


def adopt(
    videos: VideoList, label_sets: dict[str, list[str]], split: str, numbers_count: bool = False
) -> np.ndarray:
    """Targets int64 [N, L] as indices into `label_sets`. Names decide, not positions.

    numbers_count: in a list with class numbers, they are positions in `label_sets`.

    Raises: ValueError for other label sets, or classes that training does not know.
    """
    if list(videos.label_sets) != list(label_sets):
        raise ValueError(
            f"{videos.origin}: the {split} part has the label sets {list(videos.label_sets)}, but "
            f"the model was trained on {list(label_sets)} (label_columns names them)"
        )
    columns = []
    for k, (name, known) in enumerate(label_sets.items()):
        own, ids = videos.label_sets[name], videos.targets[:, k]
        index = {label: i for i, label in enumerate(known)}
        named = not any(label.isdigit() for label in known)  # else numbers are names
        if numbers_count and named and all(label.isdigit() for label in own):
            index |= {str(i): i for i in range(len(known))}
            first = ", ".join(f"{i} = {label}" for i, label in enumerate(known[:4]))
            warnings.warn(
                f"{videos.origin}: numbers are taken for the model's classes in order: {first}"
                f"{', …' if len(known) > 4 else ''}",
                stacklevel=3,
            )
        present = [own[i] for i in np.unique(ids).tolist()]
        unknown = [label for label in present if label not in index]
        if unknown:
            raise ValueError(
                f"{videos.origin}: the {split} part has classes ({name}) that training does not "
                f"know: {shown(unknown)}; known are {shown(known)}"
            )
        absent = sorted(set(index.values()) - {index[label] for label in present})
        if absent:
            warnings.warn(
                f"the {split} part has no videos of {shown([known[i] for i in absent])} ({name})",
                stacklevel=3,
            )
        columns.append(np.array([index.get(x, -1) for x in own], dtype=np.int64)[ids])
    return np.stack(columns, 1)


def refuse_shared(lists: dict[str, VideoList]) -> None:
    """Raises: ValueError if two parts are one list; warns of files that are in two lists."""
    for one, other in itertools.combinations(lists, 2):
        if lists[one].place() == lists[other].place():
            raise ValueError(
                f"{one} and {other} would be the same videos, {lists[one].place()!r}: name "
                "different lists or folders by train, val and test"
            )
        both = np.intersect1d(lists[one].names, lists[other].names)
        if len(both):
            names = shown([os.fsdecode(bytes(name)) for name in both])
            warnings.warn(f"{len(both)} videos are in {one} and in {other}: {names}", stacklevel=3)
