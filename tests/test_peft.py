"""The method in PEFT: what it computes, adapters switched and taken away, what is refused."""

import copy
import subprocess
import sys

import pytest

peft = pytest.importorskip("peft")

import torch  # noqa: E402
from peft.functional import set_adapter  # noqa: E402
from peft_models import attached, facts, perturb, text_case, timm_case, wrapped  # noqa: E402
from transformers_models import inputs, outputs, tiny  # noqa: E402

import mmpreproj  # noqa: E402
from mmpreproj import PreProjPeftConfig, attach  # noqa: E402
from mmpreproj.peft_method import PreProjLayer  # noqa: E402

CASES = ["llama", "gpt_neox", "gemma2", "granite", "mixtral", "bert", "t5", "dinov2", "timm_rope"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_starts_as_the_base_runs_the_same_as_attach_and_unloads_to_the_base(name):
    base, run = timm_case() if name == "timm_rope" else text_case(name)
    next(base.parameters()).requires_grad_(False)
    expected, untouched, pristine = run(base), facts(base), copy.deepcopy(base)

    model = wrapped(base, expansion=1.5)
    assert torch.equal(run(model), expected)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == {n for n, _ in model.named_parameters() if ".preproj." in n}

    parameters = perturb(model)
    assert not torch.allclose(run(model), expected)
    assert torch.equal(run(model), run(attached(pristine, parameters, expansion=1.5)))
    with model.disable_adapter():
        assert torch.equal(run(model), expected)
    with pytest.raises(ValueError, match="nonlinear and cannot be merged"):
        model.merge_and_unload()
    with pytest.raises(ValueError, match="nonlinear and cannot be merged"):
        model.merge_adapter()

    unloaded = model.unload()
    assert unloaded is base
    assert torch.equal(run(base), expected)
    assert facts(base) == untouched
    assert not hasattr(base, "peft_config")
    assert torch.equal(run(wrapped(base)), expected)  # and it can be had again


def test_every_tensor_moves_within_two_steps_and_no_other():
    model = wrapped(tiny("gemma2"), skip_rank=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = inputs(model.get_base_model())
    for _ in range(2):
        optimizer.zero_grad()
        model(**x, labels=x["input_ids"]).loss.backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".preproj." in name}


def test_adapters_of_other_sizes_and_parts_are_added_switched_and_deleted():
    """Gemma 2's skip joins behind a norm: the first adapter has none, the second one does."""
    base, run = text_case("gemma2")
    settings = {
        "default": {"content_skip": False, "layers": [1]},
        "wide": {"expansion": 2.0, "skip_rank": 3},
    }
    expected, pristine = run(base), copy.deepcopy(base)
    model = wrapped(base, **settings["default"])
    model.add_adapter("wide", PreProjPeftConfig(**settings["wide"]))
    assert torch.equal(run(model), expected)
    results = {
        name: run(attached(pristine, perturb(model, name), **config))
        for name, config in settings.items()
    }
    for name in ("default", "wide", "default"):
        model.set_adapter(name)
        assert torch.equal(run(model), results[name])
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained == {n for n, _ in model.named_parameters() if f".by_name.{name}." in n}
    with pytest.raises(ValueError, match="one adapter can be active at a time"):
        model.base_model.set_adapter(["default", "wide"])
    with pytest.raises(ValueError, match="every sample of a batch runs the active adapter"):
        model(**inputs(base), adapter_names=["default", "wide"])

    with pytest.warns(UserWarning, match="Setting active adapter to wide"):
        model.delete_adapter("default")
    assert torch.equal(run(model), results["wide"])
    assert not [key for key in model.state_dict() if ".default." in key]
    assert torch.equal(run(model.unload()), expected)


def test_generation_with_a_cache_equals_without():
    model = wrapped(tiny("gemma2"), task_type="CAUSAL_LM")
    perturb(model)
    prompt = {"input_ids": torch.randint(3, 99, (2, 5)), "attention_mask": torch.ones(2, 5)}
    kinds = [
        model.generate(**prompt, max_new_tokens=6, do_sample=False, use_cache=cache)
        for cache in (True, False)
    ]
    assert torch.equal(*kinds)


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second")
def test_a_second_get_peft_model_is_refused_and_changes_nothing():
    base, run = text_case("llama")
    model = wrapped(base)
    perturb(model)
    before, expected = facts(base), run(model)
    for again in (model, base):
        with pytest.raises(ValueError, match="carries the method already.*add_adapter"):
            wrapped(again, "second")
    with pytest.raises(ValueError, match="attached already"):
        attach(base)
    assert facts(base) == before and torch.equal(run(model), expected)


REFUSED = {
    "attached": (lambda: attach(tiny("llama")), {}, "call mmpreproj.detach"),
    "unknown": (
        lambda: torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        ),
        *({}, "no transformer block that is known here.*Give the paths"),
    ),
    "layer": (lambda: tiny("llama"), {"layers": [5]}, "there is no block 5"),
    "rank": (lambda: tiny("llama"), {"skip_rank": 99}, "above the width 32"),
    "adapter_name": (lambda: tiny("llama"), {"name": "self_attn"}, "is a module's name too"),
    "no module": (lambda: tiny("llama"), {"modules_to_save": ["heed"]}, "'heed' matches no module"),
    "saved": (lambda: tiny("llama"), {"modules_to_save": ["layers.1"]}, "the self-attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_the_model_is_touched(case):
    make, config, told = REFUSED[case]
    base = make()
    before = facts(base)
    with pytest.raises(ValueError, match=told):
        wrapped(base, **config)
    assert facts(base) == before and not hasattr(base, "peft_config")


def test_paths_by_hand_do_what_the_table_does():
    base, run = text_case("llama")
    by_hand = wrapped(copy.deepcopy(base), attention="model.layers.*.self_attn", layers=[0])
    assert torch.equal(run(by_hand), run(base))
    parameters = perturb(by_hand)
    assert torch.equal(run(by_hand), run(attached(base, parameters, layers=[0])))


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"target_modules": ["q_proj"]}, "finds the self-attentions by itself"),
        ({"pre_projection": False, "content_skip": False}, "nothing to add"),
        ({"expansion": 0}, "expansion must be a number above 0"),
        ({"join": "a.*.b"}, "goes with attention"),
    ],
)
def test_config_refuses(field, told):
    with pytest.raises(ValueError, match=told):
        PreProjPeftConfig(**field)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_adapters_are_injected_without_a_peft_model_too():
    base, run = text_case("llama")
    fresh, expected = copy.deepcopy(base), run(base)
    configs = {"one": PreProjPeftConfig(), "two": PreProjPeftConfig(expansion=0.5)}
    for name, config in configs.items():
        peft.inject_adapter_in_model(config, base, name)
        perturb(base, name)
    results = {}
    for name, config in configs.items():
        set_adapter(base, name)
        results[name] = run(base)
        tensors = peft.get_peft_model_state_dict(base, adapter_name=name)
        peft.inject_adapter_in_model(config, fresh, name, state_dict=tensors)
        peft.set_peft_model_state_dict(fresh, tensors, name)
        set_adapter(fresh, name)
        assert torch.equal(run(fresh), results[name])
    assert not torch.allclose(results["one"], results["two"])
    with pytest.raises(ValueError, match="carries the method already"):
        peft.inject_adapter_in_model(PreProjPeftConfig(), base, "two")
    for module in base.modules():
        if isinstance(module, PreProjLayer):
            module.enable_adapters(False)
    assert torch.equal(run(base), expected)


@pytest.mark.slow
def test_copies_are_independent_and_compiled_models_agree():
    base, run = text_case("gemma2")
    model = wrapped(base)
    perturb(model)
    expected, twin = run(model), copy.deepcopy(model)
    assert torch.equal(run(twin), expected)
    perturb(twin)
    assert not torch.allclose(run(twin), expected) and torch.equal(run(model), expected)
    x = {**inputs(base), "use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(outputs(compiled, x), outputs(model, x))


@pytest.mark.slow
def test_peft_is_imported_on_demand_and_asked_for_by_name():
    program = (
        "import sys, mmpreproj\n"
        "assert not {'peft', 'transformers'} & set(sys.modules)\n"
        "sys.modules['peft'] = None\n"
        "mmpreproj.PreProjPeftConfig"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip().endswith("needs Hugging Face PEFT: pip install peft")
    with pytest.raises(AttributeError, match="no attribute 'PreProjConfigs'"):
        mmpreproj.PreProjConfigs  # noqa: B018
