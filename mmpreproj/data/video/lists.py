"""Labelled video files as people have them: official Kinetics CSVs, class folders, lists.

All are a `VideoList`: paths, and for each label set (usually one, "class") a class per video.
"""

import csv
import io
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

EXTENSIONS = frozenset(
    (
        ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .mpe .ts .m2ts .mts .wmv .flv .3gp .ogv .gif"
    ).split()
)
PATH_COLUMNS = ("path", "video", "video_path", "file", "file_path", "filename", "filepath", "clip")
LABEL_COLUMNS = ("label", "class", "target", "category", "label_name", "class_name")
KINETICS_COLUMNS = ("youtube_id", "time_start", "time_end")
MAX_CLASS_ID = 100_000
SHOWN = 5

# A path up to its extension, then white space, then the label, which may hold blanks, as the path
_SUFFIXES = "|".join(re.escape(suffix) for suffix in sorted(EXTENSIONS, reverse=True))
_QUOTED = re.compile(r'"([^"]+)"\s+(\S.*)$')
_SPACED = re.compile(rf"(.+?(?:{_SUFFIXES}))\s+(\S.*)$", re.IGNORECASE)


class VideoList:
    """Paths and labels of videos, in the order of the list.

    Numpy arrays: lists of str would be copied into every worker, page by page, as their reference
    counts change.

    Args:
        origin: the list or folder that the videos come from, for messages.
        paths: as they are opened.
        label_sets: class names by the name of the label set.
        targets: int64 [N, L], an index into each label set.
    """

    def __init__(
        self,
        origin: str,
        paths: Sequence[str] | np.ndarray,
        label_sets: dict[str, list[str]],
        targets: np.ndarray,
    ):
        self.origin = origin
        if not isinstance(paths, np.ndarray):
            paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self.names = paths
        self.label_sets = label_sets
        self.targets = targets

    @classmethod
    def of_labels(
        cls, origin: str, paths: Sequence[str], labels: dict[str, Sequence[str]]
    ) -> "VideoList":
        """labels: of each label set, what the list says of each video; see class_ids."""
        numbered = {name: class_ids(origin, name, values) for name, values in labels.items()}
        label_sets = {name: classes for name, (classes, _) in numbered.items()}
        return cls(origin, paths, label_sets, np.stack([ids for _, ids in numbered.values()], 1))

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return os.fsdecode(bytes(self.names[index]))

    def place(self) -> str:
        return os.path.realpath(self.origin)

    def missing(self) -> np.ndarray:
        """Numbers of the videos that are not there, int64."""
        return np.flatnonzero([not os.path.exists(bytes(name)) for name in self.names])

    def without(self, indices: np.ndarray) -> "VideoList":
        """The same list, label sets included, less some videos."""
        kept = np.delete(np.arange(len(self)), indices)
        return VideoList(self.origin, self.names[kept], self.label_sets, self.targets[kept])


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
                f"{values[int(numeric.argmax())]!r} and {values[int(numeric.argmin())]!r}: use one "
                "of the two throughout"
            )
        classes, ids = np.unique(np.array(values), return_inverse=True)
        return classes.tolist(), ids.astype(np.int64)
    ids = np.array([int(value) for value in values], dtype=np.int64)
    if ids.min() < 0 or ids.max() > MAX_CLASS_ID:
        raise ValueError(
            f"{origin}: class numbers ({name}) run from {ids.min()} to {ids.max()}; from 0 to "
            f"{MAX_CLASS_ID} are expected (a label of -1 or a clip length in its place?)"
        )
    return [str(i) for i in range(ids.max() + 1)], ids


def read_videos(
    source: str | os.PathLike,
    root: str | os.PathLike | None = None,
    label_columns: Sequence[str] | None = None,
) -> VideoList:
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
        return read_class_folders(source)
    if not source.is_file():
        raise FileNotFoundError(f"there is no video list or folder {str(source)!r}")
    root = Path(root) if root is not None else source.parent
    rows = _rows(source)
    if set(KINETICS_COLUMNS) <= {field.strip().lower() for field in rows[0][1]}:
        return _kinetics(source, rows, root, label_columns)
    return _path_list(source, rows, root, label_columns)


def read_class_folders(folder: str | os.PathLike) -> VideoList:
    """The videos below folder/CLASS/, in the order of their names; classes are the folder names.

    Files may lie in deeper folders; whatever starts with a dot is left out.
    """
    folder = os.fspath(folder)
    classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    if not classes:
        raise ValueError(
            f"no class folders in {folder!r}: videos are expected in {folder}/CLASS/, or a list "
            "of them in a .csv or .txt file"
        )
    paths, sizes, ignored = [], [], []
    for name in classes:
        found = sorted(_video_files(os.path.join(folder, name), ignored))
        paths.extend(found)
        sizes.append(len(found))
    if not paths:
        raise ValueError(
            f"no videos below {folder!r} (in {len(classes)} class folders); files of these kinds "
            f"are looked for: {' '.join(sorted(EXTENSIONS))}"
        )
    if ignored:
        warnings.warn(
            f"{len(ignored)} files below {folder!r} are left out, since their names are not those "
            f"of videos, for example {min(ignored)!r}",
            stacklevel=2,
        )
    # a folder named "7" is a name, not a number
    targets = np.repeat(np.arange(len(classes)), sizes)[:, None]
    return VideoList(folder, paths, {"class": classes}, targets)


