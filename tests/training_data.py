"""A tiny data module and model for the tests of training."""

import importlib.util
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset

from mmpreproj.data.loaders import EpochSampler, run_seed
from mmpreproj.training import ImageClassifier

TOOLS = Path(__file__).parents[1] / "tools"

# Two blocks, 17 tokens: a forward pass takes about a millisecond.
TINY_ARGS = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


class Numbered(Dataset):
    """Images whose pixels follow from their number, so that a batch tells who is in it."""

    def __init__(self, n, num_classes, size, offset=0, channels=3):
        generator = torch.Generator().manual_seed(7 + offset)
        self.images = torch.randn(n, channels, size, size, generator=generator)
        self.images[:, 0, 0, 0] = torch.arange(n)
        self.targets = torch.arange(n) % num_classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        index = index % len(self)  # the sampler counts epochs in
        return self.images[index], self.targets[index]


class TinyData(LightningDataModule):
    def __init__(self, n=24, n_val=8, n_test=10, batch_size=4, num_classes=3, size=16, channels=3):
        super().__init__()
        self.n, self.n_val, self.n_test = n, n_val, n_test
        self.batch_size, self.size, self.channels = batch_size, size, channels
        self.classes = [f"class {index}" for index in range(num_classes)]
        self.data_config = None
        self.resolved_data_config = None

    def _set(self, n, offset):
        return Numbered(n, len(self.classes), self.size, offset, self.channels)

    def train_dataloader(self):
        data = self._set(self.n, 0)
        world, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = EpochSampler(data, world, rank, run_seed())
        return DataLoader(data, self.batch_size, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self._set(self.n_val, 1), 4) if self.n_val else []

    def test_dataloader(self):
        return DataLoader(self._set(self.n_test, 2), 4)


def classifier(**kwargs):
    """An ImageClassifier on vit_preproj_tiny, made tiny, with a constant rate."""
    settings = {"model": "vit_preproj_tiny", "model_args": TINY_ARGS, "schedule": {"sched": "none"}}
    return ImageClassifier(**{**settings, **kwargs})


def trainer(tmp_path, **kwargs):
    """A trainer that writes and prints nothing unless told."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": str(tmp_path),
    }
    return Trainer(**{**quiet, **kwargs})


def tool_main(name):
    """`main` of tools/NAME.py, which takes the words of the command line."""
    spec = importlib.util.spec_from_file_location(f"{name}_tool", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main
