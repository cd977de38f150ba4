"""Video transformers with the method; importing this registers `video_vit_preproj_*` with timm."""

import sys

import mmpreproj.backbones
from mmpreproj.backbones.video import inflate
from mmpreproj.backbones.video.transformer import PreProjVideoTransformer

__all__ = ["PreProjVideoTransformer"]

# The name that from_image_model and static_clip_report had before this folder.
sys.modules["mmpreproj.backbones.inflate"] = mmpreproj.backbones.inflate = inflate