def _video_files(folder: str, ignored: list[str]) -> list[str]:
    """Paths of the videos in and below a folder. Links are followed, once each."""
    found = []
    seen = {os.path.realpath(folder)}
    for here, folders, files in os.walk(folder, followlinks=True):
        places = {name: os.path.realpath(os.path.join(here, name)) for name in folders}
        folders[:] = [name for name in folders if name[0] != "." and places[name] not in seen]
        seen.update(places[name] for name in folders)
        for name in files:
            if name.startswith("."):
                continue
            is_video = os.path.splitext(name)[1].lower() in EXTENSIONS
            (found if is_video else ignored).append(os.path.join(here, name))
    return found


# Files


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
        f"{file}, line {number}: {line!r} is not understood; expected columns: path and label, "
        "separated by a blank, a comma or a tab, as in  my clips/jump.mp4 3  (or an official "
        "Kinetics CSV, whose first line is label,youtube_id,time_start,time_end,split)"
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
    if label_columns is None or list(label_columns) == ["label"]:
        found = [name for name in LABEL_COLUMNS if name in columns]
        if not found:
            raise ValueError(
                f"{file}, line {number}: no column of labels among {fields}; one called 'label' is "
                "expected, or name it with label_columns (a test list without labels cannot be "
                "scored)"
            )
        return columns, {"class": columns[found[0]]}
    absent = [name for name in label_columns if name.lower() not in columns]
    if absent:
        raise ValueError(f"{file}, line {number}: no columns {absent} among {fields}")
    return columns, {name: columns[name.lower()] for name in label_columns}


def _labelled(
    file: Path, rows: list[Row], width: int, labels: dict[str, int]
) -> dict[str, list[str]]:
    """The label columns. Raises: ValueError for a row with too few fields or an empty label."""
    for number, fields in rows:
        if len(fields) != width or not all(fields[i] for i in labels.values()):
            raise ValueError(
                f"{file}, line {number}: {len(fields)} columns {fields}, but {width} are expected, "
                "none of the labels empty (a comma in a path needs quotes around the path)"
            )
    return {name: [fields[i] for _, fields in rows] for name, i in labels.items()}


def _path_list(
    file: Path, rows: list[Row], root: Path, label_columns: Sequence[str] | None
) -> VideoList:
    """`path label` lists, with a header or without."""
    if _is_header(rows[0][1]):
        columns, labels = _columns(file, rows[0], label_columns)
        path_column = next(columns[name] for name in PATH_COLUMNS if name in columns)
        width, rows = len(rows[0][1]), rows[1:]
    elif label_columns is not None and list(label_columns) != ["label"]:
        raise ValueError(
            f"{file}: label_columns {list(label_columns)} need a first line that names the columns"
        )
    else:
        path_column, labels, width = 0, {"class": 1}, 2
        for number, (_, *label) in rows:
            if len(label) == 1 and re.fullmatch(r"\d+(\s+\d+)+", label[0]):
                raise ValueError(
                    f"{file}, line {number}: {len(label[0].split())} numbers behind the path "
                    f"({label[0]!r}); expected columns: path and label (no clip length, one label)"
                )
    if not rows:
        raise ValueError(f"{str(file)!r} holds a header but no videos")
    values = _labelled(file, rows, width, labels)
    paths = [os.path.join(root, os.path.expanduser(fields[path_column])) for _, fields in rows]
    return VideoList.of_labels(str(file), paths, values)


def _kinetics(
    file: Path, rows: list[Row], root: Path, label_columns: Sequence[str] | None
) -> VideoList:
    """label,youtube_id,time_start,time_end,split[,is_cc]; clips {youtube_id}_{start}_{end}.mp4.

    Clips are looked for in the folder called like the list (train.csv: train/) beside it or in
    `root`, else everywhere below `root`; in it at any depth, so in class folders too. Any video
    extension will do. What is not found keeps its place, as a path that is not there.
    """
    columns, labels = _columns(file, rows[0], label_columns)
    width, rows = len(rows[0][1]), rows[1:]
    if not rows:
        raise ValueError(f"{str(file)!r} holds a header but no videos")
    values = _labelled(file, rows, width, labels)
    candidates = (file.with_suffix(""), root / file.stem)
    folder = next((str(path) for path in candidates if path.is_dir()), str(root))
    there = _clips_below(os.path.abspath(folder))
    paths = []
    for number, fields in rows:
        name = fields[columns["youtube_id"]]
        try:
            start, end = (int(float(fields[columns[c]])) for c in ("time_start", "time_end"))
        except (ValueError, OverflowError):  # no number, NaN, infinity
            raise ValueError(
                f"{file}, line {number}: time_start and time_end are seconds, got "
                f"{fields[columns['time_start']]!r} and {fields[columns['time_end']]!r}"
            ) from None
        stem = f"{name}_{start:06d}_{end:06d}"
        paths.append(there.get(stem) or os.path.join(folder, f"{stem}.mp4"))
    return VideoList.of_labels(str(file), paths, values)


def _clips_below(folder: str) -> dict[str, str]:
    """Stem -> path of all videos below a folder; the first by name where a stem comes twice."""
    found = sorted(_video_files(folder, []), reverse=True)
    return {os.path.splitext(os.path.basename(path))[0]: path for path in found}


def shown(names: Sequence[str], most: int = SHOWN) -> str:
    """The first few names, for a message."""
    more = f", … ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
