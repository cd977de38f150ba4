"""What the data modules of images and clips share: their classes, the hold-out, the model's input.

Images are those with one label set, "class". Clips can have several.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing

from mmpreproj.data.labelled_files import EvalFiles, LabelledFiles, OnBad, Source, TrainFiles
from mmpreproj.data.loaders import LabelledDataModule, run_seed, stratified_holdout
from mmpreproj.messages import listed

__all__ = ["SPLITS", "VisionDataModule", "check_channels", "erase", "normalize"]
__all__ += ["resolve_data_config"]

SPLITS = ("train", "val", "test")


class NothingToReport(FileNotFoundError):
    """There is no test split, and none was named: training goes on without."""


class VisionDataModule(LabelledDataModule):
    """Base of the data modules of images and clips.

    Loaders yield 8-bit pixels. `on_after_batch_transfer`, which Lightning calls, normalises them on
    the device: a quarter of the bytes to move and no float arithmetic in the workers. Targets of
    evaluation batches can be marks: see targets.py.

    A subclass defines `open` and `reading`, and says in `splits` which splits have names.

    Args:
        val_fraction: part of the training items held out, class by class, to choose the best
            checkpoint on, unless validation is a split of its own. 0: none, and then there is no
            validation loader.
        split_seed: decides which items are held out. Not the run's seed, so that all seeds of a
            study share the part.
        mean: of each channel, from 0 to 1; None, here and in the following, is what the model's own
            configuration says.
        std: of each channel.
        keywords: those of LabelledDataModule.
    """

    split_keys = "train, val and test"
    """The settings by which splits are named, for messages."""

    def __init__(
        self,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        **keywords: Any,
    ):
        super().__init__(**keywords)
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"val_fraction must be 0 or more and below 1, got {val_fraction}")
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.overrides: dict[str, Any] = {"mean": mean, "std": std}
        self.data_config: dict[str, Any] | None = None
        """The model's input configuration, needed by loaders; the Lightning module sets it."""
        self.splits: dict[str, str | None] = dict.fromkeys(SPLITS)
        self.on_bad: OnBad = "warn"
        self.erasing: dict[str, Any] | None = None
        """Keywords of timm's RandomErasing, for training batches; None: it is off."""
        self._label_sets: dict[str, list[str]] | None = None
        self._numbers_count = False
        self._parts: dict[str, tuple[Source, np.ndarray, np.ndarray]] = {}
        """Of each split the source, the numbers of its items, the targets of the source."""

    # What a subclass provides

    def open(self, split: str) -> Source:
        """The items of "train", "val" (where it has a name) or "test".

        Raises: NothingToReport, and other errors that tell what is there.
        """
        raise NotImplementedError

    def reading(self, split: str) -> tuple[Callable, Callable, Sequence[int]]:
        """How an item is read, transformed to uint8 pixels, and the shape of these."""
        raise NotImplementedError

    # Splits and classes

    def setup(self, stage: str | None = None) -> None:
        """Finds the items, those to test on before training too: faults show at the start."""
        needs_train = stage in (None, "fit", "validate") or self._label_sets is None
        if needs_train and "train" not in self._parts:
            train = self.open("train")
            if self._label_sets is None:
                self._label_sets = {name: [*names] for name, names in train.label_sets.items()}
            for name, known in self.label_sets.items():
                if len(known) == 1:
                    warnings.warn(
                        f"{train.origin} has one class ({name}: {known[0]!r}): whatever a model "
                        "learns, all that it says of it will be right",
                        stacklevel=2,
                    )
            train, kept, targets = self._whole(train, "train")
            if self.splits["val"] is not None:
                self._parts["val"] = self._whole(self.open("val"), "val")
            else:
                joint = np.ravel_multi_index(tuple(targets.T), tuple(targets.max(0) + 1))
                kept, held = stratified_holdout(
                    joint, fraction=self.val_fraction, seed=self.split_seed
                )
                self._parts["val"] = (train, held, targets)
            self._parts["train"] = (train, kept, targets)
        if stage in (None, "fit", "test") and "test" not in self._parts:
            try:
                self._parts["test"] = self._whole(self.open("test"), "test")
            except NothingToReport as error:
                if stage == "test":
                    raise
                warnings.warn(f"nothing will be reported: {error}", stacklevel=2)
        self.refuse_shared({split: source.place() for split, source in self._sources().items()})

    def _whole(self, source: Source, split: str) -> tuple[Source, np.ndarray, np.ndarray]:
        targets = adopt(source, self.label_sets, split, self.items, self._numbers_count)
        return source, np.arange(len(targets)), targets

    def _sources(self) -> dict[str, Source]:
        """Those that must not be shared: all but a part held out of training."""
        whole = {split: part[0] for split, part in self._parts.items()}
        if self.splits["val"] is None:
            whole.pop("val", None)
        return whole

    def refuse_shared(self, places: Mapping[str, str]) -> None:
        """Raises: ValueError if two splits would be the same items."""
        for one, other in itertools.combinations(sorted(places, key=SPLITS.index), 2):
            if places[one] == places[other]:
                raise ValueError(
                    f"{one} and {other} would be the same {self.items}, {places[one]!r}: name "
                    f"different ones by {self.split_keys}"
                )

    @property
    def label_sets(self) -> dict[str, list[str]]:
        """Class names of each label set; the index is the class id. Raises: RuntimeError before
        setup()."""
        if self._label_sets is None:
            raise RuntimeError("the classes are known only after setup()")
        return self._label_sets

    @property
    def classes(self) -> list[str]:
        """Class names of the only label set. Raises: AttributeError where there are several."""
        if len(self.label_sets) != 1:
            raise AttributeError(f"there are {len(self.label_sets)} label sets: see label_sets")
        return next(iter(self.label_sets.values()))

    # Datasets

    def split_size(self, split: str) -> int | None:
        return len(self._parts[split][1]) if split in self._parts else None

    def _part(self, split: str) -> tuple[Source, np.ndarray, np.ndarray]:
        if split not in self._parts:
            raise RuntimeError(f"call setup() before asking for the {split} split")
        return self._parts[split]

    def dataset(self, split: str, n_padding: int = 0) -> LabelledFiles:
        source, indices, targets = self._part(split)
        read, transform, shape = self.reading(split)
        images = self.gives == "images"
        targets = targets[:, 0] if images else targets
        files = (source, indices, targets, read, transform, self.items, self.on_bad)
        if split == "train":
            return TrainFiles(*files, seed=run_seed(), rank=self._world()[1] if images else None)
        return EvalFiles(*files, shape=shape, n_padding=n_padding)

    def gather_bad_files(self) -> None:
        """Make every process know the files that any of them found unreadable; call it on all."""
        if self.trainer is None or self.trainer.world_size < 2:
            return
        strategy = self.trainer.strategy
        for dataset in self.datasets.values():
            if isinstance(dataset, LabelledFiles):
                flags = dataset.bad.to(strategy.root_device, torch.int32)
                dataset.bad.copy_(strategy.reduce(flags, reduce_op="max"))

    def describe(self) -> dict[str, Any]:
        """Plain facts for the record of a run; what is not known (yet) is None."""
        read = {k: data for k, data in self.datasets.items() if isinstance(data, LabelledFiles)}
        bad = {split: data.bad_files() for split, data in read.items()}
        held_out = self.splits["val"] is None
        return {
            "name": type(self).__name__,
            **{f"n_{split}": self.split_size(split) for split in SPLITS},
            "val_fraction": self.val_fraction if held_out else None,
            "split_seed": self.split_seed if held_out else None,
            "val_split": self.splits["val"],
            "n_unreadable": {split: len(names) for split, names in bad.items()},
            "unreadable": {split: names[:20] for split, names in bad.items()},
        }

    # On the way to the model

    @property
    def resolved_data_config(self) -> dict[str, Any]:
        """The input configuration in use, plain types. Raises: ValueError without data_config."""
        if self.data_config is None:
            raise ValueError(
                "the data do not know the model's input yet: set data_config = "
                "mmpreproj.backbones.building.input_config(model) on the data module before asking "
                "for loaders or transforms"
            )
        return resolve_data_config(self.data_config, self.gives == "clips", **self.overrides)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        pixels, targets = batch
        return self.finish(pixels, targets, bool(self.trainer and self.trainer.training)), targets

    def finish(
        self, pixels: torch.Tensor, targets: torch.Tensor, training: bool = False
    ) -> torch.Tensor:
        """uint8 -> normalised float; random erasing when training; zeros where targets are marks.

        Called by Lightning through on_after_batch_transfer; call it yourself when reading a loader
        by hand. Shape: [B, C, H, W], or clips [B, …, C, T, H, W], kept.
        """
        if pixels.dtype == torch.uint8:
            pixels = normalize(pixels, self.resolved_data_config)
        if training:
            if self.erasing is not None:
                pixels = erase(pixels, **self.erasing)
        else:
            marked = (targets < 0).view(len(targets), -1).any(1)
            pixels = pixels.masked_fill(marked.view(-1, *[1] * (pixels.ndim - 1)), 0.0)
        # Lightning converts batches to the model's precision before they get here, when they were
        # integers
        return self.trainer.precision_plugin.convert_input(pixels) if self.trainer else pixels


