"""The order of training images, and the random numbers of their augmentation.

Both follow from the run's seed, the epoch and the rank alone. So equal seeds give equal batches
with any number of workers, and a run resumed at the start of an epoch sees what an unbroken run
would have seen. For that the samplers yield epoch * N + index, which the dataset takes apart again:
with persistent workers there is no other way to tell a worker the epoch.
"""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import Dataset, DistributedSampler, get_worker_info


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
