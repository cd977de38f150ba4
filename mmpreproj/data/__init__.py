"""Data modules by kind of data. A kind is imported when it is asked for: clips need PyAV and
decord, text needs transformers, images neither."""

import importlib
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
from mmpreproj.data.splits import stratified_holdout

if TYPE_CHECKING:
    from mmpreproj.data.text import TextDataModule
    from mmpreproj.data.video import MovingDigitsDataModule, VideoDataModule

__all__ = [
    "AugmentConfig",
    "DigitsAugment",
    "DigitsDataModule",
    "FolderSource",
    "ImageDataModule",
    "ImageFolderDataModule",
    "MovingDigitsDataModule",
    "TextDataModule",
    "TimmDataModule",
    "UnreadableImage",
    "VideoDataModule",
    "load_image",
    "stratified_holdout",
    "to_channels",
]

_LATER = {
    "MovingDigitsDataModule": "mmpreproj.data.video",
    "TextDataModule": "mmpreproj.data.text",
    "VideoDataModule": "mmpreproj.data.video",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
