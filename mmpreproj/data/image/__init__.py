"""Image data: digits (the default, no download), class folders, and what timm's readers open."""

from mmpreproj.data.image.digits import DigitsAugment, DigitsDataModule
from mmpreproj.data.image.image_files import (
    AugmentConfig,
    UnreadableImage,
    load_image,
    to_channels,
)
from mmpreproj.data.image.image_module import ImageDataModule, ImageFolderDataModule
from mmpreproj.data.image.timm_readers import TimmDataModule
from mmpreproj.data.labelled_files import FolderSource

__all__ = [
    "AugmentConfig",
    "DigitsAugment",
    "DigitsDataModule",
    "FolderSource",
    "ImageDataModule",
    "ImageFolderDataModule",
    "TimmDataModule",
    "UnreadableImage",
    "load_image",
    "to_channels",
]
