"""Training with Lightning: a module for each task, its recipe, runs and their folders."""

from typing import Any

from mmpreproj.training.image_classifier import ImageClassifier
from mmpreproj.training.recipe import MixConfig, OptimizerConfig, ScheduleConfig
from mmpreproj.training.runs import load_run
from mmpreproj.training.video_classifier import VideoClassifier

__all__ = [
    "ImageClassifier",
    "LanguageModel",
    "MixConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "VideoClassifier",
    "load_run",
]


def __getattr__(name: str) -> Any:
    if name == "LanguageModel":  # needs transformers, which images do without
        from mmpreproj.training.language_model import LanguageModel

        return LanguageModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
