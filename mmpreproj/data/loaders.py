"""What data modules over labelled items share: loaders that count each item once, and their order.

A subclass gives `dataset(split, n_padding)` and `split_size(split)`; see targets.py for padding and
sampling.py for the order of training items.
"""

from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from mmpreproj.data.sampling import EpochSampler, run_seed
from mmpreproj.messages import need

__all__ = ["Answers", "LabelledDataModule"]

lightning = need("lightning", "mmpreproj.data", "train")


class LabelledDataModule(lightning.LightningDataModule):
    """Base of data modules whose parts "train", "val" and "test" are datasets of known size.

    Training asks a data module what it `gives`, and for `has_split`, `describe` and
    `gather_bad_files`; images for `classes` and `resolved_data_config`, clips for `label_sets`,
    `opposites` and the latter, once it has set `data_config` to the model's input; text for
    `has_tokenizer`, `tokenizer` and `block_size`. See `Answers` for modules of another base.

    Args:
        batch_size: items in a training batch, on each process.
        eval_batch_size: the same for validation and test; None: batch_size.
        num_workers: worker processes of each loader; 0 reads in the main process.
        drop_last: leave out the last, smaller training batch of an epoch (the shuffle changes, so
            do the items).
    """

    gives: ClassVar[Literal["images", "clips", "text"]]
    """The kind of its batches, which a training module `needs`."""
    items = "items"
    """What the items are called in messages."""

    def __init__(
        self,
        batch_size: int,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        drop_last: bool = True,
    ):
        super().__init__()
        if batch_size < 1 or (eval_batch_size is not None and eval_batch_size < 1):
            raise ValueError(
                f"batch sizes must be 1 or more, got {batch_size} and {eval_batch_size} (eval)"
            )
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {num_workers}")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.datasets: dict[str, Dataset] = {}
        """The dataset behind each loader made so far: "train", "val", "test"."""

    def dataset(self, split: str, n_padding: int = 0) -> Dataset:
        """The dataset of "train", "val" or "test", after setup.

        n_padding: items marked PADDING to add to an evaluation split.
        """
        raise NotImplementedError

    def split_size(self, split: str) -> int | None:
        """Items of a split; None while unknown (before setup, or a stream of unknown length)."""
        raise NotImplementedError

    def has_split(self, split: str) -> bool:
        return self.split_size(split) != 0

    def train_dataloader(self) -> DataLoader:
        dataset = self.dataset("train")
        self.datasets["train"] = dataset
        world, _ = self._world()
        sampler = self.train_sampler(dataset)
        if self.drop_last and len(sampler) < self.batch_size:
            raise ValueError(
                f"{len(dataset)} training {self.items} on {world} process(es) do not fill one "
                f"batch of {self.batch_size}: lower batch_size (--data.batch_size), or set "
                "drop_last to false (--data.drop_last false)"
            )
        return self._loader(dataset, self.batch_size, sampler=sampler, drop_last=self.drop_last)

    def train_sampler(self, dataset: Dataset) -> Sampler:
        """The order of training items, and which of them this process takes."""
        return EpochSampler(dataset, *self._world(), run_seed())

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


class Answers:
    """What training asks a data module: its own answers, or else those assumed here.

    A LightningDataModule of a user's own may have any part of what LabelledDataModule lists. None
    is for no data module at all.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._assumed = {
            "classes": None,
            "label_sets": None,
            "opposites": {},
            "resolved_data_config": None,
            "has_split": lambda split: True,
            "describe": lambda: {"name": type(data).__name__},
            "gather_bad_files": lambda: None,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name, self._assumed[name])

    @property
    def gives(self) -> str | None:
        """The kind of the batches; None where that cannot be told."""
        if stated := getattr(self._data, "gives", None):
            return stated
        if hasattr(self._data, "has_tokenizer"):
            return "text"
        return "clips" if hasattr(self._data, "label_sets") else None
