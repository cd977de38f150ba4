"""What the image data modules share: input configuration, loaders, the step on the device."""

from typing import Any

import torch
from timm.data.random_erasing import RandomErasing
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from mmpreproj.data.image.transforms import (
    AugmentConfig,
    EvalTransform,
    resolve_data_config,
)
from mmpreproj.data.loaders import LabelledDataModule
from mmpreproj.data.pixels import normalize
from mmpreproj.data.sampling import RepeatedAugmentation, run_seed

try:
    from lightning.fabric.utilities.seed import pl_worker_init_function
except ImportError as error:
    raise ImportError(
        "mmpreproj.data needs Lightning, which is not installed: pip install lightning"
    ) from error


class ImageDataModule(LabelledDataModule):
    """Base of the image data modules.

    A batch is (images float [B, C, H, W], targets int64 [B]) once it has passed
    `on_after_batch_transfer`, which Lightning calls: loaders of image files yield uint8 and the
    pixels are normalised on the device, a quarter of the bytes to move and no float arithmetic in
    the workers. Targets of evaluation batches can be marks: see targets.py.

    Subclasses define `setup` and `dataset`, and fill `classes`.

    Args:
        batch_size: images in a training batch, on each process.
        eval_batch_size: the same for validation and test; None: batch_size.
        num_workers: worker processes of each loader; 0 reads in the main process.
        val_fraction: part of the training images held out, class by class, to choose the best
            checkpoint on. 0: none, and then there is no validation loader.
        split_seed: decides which images are held out. Not the run's seed, so that all seeds of a
            study share the part.
        drop_last: leave out the last, smaller training batch of an epoch (the shuffle changes, so
            do the images).
        img_size: side, or (height, width), of the model's input; None, here and in the following,
            is what the model's own configuration says.
        mean: of each channel, from 0 to 1.
        std: of each channel.
        crop_pct: part of the resized image that evaluation keeps.
        crop_mode: timm's "center", "squash" or "border", in evaluation.
        interpolation: in evaluation; in training it is part of the augmentation.
        aug_repeats: repeated augmentation (DeiT), times each image comes in a row; 0 or 1: off.
        classes: class names in the order of the model's outputs, from a checkpoint; None: the
            training part's.
    """

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        drop_last: bool = True,
        img_size: int | tuple[int, int] | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        crop_pct: float | None = None,
        crop_mode: str | None = None,
        interpolation: str | None = None,
        aug_repeats: int = 0,
        classes: list[str] | None = None,
    ):
        super().__init__(batch_size, eval_batch_size, num_workers, drop_last)
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"val_fraction must be 0 or more and below 1, got {val_fraction}")
        if aug_repeats < 0:
            raise ValueError(f"aug_repeats must not be negative, got {aug_repeats}")
        if classes is not None and len(set(classes)) != len(classes):
            raise ValueError(f"class names must differ, got {classes}")
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.aug_repeats = aug_repeats
        self.overrides = {
            "img_size": img_size,
            "mean": mean,
            "std": std,
            "crop_pct": crop_pct,
            "crop_mode": crop_mode,
            "interpolation": interpolation,
        }
        self._classes = list(classes) if classes is not None else None
        self.data_config: dict[str, Any] | None = None
        """The model's input configuration, needed by loaders; the Lightning module sets it."""

    gives = "images"
    items = "images"

    # What a subclass provides

    augment: AugmentConfig | None = None

    # What the model and the tools ask for

    @property
    def classes(self) -> list[str]:
        """Class names; the index is the class id. Raises: RuntimeError before setup()."""
        if self._classes is None:
            raise RuntimeError("the classes are known only after setup()")
        return self._classes

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def resolved_data_config(self) -> dict[str, Any]:
        """The input configuration in use, plain types. Raises: ValueError without data_config."""
        if self.data_config is None:
            raise ValueError(
                "the data do not know the model's input yet: set data_config = "
                "mmpreproj.backbones.building.input_config(model) on the data module before asking "
                "for loaders or transforms"
            )
        return resolve_data_config(self.data_config, **self.overrides)

    def eval_transform(self):
        """A callable, PIL image of any kind -> normalised float [C, H, W], as in evaluation."""
        return EvalTransform(self.resolved_data_config)

    def describe(self) -> dict[str, Any]:
        """Plain facts for the record of a run; what is not known (yet) is None."""
        return {
            "name": type(self).__name__,
            **{f"n_{split}": self.split_size(split) for split in ("train", "val", "test")},
            "val_fraction": self.val_fraction,
            "split_seed": self.split_seed,
            "classes": self._classes,
        }

    # Loaders

    def train_dataloader(self) -> DataLoader:
        dataset = self.dataset("train")
        if isinstance(dataset, IterableDataset):
            self.datasets["train"] = dataset
            return self._loader(dataset, self.batch_size, drop_last=self.drop_last)
        return super().train_dataloader()

    def train_sampler(self, dataset: Dataset) -> Sampler:
        if self.aug_repeats > 1:
            return RepeatedAugmentation(dataset, self.aug_repeats, *self._world(), run_seed())
        return super().train_sampler(dataset)

    def _loader(self, dataset: Dataset, batch_size: int, **keywords: Any) -> DataLoader:
        if isinstance(dataset, IterableDataset):
            keywords["worker_init_fn"] = _WorkerInit(self._world()[1])
        return super()._loader(dataset, batch_size, **keywords)

    # On the device

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, targets = batch
        return self.finish_images(
            images, targets, training=bool(self.trainer and self.trainer.training)
        ), targets

    def finish_images(
        self, images: torch.Tensor, targets: torch.Tensor, training: bool = False
    ) -> torch.Tensor:
        """uint8 [B, C, H, W] -> normalised float; random erasing when training; zeros where the
        target is a mark.

        Called by Lightning through on_after_batch_transfer; call it yourself when reading a loader
        by hand.
        """
        if images.dtype == torch.uint8:
            images = normalize(images, self.resolved_data_config)
        if training:
            if self.augment is not None and self.augment.re_prob > 0:
                images = RandomErasing(
                    self.augment.re_prob,
                    mode=self.augment.re_mode,
                    max_count=self.augment.re_count,
                    device=images.device,
                )(images)
        else:
            images = images.masked_fill((targets < 0).view(-1, 1, 1, 1), 0.0)
        # Lightning converts batches to the model's precision before they get here, when they were
        # integers
        return self.trainer.precision_plugin.convert_input(images) if self.trainer else images


class _WorkerInit:
    """Seeds the workers of a stream by rank and worker (a class: closures do not pickle)."""

    def __init__(self, rank: int):
        self.rank = rank

    def __call__(self, worker_id: int) -> None:
        pl_worker_init_function(worker_id, self.rank)
