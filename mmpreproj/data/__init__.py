"""Data modules by kind of data: images, clips, text.

What one kind alone needs (PyAV, decord, transformers) is imported when a file is read.
"""

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
from mmpreproj.data.loaders import LabelledDataModule, stratified_holdout
from mmpreproj.data.text import TextDataModule
from mmpreproj.data.video import (
    MovingDigits,
    MovingDigitsDataModule,
    VideoAugment,
    VideoDataModule,
)
from mmpreproj.data.vision import VisionDataModule

__all__ = [
    "AugmentConfig",
    "DigitsAugment",
    "DigitsDataModule",
    "FolderSource",
    "ImageDataModule",
    "ImageFolderDataModule",
    "LabelledDataModule",
    "MovingDigits",
    "MovingDigitsDataModule",
    "TextDataModule",
    "TimmDataModule",
    "UnreadableImage",
    "VideoAugment",
    "VideoDataModule",
    "VisionDataModule",
    "load_image",
    "stratified_holdout",
    "to_channels",
]
