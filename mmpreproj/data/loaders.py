"""Loaders that count each item once: what is held out of training, the order, the random numbers.

Order and augmentation follow from the run's seed, the epoch and the rank alone. So equal seeds give
equal batches with any number of workers, and a run resumed at the start of an epoch sees what an
unbroken run would have seen. For that the samplers yield epoch * N + index, which the dataset takes
apart again: with persistent workers there is no other way to tell a worker the epoch.
"""

import contextlib
import math
import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, get_worker_info

from mmpreproj.messages import need

__all__ = ["Answers", "EpochSampler", "LabelledDataModule", "RepeatedAugmentation", "run_seed"]
__all__ += ["seeded", "stratified_holdout"]

lightning = need("lightning", "mmpreproj.data", "train")


class LabelledDataModule(lightning.LightningDataModule):
    """Base of data modules whose splits "train", "val" and "test" are datasets of known size.

    A subclass gives `dataset(split, n_padding)` and `split_size(split)`. Padding: see targets.py.

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
        """The split to choose on; where there is none an empty list, as Lightning wants it."""
        return self._eval_loader("val") if self.has_split("val") else []

    def test_dataloader(self) -> DataLoader:
        """The split that is reported."""
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


# Which items, in which order


def stratified_holdout(
    targets: np.ndarray, n_held: int | None = None, fraction: float | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Splits item numbers into a kept and a held-out part with the classes in proportion.

    Each class gives its share of `n_held` (or of fraction * N), rounded so that the shares add up
    (largest remainders). Then a class with one item keeps it, and every other class gives at least
    one and keeps at least one, which can move the total where there are many tiny classes. The
    result depends on `targets` and `seed` alone: it uses numpy's legacy generator, whose stream is
    frozen, and no global state.

    Shape: targets int [N] -> kept int64 [N - M], held int64 [M], both ascending.
    Raises: ValueError unless exactly one of n_held / fraction is given and lies in range.
    """
    targets = np.asarray(targets)
    if (n_held is None) == (fraction is None):
        raise ValueError(
            f"give one of n_held and fraction, got n_held={n_held}, fraction={fraction}"
        )
    if fraction is not None:
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"the held-out fraction must be 0 or more and below 1, got {fraction}")
        n_held = math.floor(fraction * len(targets) + 0.5)
        if fraction > 0:
            n_held = max(n_held, 1)
    if not 0 <= n_held <= len(targets):
        raise ValueError(f"cannot hold {n_held} out of {len(targets)} items")
    everything = np.arange(len(targets))
    if n_held == 0:
        return everything, everything[:0]
    _, sizes = np.unique(targets, return_counts=True)
    exact = n_held * sizes / len(targets)
    shares = np.floor(exact).astype(np.int64)
    # a stable sort: equal remainders go to the lower class
    largest_remainders = np.argsort(shares - exact, kind="stable")[: n_held - shares.sum()]
    shares[largest_remainders] += 1
    shares = np.where(sizes >= 2, np.clip(shares, 1, np.maximum(sizes - 1, 1)), 0)

    generator = np.random.RandomState(seed)
    by_class = np.split(np.argsort(targets, kind="stable"), np.cumsum(sizes)[:-1])
    held_by_class = [generator.permutation(m)[:k] for m, k in zip(by_class, shares, strict=True)]
    held = np.sort(np.concatenate(held_by_class))
    kept = np.ones(len(targets), dtype=bool)
    kept[held] = False
    return everything[kept], held


def run_seed() -> int:
    """The seed given to Lightning's seed_everything; without one 0, as in Lightning's samplers."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


class EpochSampler(DistributedSampler):
    """Shuffles by (seed, epoch) and yields epoch * N + index, for one process or this rank of
    several.

    It is a DistributedSampler also in a single process: Lightning then neither replaces nor wraps
    it. Lightning calls set_epoch; in a hand-written loop that does not, each pass still has an
    order of its own.
    """

    def __init__(self, dataset: Dataset, num_replicas: int = 1, rank: int = 0, seed: int = 0):
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)

    def order(self) -> Iterator[int]:
        return super().__iter__()

    def __iter__(self) -> Iterator[int]:
        offset = self.epoch * len(self.dataset)
        order = self.order()
        self.epoch += 1
        return (offset + index for index in order)


class RepeatedAugmentation(EpochSampler):
    """timm's RepeatAugSampler (DeiT's repeated augmentation), in a single process too, and
    following the seed.

    Every image comes `num_repeats` times in a row, dealt out over the ranks; an epoch still has
    about N images, so it shows about N / num_repeats different ones.
    """

    def __init__(
        self,
        dataset: Dataset,
        num_repeats: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ):
        super().__init__(dataset, num_replicas, rank, seed)
        self.repeats = RepeatAugSampler(
            dataset, num_replicas=num_replicas, rank=rank, num_repeats=num_repeats
        )

    def order(self) -> Iterator[int]:
        self.repeats.set_epoch(
            self.seed * 1_000_003 + self.epoch
        )  # timm seeds its generator with the epoch alone
        return iter(self.repeats)

    def __len__(self) -> int:
        return len(self.repeats)


@contextlib.contextmanager
def seeded(*key: int):
    """Inside, the generators of Python, numpy and torch (CPU) follow `key`.

    Afterwards the main process has its own state back; workers have no other use for theirs.
    """
    main_process = get_worker_info() is None
    if main_process:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seeds = np.random.SeedSequence(key).generate_state(3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would reseed the GPUs as well
    try:
        yield
    finally:
        if main_process:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