def adopt(
    source: Source,
    label_sets: Mapping[str, list[str]],
    split: str,
    items: str,
    numbers_count: bool = False,
) -> np.ndarray:
    """Targets int64 [N, L] as indices into `label_sets`. Names decide, not positions.

    Args:
        label_sets: those of training.
        items: what the source's items are called in messages.
        numbers_count: where a source has class numbers, they are positions in `label_sets`.
    Raises: ValueError for other label sets, classes that training does not know, or no items.
    """
    if not len(source.targets):
        raise ValueError(f"{source.origin}: the {split} split has no {items}")
    if list(source.label_sets) != list(label_sets):
        raise ValueError(
            f"{source.origin}: the {split} split has the label sets {list(source.label_sets)}, but "
            f"the model was trained on {list(label_sets)} (label_columns names them)"
        )
    columns = []
    for (name, known), ids in zip(label_sets.items(), source.targets.T, strict=True):
        of = f" ({name})" if len(label_sets) > 1 else ""
        own = source.label_sets[name]
        index = {label: i for i, label in enumerate(known)}
        named = not any(label.isdigit() for label in known)  # else numbers are names
        if numbers_count and named and all(label.isdigit() for label in own):
            index |= {str(i): i for i in range(len(known))}
            first = listed((f"{i} = {label}" for i, label in enumerate(known)), most=4)
            warnings.warn(
                f"{source.origin}: numbers are taken for the model's classes in order: {first}",
                stacklevel=4,
            )
        present = [own[i] for i in np.unique(ids).tolist()]
        unknown = [label for label in present if label not in index]
        if unknown:
            raise ValueError(
                f"{source.origin}: the {split} split has classes{of} that training does not "
                f"know: {listed(map(repr, unknown))}; known are {listed(map(repr, known))}"
            )
        absent = sorted(set(index.values()) - {index[label] for label in present})
        if absent:
            names = listed(repr(known[i]) for i in absent)
            warnings.warn(f"the {split} split has no {items} of {names}{of}", stacklevel=4)
        columns.append(np.array([index.get(x, -1) for x in own], dtype=np.int64)[ids])
    return np.stack(columns, 1)


