"""Position-agnostic pre-projection for transformer attention (arXiv 2604.10791).

Importing this registers `vit_preproj_*` and `video_vit_preproj_*` with timm.
"""

from mmpreproj.attach import (
    attach,
    attach_block,
    detach,
    freeze_base,
    preproj_modules,
)
from mmpreproj.backbones import video as _video  # noqa: F401  registers the timm models
from mmpreproj.backbones import vit as _vit  # noqa: F401
from mmpreproj.describe import Description, describe
from mmpreproj.hf import from_pretrained
from mmpreproj.preproj import PreProj, PreProjConfig
from mmpreproj.saving import load, save
from mmpreproj.verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "Description",
    "PreProj",
    "PreProjConfig",
    "Verification",
    "attach",
    "attach_block",
    "describe",
    "detach",
    "freeze_base",
    "from_pretrained",
    "load",
    "preproj_modules",
    "save",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "PreProjPeftConfig":  # on demand: PEFT is optional, and takes seconds to import
        from mmpreproj.peft_method import PreProjPeftConfig

        return PreProjPeftConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
