"""The hidden states and the head of every decoder, against the model's own logits."""

import pytest

transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from helpers import perturb  # noqa: E402
from torch import nn  # noqa: E402
from transformers_models import DECODERS, TOKENS, VOCABULARY, inputs, tiny  # noqa: E402

from mmpreproj import attach  # noqa: E402
from mmpreproj.backbones.lm.lm_head import LMHead, hidden_states, lm_head_of  # noqa: E402

# By the papers and configurations: logits / 8, logits / 16, 30 · tanh(logits / 30)
SCALED = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.0625}, "gemma2": {}}
WITH_BIAS = {"phi", "gptj", "codegen"}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_head_of_hidden_states_gives_the_models_own_logits(name):
    model = tiny(name, torch.float64, **SCALED.get(name, {}))
    x = inputs(model)
    head = lm_head_of(model)
    for changed in (lambda: None, lambda: perturb(attach(model))):
        changed()
        expected = model(**x).logits
        # the same operations in the same order: a rounding of 1e-16 each
        found = head.logits(hidden_states(model, **x))
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
        last = lm_head_of(model).logits(hidden_states(model, **x)[:, -1])
        assert torch.allclose(last, expected[:, -1], rtol=1e-12, atol=1e-12)
    assert (head.bias is not None) == (name in WITH_BIAS)


def test_scale_and_soft_cap_are_read_off_the_configuration():
    found = {name: lm_head_of(tiny(name, **config)) for name, config in SCALED.items()}
    assert {name: (head.multiplier, head.soft_cap) for name, head in found.items()} == {
        "granite": (0.125, None),
        "cohere": (0.0625, None),
        "gemma2": (1.0, 30.0),
    }


def test_logits_are_the_formula():
    layer = nn.Linear(8, 50).double()
    hidden = torch.randn(3, 8, dtype=torch.float64)
    w, b = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    u = 0.5 * (hidden.numpy() @ w.T + b)
    capped = 2 * np.tanh(u / 2)
    assert np.allclose(LMHead(layer, 0.5).logits(hidden).detach(), u, rtol=1e-13)
    assert np.allclose(LMHead(layer, 0.5, 2.0).logits(hidden).detach(), capped, rtol=1e-13)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2", "granite", "cohere", "qwen3_moe"])
def test_half_precision_passes_the_check(name):
    lm_head_of(tiny(name, torch.bfloat16, **SCALED.get(name, {})))


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "opt", "bloom", "mpt", "falcon"])
def test_left_padding_changes_no_real_token(name):
    # float32: transformers' ALiBi models give NaN in float64 where a row is all padding
    model = tiny(name)
    ids = inputs(model, batch=1, tokens=3)["input_ids"]
    padded = torch.cat([torch.full((1, 6), 5), ids], dim=1)
    mask = torch.tensor([[0] * 6 + [1] * 3])
    alone = hidden_states(model, ids)
    assert torch.allclose(hidden_states(model, padded, mask)[:, 6:], alone, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_continue_from_the_cache(name):
    model = perturb(attach(tiny(name, torch.float64)))
    ids = inputs(model)["input_ids"]
    mask = torch.ones_like(ids)
    whole = hidden_states(model, ids)
    first, cache = hidden_states(model, ids[:, :3], mask[:, :3], use_cache=True)
    second, cache = hidden_states(model, ids[:, 3:], mask, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == TOKENS
    assert torch.allclose(torch.cat([first, second], dim=1), whole, atol=1e-10)


class Capped(transformers.LlamaForCausalLM):
    """Caps its logits at 20 without saying so in its configuration."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 20 * torch.tanh(out.logits / 20)
        return out


class Reweighted(transformers.LlamaForCausalLM):
    """Reads something else than what its base model returns."""

    def forward(self, *args, **kwargs):
        handle = self.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()


@pytest.mark.parametrize("cls, what", [(Capped, "logits"), (Reweighted, "hidden states|logits")])
def test_unknown_arithmetic_behind_the_hidden_states_is_refused_by_name(cls, what):
    # as it is initialised its logits are near 0.1, where a soft cap of 20 cannot be seen
    model = cls(transformers.LlamaConfig(**DECODERS["llama"].config[1])).eval()
    assert model(**inputs(model)).logits.abs().max() < 1
    with pytest.raises(ValueError, match=rf"{cls.__name__} .*model_type 'llama'.* its ({what})"):
        lm_head_of(model)


def test_the_check_leaves_the_model_and_the_random_numbers_as_they_were():
    model = tiny("gpt2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    lm_head_of(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.lm_head._forward_pre_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_check_runs_once_for_a_model():
    model = tiny("llama")
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    lm_head_of(model)
    lm_head_of(model)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["t5", "bart", "bert", "vit"])
def test_what_is_no_decoder_is_refused(name):
    model = tiny(name)
    with pytest.raises(ValueError, match=rf"{type(model).__name__} is not a decoder-only language"):
        lm_head_of(model)


@pytest.mark.slow
def test_heads_that_are_not_a_plain_matrix_are_refused():
    offloaded = tiny("llama", tie_word_embeddings=False)
    offloaded.lm_head.to("meta")
    with pytest.raises(ValueError, match="output layer of LlamaForCausalLM is offloaded"):
        lm_head_of(offloaded)
    packed = tiny("llama", tie_word_embeddings=False)
    packed.lm_head.weight = nn.Parameter(
        torch.zeros(VOCABULARY, 32, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"plain matrix, found Linear with weight torch\.int8"):
        lm_head_of(packed)
    compiled = torch.compile(tiny("llama"))
    with pytest.raises(ValueError, match="compiled"):
        lm_head_of(compiled)


@pytest.mark.slow
@torch.no_grad()
def test_under_peft_the_adapters_act_in_the_hidden_states():
    peft = pytest.importorskip("peft")
    model = tiny("gpt_neox")
    x = inputs(model)
    base = model(**x).logits
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_()
    head = lm_head_of(model)
    expected = model(**x).logits
    assert not torch.allclose(expected, base, atol=0.1)
    assert torch.allclose(head.logits(hidden_states(model, **x)), expected, atol=1e-5)
    with model.disable_adapter():
        assert torch.allclose(head.logits(hidden_states(model, **x)), base, atol=1e-5)


@torch.no_grad()
def test_a_head_that_trains_beside_an_adapter_is_the_one_in_use():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query_key_value"], modules_to_save=["lm_head"])
    model = tiny("gpt_neox")
    x = inputs(model)
    base = model(**x).logits
    model = peft.get_peft_model(model, config).eval()
    head = lm_head_of(model)
    head.weight.mul_(3)
    assert torch.allclose(model(**x).logits, 3 * base, atol=1e-4)
    assert torch.allclose(head.logits(hidden_states(model, **x)), 3 * base, atol=1e-4)
    with model.disable_adapter():
        assert torch.allclose(head.logits(hidden_states(model, **x)), base, atol=1e-5)


def test_adapters_that_do_not_fit_are_refused():
    peft = pytest.importorskip("peft")
    on_the_head = peft.LoraConfig(target_modules=["lm_head"])
    with pytest.raises(ValueError, match="carries an adapter of its own"):
        lm_head_of(peft.get_peft_model(tiny("gpt_neox"), on_the_head))
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="PROMPT_TUNING puts tokens of its own before the text"):
        lm_head_of(peft.get_peft_model(tiny("gpt_neox"), prompt))
