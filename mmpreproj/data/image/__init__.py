"""Image data: digits (the default, no download), class folders, and what timm's readers open."""

from mmpreproj.data.image.base import ImageDataModule
from mmpreproj.data.image.digits import DigitsAugment, DigitsDataModule
from mmpreproj.data.image.files import UnreadableImage, load_image, to_channels
from mmpreproj.data.image.folders import FolderSource, ImageFolderDataModule
from mmpreproj.data.image.timm_readers import TimmDataModule
from mmpreproj.data.image.transforms import AugmentConfig

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