def resolve_data_config(
    model_config: Mapping[str, Any], clips: bool = False, **given: Any
) -> dict[str, Any]:
    """The input configuration in use: the model's, with what was given explicitly in its place.

    A model's RGB mean and std are averaged for a grey model, as timm does.

    Args:
        model_config: input_size (C, H, W) or (C, T, H, W); mean, std, …
        clips: that input is wanted: (C, T, H, W).
        given: img_size, mean, std, interpolation; crop_pct and crop_mode of images, num_frames of
            clips. None is the model's.
    Returns: plain types, for JSON and YAML.
    Raises: ValueError for channels that files do not have, an unknown number of frames, or a mean
        or std of another length.
    """
    given = {name: value for name, value in given.items() if value is not None}
    config = {"interpolation": "bilinear", **model_config, **given}
    channels, *frames, height, width = config["input_size"]
    check_channels(channels)
    if size := given.get("img_size"):
        height, width = (size, size) if isinstance(size, int) else size
    statistics = {}
    for name in ("mean", "std"):
        values = [float(value) for value in config[name]]
        if name in given and len(values) not in (1, channels):
            raise ValueError(
                f"{name} has {len(values)} values {values}, but the model takes {channels} channels"
            )
        averaged = [sum(values) / len(values)] * channels
        statistics[name] = values if len(values) == channels else averaged
    if not clips:
        return {
            "input_size": [channels, int(height), int(width)],
            "interpolation": config["interpolation"],
            **statistics,
            "crop_pct": float(config["crop_pct"]),
            "crop_mode": config["crop_mode"],
        }
    frames = [given["num_frames"]] if "num_frames" in given else frames
    if not frames:
        raise ValueError(
            f"the model's input, {list(model_config['input_size'])}, does not tell the number of "
            "frames: set num_frames (--data.num_frames)"
        )
    # torchvision resizes 8-bit integers in these two
    usable = config["interpolation"] in ("bilinear", "bicubic")
    return {
        "input_size": [channels, int(frames[0]), int(height), int(width)],
        "interpolation": config["interpolation"] if usable else "bilinear",
        **statistics,
    }


def check_channels(channels: int) -> None:
    """Raises: ValueError unless files can be read as that many channels."""
    if channels not in (1, 3):
        raise ValueError(
            f"the model takes {channels} input channels, but files are read as 3 (RGB) or 1 "
            "(grey): build the model with in_chans=3 or in_chans=1"
        )


def normalize(pixels: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """uint8 pixels -> a new float32 tensor, (pixels / 255 - mean) / std.

    Shape: [..., C, H, W] or [..., C, T, H, W], as in config["input_size"].
    """
    behind = len(config["input_size"]) - 1
    mean, std = _statistics(tuple(config["mean"]), tuple(config["std"]), behind, pixels.device)
    return pixels.float().sub_(mean).div_(std)


@functools.lru_cache(maxsize=8)
def _statistics(
    mean: tuple, std: tuple, behind: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and std of 8-bit values, float32 [C, 1, …]; kept, as a copy to the device is a wait."""
    shape = (-1, *[1] * behind)
    with torch.inference_mode(False):  # else what validation made would be unusable in training
        return tuple(
            torch.tensor(values, device=device).mul_(255).view(shape) for values in (mean, std)
        )


def erase(pixels: torch.Tensor, probability: float, **keywords: Any) -> torch.Tensor:
    """Random erasing by timm, in place: in a clip the same box in all frames.

    Shape: float [B, C, H, W] or [B, C, T, H, W], kept.
    """
    erasing = RandomErasing(probability, device=pixels.device, **keywords)
    return erasing(pixels.flatten(1, -3)).view_as(pixels)
