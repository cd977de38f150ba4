"""Training with Lightning: a module for each task, its recipe, runs and their folders."""

from mmpreproj.training.image_classifier import ImageClassifier
from mmpreproj.training.language_model import LanguageModel
from mmpreproj.training.recipe import MixConfig, OptimizerConfig, ScheduleConfig
from mmpreproj.training.runs import load_run
from mmpreproj.training.sharding import ShardedStrategy
from mmpreproj.training.video_classifier import VideoClassifier

__all__ = [
    "ImageClassifier",
    "LanguageModel",
    "MixConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "ShardedStrategy",
    "VideoClassifier",
    "load_run",
]
