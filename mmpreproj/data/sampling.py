"""What is drawn: the items held out of training, their order, the numbers of their augmentation.

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

import numpy as np
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

__all__ = ["EpochSampler", "RepeatedAugmentation", "run_seed", "seeded", "stratified_holdout"]


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
