"""Labelled video files as people have them: official Kinetics CSVs, class folders, lists.

All are a `FileList`: paths, and for each label set (usually one, "class") a class per video.
"""

import csv
import io
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmpreproj.data.labelled_files import FileList, FolderSource, encoded, files_below
from mmpreproj.data.vision import NothingToReport
from mmpreproj.messages import short

__all__ = ["split_path", "read_videos"]

EXTENSIONS = frozenset(
    ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .mpe .ts .m2ts .mts .wmv .flv .3gp .ogv .gif".split()
)
PATH_COLUMNS = ("path", "video", "video_path", "file", "file_path", "filename", "filepath", "clip")
LABEL_COLUMNS = ("label", "class", "target", "category", "label_name", "class_name")
KINETICS_COLUMNS = ("youtube_id", "time_start", "time_end")
LIST_SUFFIXES = (".csv", ".txt", ".tsv", ".list")
TEST_NAMES = ("val", "validate", "validation", "test")
MAX_CLASS_ID = 100_000

# A path up to its extension, then white space, then the label, which may hold blanks, as the path
_SUFFIXES = "|".join(re.escape(suffix) for suffix in sorted(EXTENSIONS, reverse=True))
_QUOTED = re.compile(r'"([^"]+)"\s+(\S.*)$')
_SPACED = re.compile(rf"(.+?(?:{_SUFFIXES}))\s+(\S.*)$", re.IGNORECASE)


def find_split(root: Path, name: str) -> Path | None:
    """A split by name: a file or folder as named, or a list called so, before a folder."""
    path = root / Path(name).expanduser()
    if path.is_file():
        return path
    for suffix in LIST_SUFFIXES:
        if (with_suffix := path.with_name(path.name + suffix)).is_file():
            return with_suffix
    return path if path.is_dir() else None


def split_path(root: Path, splits: dict[str, str | None], split: str) -> Path:
    """The list or folder of a split; that of the test, without a name, is the only one it could be.

    Raises: FileNotFoundError, ValueError, telling what is there.
    """
    name = splits[split]
    if name is not None:
        found = find_split(root, name)
        if found is None:
            there = sorted(path.name for path in root.iterdir() if path.name[0] != ".")[:10]
            raise FileNotFoundError(
                f"no {name!r} (nor {', '.join(name + suffix for suffix in LIST_SUFFIXES)}) in "
                f"{str(root)!r} for the {split} split; there are {there or 'no files'}"
            )
        return found
    used = [find_split(root, n) for n in (splits["train"], splits["val"]) if n is not None]
    found = {name: find_split(root, name) for name in TEST_NAMES}
    found = {k: path for k, path in found.items() if path is not None and path not in used}
    if len(found) == 1:
        return next(iter(found.values()))
    several = f"several could be it: {sorted(found)}"
    raise (ValueError if found else NothingToReport)(
        f"which list or folder of {str(root)!r} is the test split? "
        f"{several if found else f'none of {list(TEST_NAMES)} is there'}; say it with test "
        "(--data.test)"
    )


def read_videos(
    source: str | os.PathLike,
    root: str | os.PathLike | None = None,
    label_columns: Sequence[str] | None = None,
) -> FileList:
    """Class folders, an official Kinetics CSV, or a list of paths and labels, whichever it is.

    Args:
        source: a folder of class folders, or a file.
        root: what relative paths in a list start from, and where Kinetics clips are looked for;
            None: the folder that the list is in. Never the working directory.
        label_columns: the columns of a file with a header that hold labels, each a label set of its
            own name; None: the column "label" (or another usual name), as the set "class".
    Raises: FileNotFoundError; ValueError, with file and line, for what cannot be understood.
    """
    source = Path(source)
    if source.is_dir():
        if label_columns and len(label_columns) > 1:
            raise ValueError(
                f"label_columns {list(label_columns)} need a CSV with a header, but {str(source)!r}"
                " is a folder: class folders give one label"
            )
        return FolderSource(source, EXTENSIONS, "videos")
    if not source.is_file():
        raise FileNotFoundError(f"there is no video list or folder {str(source)!r}")
    return _read_list(source, Path(root) if root is not None else source.parent, label_columns)


# Lists


Row = tuple[int, list[str]]
"""Line number, from 1, and the fields."""


