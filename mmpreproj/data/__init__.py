"""Data modules by kind of data. What is imported here needs Lightning; each kind's own packages are
imported with it."""

from mmpreproj.data.image import (
    AugmentConfig,
    DigitsAugment,
    DigitsDataModule,
    FolderSource,
    ImageDataModule,
    ImageFolderDataModule,
    TimmDataModule,
    UnreadableImage,
    load_image,
    to_channels,
)
from mmpreproj.data.splits import stratified_holdout
from mmpreproj.data.text import TextDataModule

__all__ = [
    "AugmentConfig",
    "DigitsAugment",
    "DigitsDataModule",
    "FolderSource",
    "ImageDataModule",
    "ImageFolderDataModule",
    "TextDataModule",
    "TimmDataModule",
    "UnreadableImage",
    "load_image",
    "stratified_holdout",
    "to_channels",
]
