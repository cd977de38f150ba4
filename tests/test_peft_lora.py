"""The method and LoRA: on one model in either order, and on equal bases."""

import copy

import pytest

peft = pytest.importorskip("peft")

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from peft_models import facts, perturb, text_case, wrapped  # noqa: E402
from transformers_models import tiny  # noqa: E402

from mmpreproj import PreProjPeftConfig  # noqa: E402

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
# PEFT says so of each LoRA that meets another method; it is what these tests are about
SECOND_METHOD = pytest.mark.filterwarnings(
    "ignore:You are trying to modify a model with PEFT for a second time",
    "ignore:Already found a `peft_config` attribute",
)


@pytest.mark.slow
@SECOND_METHOD
@pytest.mark.parametrize("nested", [True, False])
def test_after_lora_both_act_and_are_saved_and_each_is_taken_away(nested, tmp_path):
    base, run = text_case("llama")
    fresh, expected, untouched = copy.deepcopy(base), run(base), facts(base)
    lora = peft.get_peft_model(base, peft.LoraConfig(**LORA))
    alone, before = run(lora), facts(base)
    with pytest.raises(ValueError, match="adapter 'default' of LORA already"):
        wrapped(lora)
    assert facts(base) == before

    both = wrapped(lora if nested else base, "second")
    assert torch.equal(run(both), alone)
    trainable = [n for n, p in both.named_parameters() if p.requires_grad]
    assert all("lora_" in n or ".preproj." in n for n in trainable)
    perturb(both, "second")
    together = run(both)
    assert not torch.allclose(together, alone)
    with both.disable_adapter():
        assert torch.equal(run(both), expected)

    both.save_pretrained(tmp_path)
    for folder, part in ((tmp_path, "lora_"), (tmp_path / "second", ".preproj.")):
        saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        assert saved and all(part in key for key in saved)
    with pytest.warns(UserWarning, match=r"load_adapter\('second'\) is needed, too"):
        first = peft.PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path)
    assert torch.equal(run(first), alone)
    with pytest.warns(UserWarning, match=r"had \['default'\] beside it, of another method"):
        peft.PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path / "second")
    second = peft.PeftModel.from_pretrained(first, tmp_path / "second", adapter_name="second")
    assert torch.equal(run(second), together)

    both.unload()
    assert torch.equal(run(lora), alone) and facts(base) == before
    assert list(lora.peft_config) == ["default"]
    lora.unload()
    assert facts(base)[1:] == untouched[1:]
    assert torch.equal(run(base), expected)


@SECOND_METHOD
def test_a_head_that_lora_trains_goes_on_while_the_method_comes_and_goes():
    base, run = text_case("llama")
    lora = peft.get_peft_model(base, peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    with torch.no_grad():
        base.lm_head.modules_to_save["default"].weight.normal_()
    alone = run(lora)
    with pytest.raises(ValueError, match="'lm_head' is trained by .'default'. already"):
        wrapped(lora, "second", modules_to_save=["lm_head"])
    both = wrapped(lora, "second")
    assert torch.equal(run(both), alone)
    both.unload()
    assert torch.equal(run(lora), alone)


@SECOND_METHOD
def test_before_lora_needs_another_name_and_no_saved_modules():
    base, run = text_case("llama")
    model = wrapped(base)
    perturb(model)
    alone = run(model)
    with pytest.raises(ValueError, match="adapter 'default' of PREPROJ already"):
        peft.get_peft_model(model, peft.LoraConfig(**LORA))
    assert torch.equal(run(model), alone)
    everywhere = {**LORA, "target_modules": "all-linear"}
    lora = peft.get_peft_model(base, peft.LoraConfig(**everywhere), adapter_name="second")
    assert not torch.allclose(run(lora), alone)
    assert not [key for key in model.state_dict() if ".preproj." in key and "lora_" in key]
    assert set(lora.peft_config) == {"default", "second"}
    assert torch.equal(run(lora.unload()), alone)

    head = wrapped(tiny("llama"), modules_to_save="lm_head")
    with pytest.raises(ValueError, match="give the model LORA first"):
        peft.get_peft_model(head, peft.LoraConfig(**LORA), adapter_name="second")


def test_lora_and_the_method_on_equal_bases_do_not_meet():
    base, run = text_case("llama")
    lora = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**LORA))
    model = wrapped(copy.deepcopy(base))
    perturb(model)
    with lora.disable_adapter(), model.disable_adapter():
        assert torch.equal(run(lora), run(model)) and torch.equal(run(lora), run(base))
    assert not torch.allclose(run(lora), run(model))
    with pytest.raises(ValueError, match="different peft types"):
        lora.add_adapter("second", PreProjPeftConfig())
    with pytest.raises(ValueError, match="'PREPROJ' is not compatible with the `PeftMixedModel`"):
        peft.get_peft_model(base, PreProjPeftConfig(), mixed=True)
