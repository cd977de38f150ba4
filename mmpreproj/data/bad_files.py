"""Data sets of files, some of which may turn out to be unreadable: named, counted, never lost."""

import warnings

import numpy as np
import torch
from torch.utils.data import Dataset

MAX_WARNINGS = 20


class FileDataset(Dataset):
    """Some files of a source, by their indices; keeps a record of the unreadable ones.

    A subclass gives `name`, and calls `record` for a file that cannot be read.
    """

    consequence = "left out"
    """What happens to an unreadable file, as the warning tells it."""

    def __init__(self, indices: np.ndarray):
        self.indices = indices
        # One flag a file in shared memory: workers on either side of a fork or spawn set the same
        # flags, and setting one twice does no harm, so this needs no lock and counts files, not
        # attempts.
        self.bad = torch.zeros(len(indices), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        """What to call file number `index` of the source."""
        raise NotImplementedError

    def bad_files(self) -> list[str]:
        """Names of the files found unreadable so far, by this process and its workers."""
        return [self.name(int(self.indices[i])) for i in self.bad.nonzero()[:, 0].tolist()]

    def record(self, position: int, error: Exception) -> None:
        """Count the file at `position` as unreadable, with a warning the first time."""
        if self.bad[position]:
            return
        self.bad[position] = 1
        count = int(self.bad.sum())
        if count <= MAX_WARNINGS:
            more = "; further ones are counted without a message" if count == MAX_WARNINGS else ""
            warnings.warn(f"{error}: {self.consequence}{more}", stacklevel=3)
