"""tools/plan.py: what it says of memory is what a run takes, and of operations what is known."""

import importlib.util
import json
import sys

import pytest
import torch
from training_data import TOOLS

import mmpreproj
from mmpreproj.training.recipe import OptimizerConfig, make_optimizer

pytestmark = pytest.mark.slow


def tool(name):
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(TOOLS))  # where its parts are
plan = tool("plan")
sys.path.remove(str(TOOLS))
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SPECS = {
    "image": {
        "class_path": "mmpreproj.training.ImageClassifier",
        "init_args": {"model_args": {"img_size": 64, "embed_dim": 96, "depth": 4}},
    },
    "frozen video, recomputed": {
        "class_path": "mmpreproj.training.VideoClassifier",
        "init_args": {
            "model_args": {"img_size": 64, "num_frames": 8, "embed_dim": 96, "depth": 4},
            "freeze_base": True,
            "grad_checkpointing": True,
        },
    },
    "probe in bfloat16": {
        "class_path": "mmpreproj.training.LanguageModel",
        "init_args": {"preproj": {}, "freeze_base": True},
    },
}


def real(spec):
    """The same model with numbers in it."""
    model = plan.build(spec, 10, LLAMA)
    model.to_empty(device="cpu")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.fill_(0.5)
    return model


@pytest.mark.parametrize("name", SPECS)
def test_a_planned_peak_is_the_allocators_within_a_tenth(name, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from benchmarks.language import peak_bytes

    half, size, tokens = name == "probe in bfloat16", 8, 64
    spec = SPECS[name]
    found = plan.measure(plan.build(spec, 10, LLAMA), OptimizerConfig(), size, tokens, half)
    model = real(spec)
    optimizer = make_optimizer(model, OptimizerConfig())
    batch = plan.batch_of(model, size, tokens)

    def step():  # in Lightning's order
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = plan.loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        del loss
        optimizer.step()

    step()  # the gradients and the optimiser's state are there from now on
    before = sum(found[part] for part in ("weights", "gradients", "optimiser"))
    assert found["peak"] == pytest.approx(before + peak_bytes(step), rel=0.1)
    assert found["activations"] > 0.3 * found["peak"] or "recomputed" in name


def test_operations_are_those_of_the_matrices_and_of_attention():
    spec, tokens = SPECS["probe in bfloat16"], 64
    init = {**spec["init_args"], "freeze_base": False}
    model = plan.build({**spec, "init_args": init}, 10, LLAMA)
    matrices = sum(
        m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)
    )  # the head's among them
    # Q·K and weights·V: 4 T² D of a layer; backward is twice of it, and forward's scores again
    attention = 4 * 4 * tokens**2 * 64 * 3.5
    found = plan.measure(model, OptimizerConfig(), 2, tokens)
    assert found["flops"] == pytest.approx(6 * tokens * matrices + attention, rel=1e-3)
    new = sum(p.numel() for m in mmpreproj.preproj_modules(model).values() for p in m.parameters())
    # the loss makes the gradients of the head and of what it reads within the forward
    forward = 2 * tokens * matrices + attention / 3.5 + 4 * tokens * 512 * 64
    assert found["method_share"] == pytest.approx(2 * tokens * new / forward, rel=1e-3)


def test_a_plan_says_what_fits(tmp_path, capsys):
    config = {"model": SPECS["probe in bfloat16"], "data": {"init_args": {"batch_size": 2}}}
    (tmp_path / "lm.yaml").write_text(json.dumps(config))
    words = [str(tmp_path / "lm.yaml"), "--base", json.dumps(LLAMA), "--tokens", "64"]
    plan.main([*words, "--devices", "2", "--device-memory", "0.002", "--items", "1000"])
    said = capsys.readouterr().out
    assert "does not" in said and "hours for" in said
    # 2 x layers x heads of keys and values x their width x 2 bytes
    assert f"{2 * 4 * 2 * 16 * 2} bytes a token" in said
