"""What the image data modules share: input configuration, loaders, the step on the device."""

from typing import Any

import torch
from timm.data.random_erasing import RandomErasing
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mmpreproj.data.image.transforms import (
    AugmentConfig,
    EvalTransform,
    normalize,
    resolve_data_config,
)
from mmpreproj.data.sampling import EpochSampler, RepeatedAugmentation, run_seed

try:
    from lightning import LightningDataModule
    from lightning.fabric.utilities.seed import pl_worker_init_function
except ImportError as error:
    raise ImportError(
        "mmpreproj.data needs Lightning, which is not installed: pip install lightning"
    ) from error


class ImageDataModule(LightningDataModule):
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
        super().__init__()
        if batch_size < 1 or (eval_batch_size is not None and eval_batch_size < 1):
            raise ValueError(
                f"batch sizes must be 1 or more, got {batch_size} and {eval_batch_size} (eval)"
            )
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"val_fraction must be 0 or more and below 1, got {val_fraction}")
        if num_workers < 0 or aug_repeats < 0:
            raise ValueError(
                f"num_workers ({num_workers}) and aug_repeats ({aug_repeats}) must not be negative"
            )
        if classes is not None and len(set(classes)) != len(classes):
            raise ValueError(f"class names must differ, got {classes}")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.drop_last = drop_last
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
        self.datasets: dict[str, Dataset] = {}
        """The dataset behind each loader made so far: "train", "val", "test"."""

    # What a subclass provides

    augment: AugmentConfig | None = None

    def dataset(self, split: str, n_padding: int = 0) -> Dataset | None:
        """The dataset of "train", "val" or "test", after setup; None where there is none.

        n_padding: items marked PADDING to add to an evaluation split.
        """
        raise NotImplementedError

    def split_size(self, split: str) -> int | None:
        """Images of a split; None while unknown (before setup, or a stream of unknown length)."""
        raise NotImplementedError

    def has_split(self, split: str) -> bool:
        return self.split_size(split) != 0

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
                "mmpreproj.training.build.input_config(model) on the data module before asking for "
                "loaders or transforms"
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
        self.datasets["train"] = dataset
        if isinstance(dataset, IterableDataset):
            return self._loader(dataset, self.batch_size, drop_last=self.drop_last)
        world, rank = self._world()
        if self.aug_repeats > 1:
            sampler = RepeatedAugmentation(dataset, self.aug_repeats, world, rank, run_seed())
        else:
            sampler = EpochSampler(dataset, world, rank, run_seed())
        if self.drop_last and len(sampler) < self.batch_size:
            raise ValueError(
                f"{len(dataset)} training images (val_fraction={self.val_fraction} is held out) on "
                f"{world} process(es) do not fill one batch of {self.batch_size}: lower batch_size "
                "(--data.batch_size), or set drop_last to false (--data.drop_last false)"
            )
        return self._loader(dataset, self.batch_size, sampler=sampler, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader | list:
        """The part to choose on; where there is none an empty list, as Lightning wants it."""
        return self._eval_loader("val") if self.has_split("val") else []

    def test_dataloader(self) -> DataLoader:
        """The part that is reported."""
        return self._eval_loader("test")

    def _eval_loader(self, split: str) -> DataLoader:
        world, _ = self._world()
        # Lightning deals items out to the ranks, repeating some unless their number divides evenly
        dataset = self.dataset(split, n_padding=-(self.split_size(split) or 0) % world)
        self.datasets[split] = dataset
        return self._loader(dataset, self.eval_batch_size)

    def _loader(self, dataset: Dataset, batch_size: int, **keywords: Any) -> DataLoader:
        if isinstance(dataset, IterableDataset):
            keywords["worker_init_fn"] = _WorkerInit(self._world()[1])
        return DataLoader(
            dataset,
            batch_size=batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **keywords,
        )

    def _world(self) -> tuple[int, int]:
        """Number of processes, and which one this is."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)

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