def _rows(file: Path) -> list[Row]:
    """The lines of a list as fields. Tab, comma, semicolon or blanks: by the first line."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # -sig: a byte-order mark is no part of a path
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(file)!r} is not UTF-8 text (byte {error.start}): a video list is expected"
        ) from error
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"the video list {str(file)!r} is empty")
    for delimiter in "\t,;":
        if delimiter in lines[0][1]:
            rows = _delimited(file, text, delimiter)
            if _is_header(rows[0][1]) or _looks_like_path(rows[0][1][0]):
                return rows
    first = lines[0][0]
    return [(number, _spaced(file, number, line, number == first)) for number, line in lines]


def _delimited(file: Path, text: str, delimiter: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    rows, before = [], 0
    for fields in reader:
        if reader.line_num > before + 1:  # a stray quote would swallow the lines up to the next one
            raise ValueError(
                f"{file}, line {before + 1}: a quote that opens there closes on line "
                f"{reader.line_num}; close it on its line, or leave it out"
            )
        before = reader.line_num
        if any(field.strip() for field in fields):
            rows.append((before, [field.strip() for field in fields]))
    return rows


def _spaced(file: Path, number: int, line: str, is_first: bool) -> list[str]:
    """Path and label of a line separated by blanks; either may hold blanks itself."""
    line = line.strip()
    match = _QUOTED.match(line) or _SPACED.match(line)
    if match:
        return list(match.groups())
    fields = line.rsplit(maxsplit=1)
    if len(fields) == 2 and (is_first and _is_header(fields) or "/" in fields[0]):
        return fields
    raise ValueError(
        f"{file}, line {number}: {short(line)} is not understood; expected columns: path "
        "and label, separated by a blank, a comma or a tab, as in  my clips/jump.mp4 3  (or an "
        "official Kinetics CSV, whose first line is label,youtube_id,time_start,time_end,split)"
    )


def _is_header(fields: list[str]) -> bool:
    names = {field.strip().lower() for field in fields}
    return bool(names & {*PATH_COLUMNS, *KINETICS_COLUMNS}) and not _looks_like_path(fields[0])


def _looks_like_path(field: str) -> bool:
    return os.path.splitext(field)[1].lower() in EXTENSIONS


def _columns(
    file: Path, header: Row, label_columns: Sequence[str] | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers of all columns by name, and those of the labels by the name of the label set."""
    number, fields = header
    columns = {name.lower(): i for i, name in enumerate(fields)}
    if not set(KINETICS_COLUMNS) <= set(columns) and not set(PATH_COLUMNS) & set(columns):
        raise ValueError(
            f"{file}, line {number}: no column of paths among {short(fields)}; one called 'path' "
            f"is expected, or Kinetics' {', '.join(KINETICS_COLUMNS)}"
        )
    if label_columns is None or list(label_columns) == ["label"]:
        found = [name for name in LABEL_COLUMNS if name in columns]
        if not found:
            raise ValueError(
                f"{file}, line {number}: no column of labels among {short(fields)}; one called "
                "'label' is expected, or name it with label_columns (a test list without labels "
                "cannot be scored)"
            )
        return columns, {"class": columns[found[0]]}
    absent = [name for name in label_columns if name.lower() not in columns]
    if absent:
        raise ValueError(f"{file}, line {number}: no columns {absent} among {short(fields)}")
    if dotted := [name for name in label_columns if "." in name]:
        raise ValueError(
            f"{file}, line {number}: label_columns {dotted} name label sets, whose names cannot "
            "have a dot, since settings are told apart by it: give the columns other names"
        )
    return columns, {name: columns[name.lower()] for name in label_columns}


