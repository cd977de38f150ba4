"""Adapters in files: what is written, what comes back, and what does not fit."""

import copy
import dataclasses
import json

import pytest

peft = pytest.importorskip("peft")

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from peft_models import facts, perturb, text_case, timm_case, wrapped  # noqa: E402
from transformers_models import ENCODERS, WIDTH, inputs, outputs, tiny  # noqa: E402

from mmpreproj import PreProjConfig, PreProjPeftConfig  # noqa: E402


def test_saved_folders_hold_the_adapters_alone_and_load_exactly(tmp_path):
    base, run = text_case("granite")
    fresh = copy.deepcopy(base)
    model = wrapped(base, layers=[-1], task_type="CAUSAL_LM")
    model.add_adapter("other", PreProjPeftConfig(expansion=0.5))
    results = {}
    for name in ("default", "other"):
        perturb(model, name)
        model.set_adapter(name)
        results[name] = run(model)
    model.save_pretrained(tmp_path)

    saved = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    place = "base_model.model.model.layers.1.self_attn.preproj.by_name"
    assert {key: tuple(value.shape) for key, value in saved.items()} == {
        f"{place}.up.weight": (40, WIDTH),
        f"{place}.down.weight": (WIDTH, 40),
        f"{place}.skip.weight": (WIDTH, WIDTH),
    }
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    assert described["peft_type"] == "PREPROJ" and described["layers"] == [-1]

    for keywords in ({}, {"low_cpu_mem_usage": True}):
        again = peft.PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path, **keywords)
        assert isinstance(again, peft.PeftModelForCausalLM)
        assert not any(p.requires_grad for p in again.parameters())
        again.load_adapter(tmp_path / "other", "renamed", **keywords)
        assert torch.equal(run(again), results["default"])
        again.set_adapter("renamed")
        assert torch.equal(run(again), results["other"])


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda t: t.pop(next(iter(t))), ValueError, "missing: base_model.*down.weight$"),
        (lambda t: t.update({"stray.up.weight": torch.ones(2)}), ValueError, "unknown: stray"),
        (
            lambda t: t.update({k: v[:, 1:].clone() for k, v in t.items()}),
            RuntimeError,
            "size mismatch",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_tensors_that_do_not_fit_are_errors(tmp_path, change, error, told):
    base = tiny("llama")
    fresh = copy.deepcopy(base)
    wrapped(base).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(error, match=told):
        peft.PeftModel.from_pretrained(fresh, tmp_path)


def test_another_depth_or_width_is_an_error(tmp_path):
    wrapped(tiny("llama")).save_pretrained(tmp_path)
    deep, wide = tiny("llama", num_hidden_layers=3), tiny("llama", hidden_size=64)
    for model, told in ((deep, "'depth': 2.*'depth': 3"), (wide, "'width': 32.*'width': 64")):
        with pytest.raises(ValueError, match=told):
            peft.PeftModel.from_pretrained(model, tmp_path)
    config = peft.PeftConfig.from_pretrained(tmp_path)
    config.base = None  # as in a folder that does not say what its base was
    with pytest.raises(ValueError, match="missing: .*layers.2"):
        peft.PeftModel.from_pretrained(deep, tmp_path, config=config)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(wide, tmp_path, config=config)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_base_takes_adapters_in_float32_or_its_own_dtype(autocast, tmp_path):
    base = tiny("gemma2", torch.bfloat16)
    x = inputs(base)
    expected, fresh = outputs(base, x), copy.deepcopy(base)
    model = peft.get_peft_model(base, PreProjPeftConfig(), autocast_adapter_dtype=autocast)
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    assert dtypes == {torch.float32 if autocast else torch.bfloat16}
    assert torch.equal(outputs(model, x), expected)
    model(**x, labels=x["input_ids"]).loss.backward()
    perturb(model)
    model.save_pretrained(tmp_path)
    for low in (False, True):
        again = peft.PeftModel.from_pretrained(
            copy.deepcopy(fresh), tmp_path, autocast_adapter_dtype=autocast, low_cpu_mem_usage=low
        )
        assert torch.equal(outputs(again, x), outputs(model, x))


def test_timm_model_with_a_new_head_is_saved_and_loaded_whole(tmp_path):
    base, run = timm_case()
    fresh, expected, untouched = copy.deepcopy(base), run(base), facts(base)
    model = wrapped(base, modules_to_save=["head"])
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trainable if ".preproj." not in n} == {
        f"base_model.model.head.modules_to_save.default.{part}" for part in ("weight", "bias")
    }
    perturb(model)
    with torch.no_grad():
        model.get_base_model().head.modules_to_save["default"].weight.normal_()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(run(again), run(model)) and not torch.allclose(run(model), expected)
    assert torch.equal(run(model.unload()), expected)  # the base's own head is back
    assert facts(base) == untouched


def test_sequence_classifiers_save_their_head_by_the_task(tmp_path):
    case = dataclasses.replace(ENCODERS["bert"], model="BertForSequenceClassification")
    base, run = text_case(case)
    fresh = copy.deepcopy(base)
    model = wrapped(base, task_type="SEQ_CLS")
    perturb(model)
    with torch.no_grad():
        model.base_model.model.classifier.modules_to_save["default"].weight.normal_()
    model.save_pretrained(tmp_path)
    assert torch.equal(run(peft.PeftModel.from_pretrained(fresh, tmp_path)), run(model))


def test_tied_embeddings_stay_tied_and_out_of_the_file(tmp_path):
    base, run = text_case("gpt2")
    assert base.lm_head.weight is base.transformer.wte.weight
    x, before = inputs(base), base.lm_head.weight.detach().clone()
    model = wrapped(base)
    model(**x, labels=x["input_ids"]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert base.lm_head.weight is base.transformer.wte.weight
    assert torch.equal(base.lm_head.weight, before)
    model.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 6 and all(".preproj." in key for key in saved)


def test_config_has_the_fields_and_defaults_of_the_methods_own_and_survives_json(tmp_path):
    own = {field.name: field.default for field in dataclasses.fields(PreProjConfig)}
    found = {field.name: field.default for field in dataclasses.fields(PreProjPeftConfig)}
    assert own.items() <= found.items()
    settings = {"expansion": 0.5, "layers": (0, -1), "skip_rank": 2, "init_std": 0.01}
    config = PreProjPeftConfig(**settings, task_type="CAUSAL_LM", modules_to_save="lm_head")
    config.save_pretrained(tmp_path)
    again = peft.PeftConfig.from_pretrained(tmp_path)
    assert again == config and again.preproj_config() == PreProjConfig(**settings)
    assert again.modules_to_save == ["lm_head"]
