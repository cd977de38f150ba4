"""Training with Lightning: the image classifier, its recipe, runs and their folders."""

from mmpreproj.training.image import ImageClassifier
from mmpreproj.training.recipe import MixConfig, OptimizerConfig, ScheduleConfig
from mmpreproj.training.runs import load_run

__all__ = ["ImageClassifier", "MixConfig", "OptimizerConfig", "ScheduleConfig", "load_run"]
