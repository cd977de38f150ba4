"""LoRA on a model that `attach` gave the method: both train, one folder holds both."""

import copy
import json

import pytest

peft = pytest.importorskip("peft")

import torch  # noqa: E402
from helpers import perturb as perturb_new  # noqa: E402
from peft_models import text_case, timm_case  # noqa: E402

import mmpreproj  # noqa: E402
from mmpreproj import attach, freeze_base, from_pretrained, load, preproj_modules, save  # noqa: E402

BESIDE = pytest.mark.filterwarnings("ignore:the model carries mmpreproj's method as well")


def lora(targets="all-linear", **config):
    return peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **config)


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]])
@pytest.mark.parametrize("frozen", [True, False])
def test_lora_leaves_the_methods_layers_alone_and_says_so_and_they_train_on(targets, frozen):
    base, run = text_case("llama")
    attach(base)
    if frozen:
        freeze_base(base, also=["lm_head"])
    with pytest.warns(UserWarning, match="mmpreproj's method as well: its layers get no adapter"):
        model = peft.get_peft_model(base, lora(targets))
    layers = [name for name, _ in model.named_modules() if name.endswith("lora_A")]
    assert layers and not [name for name in layers if ".preproj." in name]
    assert all(type(m.up) is torch.nn.Linear for m in preproj_modules(model).values())
    names = trained(model)
    assert {name for name in names if ".lora_" not in name} == {
        name
        for name, _ in model.named_parameters()
        if ".preproj." in name or (frozen and "lm_head" in name)
    }
    assert any(".lora_" in name for name in names)
    run(model)


@BESIDE
@pytest.mark.parametrize("injected", [True, False])
def test_both_are_saved_as_one_folder_and_loaded_again(injected, tmp_path):
    base, run = text_case("gemma2")
    fresh = copy.deepcopy(base)
    freeze_base(attach(base))
    if injected:
        model = peft.inject_adapter_in_model(lora(), base)
    else:
        model = peft.get_peft_model(base, lora())
    perturb_new(model)
    expected = run(model)
    save(model, tmp_path)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 2
    again = load(copy.deepcopy(fresh), tmp_path, is_trainable=True)
    assert torch.equal(run(again), expected)
    names = {name.removeprefix("base_model.model.") for name in trained(model)}
    assert trained(again) == names and any("lora_" in n for n in names)
    save(again, tmp_path / "again")
    assert torch.equal(run(load(copy.deepcopy(fresh), tmp_path / "again")), expected)
    with pytest.raises(ValueError, match="Can't find 'adapter_config.json'"):
        peft.PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path)  # LoRA alone is no silence
    assert torch.equal(run(load(model, tmp_path)), expected)  # filled in where both are there


@BESIDE
def test_the_whole_model_with_both_comes_back(tmp_path):
    base, run = text_case("llama")
    model = peft.inject_adapter_in_model(lora(), attach(base))
    perturb_new(model)
    with pytest.warns(UserWarning, match="load it with mmpreproj.from_pretrained"):
        model.save_pretrained(tmp_path)
    assert torch.equal(run(from_pretrained(tmp_path)), run(model))


@BESIDE
def test_lora_first_and_then_attach_is_the_same(tmp_path):
    base, run = text_case("llama")
    fresh = copy.deepcopy(base)
    model = peft.get_peft_model(base, lora())
    assert attach(model) is model
    perturb_new(model)
    save(model, tmp_path)
    assert torch.equal(run(load(copy.deepcopy(fresh), tmp_path)), run(model))
    mmpreproj.detach(model)
    assert not preproj_modules(model) and any("lora_" in name for name in trained(model))


@BESIDE
def test_lora_on_half_precision_keeps_its_own_dtype(tmp_path):
    base, _ = text_case("llama")
    base.to(torch.bfloat16)
    fresh = copy.deepcopy(base)
    model = peft.get_peft_model(attach(base), lora())
    perturb_new(model)
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        expected = model(ids).logits
        again = load(fresh, save(model, tmp_path))
        assert torch.equal(again(ids).logits, expected)


@BESIDE
def test_timm_models_take_lora_beside_it_too(tmp_path):
    base, run = timm_case()
    fresh = copy.deepcopy(base)
    model = peft.get_peft_model(attach(base), lora(["qkv", "fc1"]))
    assert any(".preproj." in name for name in trained(model))
    perturb_new(model)
    assert torch.equal(run(load(fresh, save(model, tmp_path))), run(model))


@BESIDE
def test_another_base_or_a_broken_part_changes_nothing(tmp_path):
    base, run = text_case("llama")
    fresh = copy.deepcopy(base)
    save(peft.get_peft_model(attach(base), lora()), tmp_path)
    before, facts = run(fresh), list(fresh.state_dict())
    file = tmp_path / "peft" / "adapter_config.json"
    described = json.loads(file.read_text())
    for change, told in (
        ({"r": 3}, "does not fit this model"),
        ({"megatron_config": {"a": 1}}, "names a module to import"),
    ):
        file.write_text(json.dumps(described | change))
        with pytest.raises(ValueError, match=told):
            load(fresh, tmp_path)
        assert torch.equal(run(fresh), before) and list(fresh.state_dict()) == facts
