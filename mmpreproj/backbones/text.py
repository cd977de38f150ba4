"""`mmpreproj.backbones.lm` by the name that it had before."""

from mmpreproj.backbones.lm import *  # noqa: F403

__all__ = []