def _read_list(file: Path, root: Path, label_columns: Sequence[str] | None) -> FileList:
    """Kinetics' CSVs, and `path label` lists, with a header or without."""
    rows = _rows(file)
    columns, labels, width = {"path": 0}, {"class": 1}, 2
    if _is_header(rows[0][1]):
        columns, labels = _columns(file, rows[0], label_columns)
        width, rows = len(rows[0][1]), rows[1:]
        if not rows:
            raise ValueError(f"{str(file)!r} holds a header but no videos")
    elif label_columns is not None and list(label_columns) != ["label"]:
        raise ValueError(
            f"{file}: label_columns {list(label_columns)} need a first line that names the columns"
        )
    else:
        for number, (_, *label) in rows:
            if len(label) == 1 and re.fullmatch(r"\d+(\s+\d+)+", label[0]):
                raise ValueError(
                    f"{file}, line {number}: {len(label[0].split())} numbers behind the path "
                    f"({short(label[0])}); expected columns: path and label (no clip length, one "
                    "label)"
                )
    for number, fields in rows:
        if len(fields) != width or not all(fields[i] for i in labels.values()):
            raise ValueError(
                f"{file}, line {number}: {len(fields)} columns {short(fields)}, but {width} are "
                "expected, none of the labels empty (a comma in a path needs quotes around the "
                "path)"
            )
    if set(KINETICS_COLUMNS) <= set(columns):
        paths = _kinetics_clips(file, rows, columns, root)
    else:
        column = next(columns[name] for name in PATH_COLUMNS if name in columns)
        paths = [os.path.join(root, os.path.expanduser(fields[column])) for _, fields in rows]
    label_sets, targets = {}, []
    for name, column in labels.items():
        label_sets[name], ids = class_ids(str(file), name, [fields[column] for _, fields in rows])
        targets.append(ids)
    return FileList(str(file), label_sets, np.stack(targets, 1), encoded(paths))


def _kinetics_clips(file: Path, rows: list[Row], columns: dict[str, int], root: Path) -> list[str]:
    """Paths of the rows' clips, {youtube_id}_{start}_{end}.mp4.

    They are looked for in the folder called like the list (train.csv: train/) beside it or in
    `root`, else everywhere below `root`; in it at any depth, so in class folders too. Any video
    extension will do. What is not found keeps its place, as a path that is not there.
    """
    candidates = (file.with_suffix(""), root / file.stem)
    folder = next((str(path) for path in candidates if path.is_dir()), str(root))
    # the first by name where a stem comes twice
    found = sorted(files_below(os.path.abspath(folder), EXTENSIONS, [], strict=False), reverse=True)
    there = {os.path.splitext(os.path.basename(path))[0]: path for path in found}
    paths = []
    for number, fields in rows:
        name, *times = (fields[columns[column]] for column in KINETICS_COLUMNS)
        if not {"/", "\0", os.sep}.isdisjoint(name):
            raise ValueError(
                f"{file}, line {number}: youtube_id {short(name)} is none: it would name a file in "
                "another folder"
            )
        try:
            start, end = (int(float(time)) for time in times)
        except (ValueError, OverflowError):  # no number, NaN, infinity
            raise ValueError(
                f"{file}, line {number}: time_start and time_end are seconds, got "
                f"{short(times[0])} and {short(times[1])}"
            ) from None
        stem = f"{name}_{start:06d}_{end:06d}"
        paths.append(there.get(stem) or os.path.join(folder, f"{stem}.mp4"))
    return paths


def class_ids(origin: str, name: str, values: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Class names and the index of each value, int64 [N].

    Text: the sorted names. Whole numbers are indices themselves, so the names are "0" … "largest";
    a number in between without videos keeps its place.
    Raises: ValueError where numbers and text are mixed, or a number is negative or unlikely large.
    """
    numeric = np.array([re.fullmatch(r"[+-]?\d+", value) is not None for value in values])
    if not numeric.all():
        if numeric.any():
            raise ValueError(
                f"{origin}: the labels ({name}) mix numbers and text, for example "
                f"{short(values[int(numeric.argmax())])} and "
                f"{short(values[int(numeric.argmin())])}: use one of the two throughout"
            )
        classes, ids = np.unique(np.array(values), return_inverse=True)
        return classes.tolist(), ids.astype(np.int64)
    # beyond 18 digits neither int64 nor, at some length, Python takes them
    numbers = [int(value) if len(value) <= 18 else math.inf for value in values]
    if min(numbers) < 0 or max(numbers) > MAX_CLASS_ID:
        ends = (values[numbers.index(end)] for end in (min(numbers), max(numbers)))
        low, high = (short(value).strip("'") for value in ends)
        raise ValueError(
            f"{origin}: class numbers ({name}) run from {low} to {high}; from 0 to "
            f"{MAX_CLASS_ID} are expected (a label of -1 or a clip length in its place?)"
        )
    return [str(i) for i in range(max(numbers) + 1)], np.array(numbers, dtype=np.int64)
