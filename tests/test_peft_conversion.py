"""Our folders and PEFT's read each other; what PEFT knows of the base; the cards of both."""

import copy
import json

import pytest

peft = pytest.importorskip("peft")

import torch  # noqa: E402
from helpers import perturb as perturb_new  # noqa: E402
from peft_models import perturb, text_case, timm_case, wrapped  # noqa: E402
from transformers_models import inputs, outputs, tiny  # noqa: E402

from mmpreproj import PreProjConfig, attach, freeze_base, load, save  # noqa: E402


@pytest.mark.parametrize("case", ["llama", "gemma2", "timm"])
def test_pefts_folder_loads_and_goes_back_bit_for_bit(case, tmp_path):
    base, run = timm_case() if case == "timm" else text_case(case)
    fresh = copy.deepcopy(base)
    heads = ["head"] if case == "timm" else None
    model = wrapped(base, skip_rank=4, layers=[-1], modules_to_save=heads)
    perturb(model)
    model.save_pretrained(tmp_path / "theirs")
    expected = run(model)
    ours = load(copy.deepcopy(fresh), tmp_path / "theirs")
    assert torch.equal(run(ours), expected)
    filled = attach(copy.deepcopy(fresh), PreProjConfig(skip_rank=4, layers=[-1]))
    assert torch.equal(run(load(filled, tmp_path / "theirs")), expected)
    save(ours, tmp_path / "ours")
    assert torch.equal(run(load(copy.deepcopy(fresh), tmp_path / "ours")), expected)
    save(ours, tmp_path / "back", format="peft")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path / "back")
    assert torch.equal(run(again), expected)


def test_what_attach_trained_goes_to_peft_bit_for_bit(tmp_path):
    base, run = text_case("llama")
    model = freeze_base(attach(copy.deepcopy(base), PreProjConfig(layers=[0])), also=["lm_head"])
    perturb_new(model)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    save(model, tmp_path, format="peft")
    assert not list(tmp_path.glob("preproj.*"))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert isinstance(theirs, peft.PeftModelForCausalLM)
    assert torch.equal(run(theirs), run(model))
    assert torch.equal(run(load(copy.deepcopy(base), tmp_path)), run(model))


def test_adapters_in_float32_on_a_bfloat16_base_convert_too(tmp_path):
    base = tiny("llama", torch.bfloat16)
    x, fresh = inputs(base), copy.deepcopy(base)
    model = wrapped(base)
    perturb(model)
    model.save_pretrained(tmp_path / "theirs")
    ours = load(copy.deepcopy(fresh), tmp_path / "theirs")
    assert ours.model.layers[0].self_attn.preproj.up.weight.dtype == torch.float32
    assert torch.equal(outputs(ours, x), outputs(model, x))
    save(ours, tmp_path / "back", format="peft")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path / "back")
    assert torch.equal(outputs(again, x), outputs(model, x))


def test_peft_refuses_another_base_unless_told(tmp_path):
    base, _ = text_case("llama")
    fresh = copy.deepcopy(base)
    wrapped(base).save_pretrained(tmp_path)
    with torch.no_grad():
        fresh.model.layers[0].mlp.up_proj.weight.add_(0.1)
    before = list(fresh.state_dict())
    with pytest.raises(ValueError, match="with other weights than this model .*base = None"):
        peft.PeftModel.from_pretrained(fresh, tmp_path)
    assert list(fresh.state_dict()) == before
    config = peft.PeftConfig.from_pretrained(tmp_path)
    config.base = None
    peft.PeftModel.from_pretrained(fresh, tmp_path, config=config)


def test_folders_of_before_say_nothing_of_their_base_and_load_says_so(tmp_path, caplog):
    base, run = text_case("llama")
    fresh = copy.deepcopy(base)
    model = wrapped(base)
    perturb(model)
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    described = json.loads(file.read_text())
    del described["base"]
    file.write_text(json.dumps(described))
    with caplog.at_level("WARNING", "mmpreproj"):
        assert torch.equal(run(load(copy.deepcopy(fresh), tmp_path)), run(model))
    assert "does not say what its base was" in caplog.text
    again = peft.PeftModel.from_pretrained(copy.deepcopy(fresh), tmp_path)
    assert torch.equal(run(again), run(model))


def test_errors_know_the_other_format_and_name_the_call(tmp_path):
    base, _ = text_case("llama")
    fresh = copy.deepcopy(base)
    with pytest.raises(ValueError, match="as one of PEFT's: save_pretrained of the PeftModel"):
        save(wrapped(base), tmp_path)
    with pytest.raises(ValueError, match="attached already.*the PeftModel's unload"):
        load(base, save(attach(copy.deepcopy(fresh)), tmp_path / "ours"))
    lora = peft.get_peft_model(copy.deepcopy(fresh), peft.LoraConfig(target_modules=["q_proj"]))
    lora.save_pretrained(tmp_path / "lora")
    with pytest.raises(ValueError, match="of PEFT's 'LORA'.*peft.PeftModel.from_pretrained"):
        load(fresh, tmp_path / "lora")
    with pytest.raises(FileNotFoundError, match="there is one in lora, ours"):
        load(fresh, tmp_path)
    with pytest.raises(ValueError, match="format must be one of mmpreproj, peft"):
        save(attach(fresh), tmp_path, format="onnx")


def test_cards_say_how_to_load_and_keep_what_their_owner_wrote(tmp_path):
    base, _ = text_case("llama")
    base.config.name_or_path = base.name_or_path = "me/base"
    model = wrapped(base)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    card = (tmp_path / "theirs" / "README.md").read_text()
    assert "from mmpreproj import PreProjPeftConfig" in card and "base_model: me/base" in card
    assert "KeyError: 'PREPROJ'" in card and "library_name: peft" in card

    ours = attach(model.unload())
    said = {"license": "mit", "data": "Brown", "figures": {"ppl": {"value": 32.123, "n": 1000}}}
    path = save(ours, tmp_path / "ours", card=said) / "README.md"
    card = path.read_text()
    for told in (
        "base_model: me/base",
        "license: mit",
        "| data | Brown |",
        "| ppl | 32.12 | 1,000 |",
    ):
        assert told in card
    assert "import mmpreproj\nmodel = mmpreproj.from_pretrained(FOLDER)" in card
    path.write_text(card.replace("license: mit", "license: gpl-3.0") + "\nMy own words.\n")
    save(ours, tmp_path / "ours")
    card = path.read_text()
    assert "My own words." in card and "license: gpl-3.0" in card and "not recorded" in card
    assert card.count("mmpreproj.from_pretrained(FOLDER)") == 1


def test_a_bfloat16_folder_is_half_as_large_and_nearly_the_same(tmp_path):
    base, run = text_case("llama")
    model = perturb_new(attach(copy.deepcopy(base)))
    sizes = {}
    for dtype in (None, "bfloat16"):
        folder = save(model, tmp_path / str(dtype), dtype=dtype)
        sizes[dtype] = (folder / "preproj.safetensors").stat().st_size
    assert sizes["bfloat16"] < 0.6 * sizes[None]
    again = load(copy.deepcopy(base), tmp_path / "bfloat16")
    assert again.model.layers[0].self_attn.preproj.up.weight.dtype == torch.float32
    # 8 bits of mantissa, through two layers
    torch.testing.assert_close(run(again), run(model), rtol=0.05, atol=0.05)
