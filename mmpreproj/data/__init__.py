"""Data modules by kind of data: images, clips, text.

The kind that needs a package of its own, transformers, is imported when it is asked for; PyAV and
decord are when a file is read.
"""

from typing import TYPE_CHECKING, Any

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
from mmpreproj.data.loaders import LabelledDataModule
from mmpreproj.data.sampling import stratified_holdout
from mmpreproj.data.video import MovingDigitsDataModule, VideoDataModule
from mmpreproj.data.vision import VisionDataModule

if TYPE_CHECKING:
    from mmpreproj.data.text import TextDataModule

__all__ = [
    "AugmentConfig",
    "DigitsAugment",
    "DigitsDataModule",
    "FolderSource",
    "ImageDataModule",
    "ImageFolderDataModule",
    "LabelledDataModule",
    "MovingDigitsDataModule",
    "TextDataModule",
    "TimmDataModule",
    "UnreadableImage",
    "VideoDataModule",
    "VisionDataModule",
    "load_image",
    "stratified_holdout",
    "to_channels",
]


def __getattr__(name: str) -> Any:
    if name == "TextDataModule":
        from mmpreproj.data.text import TextDataModule

        return TextDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
