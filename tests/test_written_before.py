"""Run folders and adapter folders that an earlier revision wrote still load, with the same outputs.

tests/written_by_071d733 was written by that revision: runs of two batches with small models, and
adapters with random values. expected.pt holds its own outputs on the inputs beside them.
"""

from pathlib import Path

import peft
import pytest
import timm
import torch
import transformers

import mmpreproj
from mmpreproj.training import load_run

FOLDER = Path(__file__).parent / "written_by_071d733"
IDS = torch.arange(1, 9)[None]


@pytest.fixture(scope="module")
def expected():
    return torch.load(FOLDER / "expected.pt", weights_only=True)


@pytest.mark.parametrize("name", ["vit", "video", "lm", "probe"])
def test_a_run_folder_of_071d733_loads(name, expected, monkeypatch):
    monkeypatch.chdir(FOLDER.parent.parent)  # the probe's base is named from there
    module, data = load_run(FOLDER / "runs" / name / "run")
    assert data is not None
    with torch.no_grad():
        found = module(expected[f"inputs/{name}"])
    # another machine's kernels may round otherwise
    torch.testing.assert_close(found, expected[f"runs/{name}"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("mmpreproj.training.image.ImageClassifier", "mmpreproj.data.DigitsDataModule"),
        ("mmpreproj.training.ImageClassifier", "mmpreproj.data.image.digits.DigitsDataModule"),
        ("mmpreproj.training.ImageClassifier", "mmpreproj.data.image.gone.DigitsDataModule"),
    ],
)
def test_a_checkpoint_may_name_the_file_that_a_class_was_in(model, data, tmp_path):
    whole = torch.load(FOLDER / "runs/vit/run/checkpoints/best.ckpt", weights_only=True)
    whole["mmpreproj"]["model"]["class_path"] = model
    whole["mmpreproj"]["data"]["class_path"] = data
    torch.save(whole, tmp_path / "best.ckpt")
    module, found = load_run(tmp_path / "best.ckpt")
    assert type(module).__name__ == "ImageClassifier" and type(found).__name__ == "DigitsDataModule"


@torch.no_grad()
def test_an_adapter_folder_of_071d733_loads(expected):
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "llama").eval()
    mmpreproj.load(model, FOLDER / "llama_adapter")
    found = model(IDS).logits
    torch.testing.assert_close(found, expected["llama_adapter"], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_timm_adapter_folder_of_071d733_loads(expected):
    model = timm.create_model(
        "vit_tiny_patch16_224",
        **dict(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3),
    ).eval()
    g = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.1)
    mmpreproj.load(model, FOLDER / "timm_adapter")
    found = model(expected["image"])
    torch.testing.assert_close(found, expected["timm_adapter"], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_peft_folder_of_071d733_loads(expected):
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "llama")
    assert mmpreproj.PreProjPeftConfig  # registers the method with PEFT
    model = peft.PeftModel.from_pretrained(model, FOLDER / "peft_adapter").eval()
    found = model(IDS).logits
    torch.testing.assert_close(found, expected["peft_adapter"], rtol=1e-4, atol=1e-5)
