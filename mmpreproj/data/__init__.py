"""Image data: digits (the default, no download), class folders, and what timm's readers open."""

from mmpreproj.data.base import ImageDataModule
from mmpreproj.data.digits import DigitsAugment, DigitsDataModule
from mmpreproj.data.folders import FolderSource, ImageFolderDataModule
from mmpreproj.data.images import UnreadableImage, load_image, to_channels
from mmpreproj.data.splits import stratified_holdout
from mmpreproj.data.timm_readers import TimmDataModule
from mmpreproj.data.transforms import AugmentConfig

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
    "stratified_holdout",
    "to_channels",
]
