"""Cached, left-padded and beam generation, and what becomes of caches, tied weights and files."""

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from helpers import perturb  # noqa: E402
from transformers_models import (  # noqa: E402
    CASES,
    DECODERS,
    ENCODERS,
    VISION,
    VOCABULARY,
    inputs,
    outputs,
    tiny,
)

from mmpreproj import attach, detach, from_pretrained, load, preproj_modules, save  # noqa: E402

pytestmark = pytest.mark.slow

PLAIN = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
SOME = ["llama", "gpt_neox", "gpt2", "gemma2", "falcon", "bloom", "granite"]


def attached(name, **kwargs):
    return perturb(attach(tiny(name, **kwargs)))


def cache_in(found):
    """The cache as a keyword of the next call; transformers 5.24 renamed it."""
    name = "cache" if "cache" in found else "past_key_values"
    return {name: found[name]}


@pytest.mark.parametrize("name", DECODERS)
def test_cached_generation_equals_uncached_and_left_padded_equals_alone(name):
    model = attached(name)
    long, short = torch.randint(3, VOCABULARY, (1, 9)), torch.randint(3, VOCABULARY, (1, 3))
    scored = {**PLAIN, "output_scores": True, "return_dict_in_generate": True}
    alone = [model.generate(ids, **scored) for ids in (long, short)]
    for ids, found in zip((long, short), alone, strict=True):
        assert torch.equal(found.sequences, model.generate(ids, use_cache=False, **PLAIN))
    padded = torch.cat([long, torch.cat([torch.zeros_like(long[:, 3:]), short], dim=1)])
    mask = torch.ones_like(padded)
    mask[1, :6] = 0
    together = model.generate(padded, attention_mask=mask, **scored)
    for row, found in enumerate(alone):
        assert torch.equal(together.sequences[row, 9:], found.sequences[0, -8:])
        # float32 roundings of another order of sums, through two blocks
        assert torch.allclose(together.scores[0][row], found.scores[0][0], atol=1e-4)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders_generate_alike_with_and_without_cache(name):
    model = attached(name)
    ids = inputs(model)["input_ids"]
    cached = model.generate(ids, **PLAIN)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **PLAIN))
    detach(model)
    assert not torch.equal(cached, model.generate(ids, **PLAIN))


@pytest.mark.parametrize("name", SOME)
def test_beam_search_gives_the_same_with_and_without_cache(name):
    model = attached(name)
    ids = inputs(model)["input_ids"]
    cached = model.generate(ids, num_beams=3, **PLAIN)
    assert torch.equal(cached, model.generate(ids, num_beams=3, use_cache=False, **PLAIN))


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_the_cache_is_that_of_the_base_and_can_be_filled_in_pieces(name):
    model = tiny(name)
    ids = inputs(model)["input_ids"]

    def layout():
        (cache,) = cache_in(model(ids, use_cache=True)).values()
        tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        return [(t.shape, t.dtype, t.nbytes) for t in tensors]

    before = layout()
    perturb(attach(model))
    assert layout() == before and len(before) == 4

    whole = model(ids, use_cache=False).logits
    cache, pieces = {}, []
    for start, end in ((0, 1), (1, 5), (5, 7)):
        seen = torch.ones_like(ids[:, :end])
        found = model(ids[:, start:end], attention_mask=seen, use_cache=True, **cache)
        cache = cache_in(found)
        pieces.append(found.logits)
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=1e-4)


def test_the_cache_works_again_after_training_with_checkpointing():
    model = attached("llama")
    ids = inputs(model)["input_ids"]
    expected = model.generate(ids, **PLAIN)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, use_cache=False).logits.sum().backward()
    model.eval()
    assert torch.equal(model.generate(ids, **PLAIN), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_stay_as_they_were_through_attach_training_and_saving(tied, tmp_path):
    model = tiny("llama", tie_word_embeddings=tied)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    ids = inputs(model)["input_ids"]

    def is_tied(m):
        return m.lm_head.weight.data_ptr() == m.model.embed_tokens.weight.data_ptr()

    attach(model)
    assert is_tied(model) == tied
    new = [p for m in preproj_modules(model).values() for p in m.parameters()]
    optimizer = torch.optim.SGD(new, lr=1.0)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    expected = outputs(model, {"input_ids": ids})

    model.save_pretrained(tmp_path / "whole")
    folder = save(model, tmp_path / "new")
    base = detach(from_pretrained(tmp_path / "whole"))
    assert is_tied(base) == tied
    assert base.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in base.state_dict().items())
    assert torch.equal(outputs(load(base.eval(), folder), {"input_ids": ids}), expected)


@pytest.mark.parametrize(
    "name", ["gemma2", "gpt2", "gpt_neox", *ENCODERS, *(n for n in VISION if "without" not in n)]
)
def test_saved_models_restore_their_exact_base_and_folders_the_method(name, tmp_path):
    model = tiny(name)
    x = inputs(model)
    base_output = outputs(model, x)
    expected = outputs(perturb(attach(model)), x)
    model.save_pretrained(tmp_path / "whole")
    folder = save(model, tmp_path / "new")
    whole = from_pretrained(tmp_path / "whole")
    assert torch.equal(outputs(whole, x), expected)
    base = detach(whole)
    assert not preproj_modules(base)
    assert torch.equal(outputs(base.eval(), x), base_output)
    assert torch.equal(outputs(load(base, folder), x), expected)


def test_a_folder_of_another_architecture_or_depth_is_refused(tmp_path):
    folder = save(attached("llama"), tmp_path)
    for other, told in [
        (tiny("mistral"), "'LlamaForCausalLM', .*'MistralForCausalLM'"),
        (tiny("llama", num_hidden_layers=3), "'depth': 2.*'depth': 3"),
        (tiny("llama", hidden_size=48), "'width': 32.*'width': 48"),
    ]:
        with pytest.raises(ValueError, match=told):
            load(other, folder, allow_other_base=True)
        assert not preproj_modules(other)


def test_attaching_to_a_bfloat16_model_keeps_its_rotary_table_in_float32():
    name, keywords = CASES["llama"].config
    config = getattr(transformers, name)(**keywords, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    table = model.model.rotary_emb.inv_freq.clone()
    attach(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert table.dtype == torch.float32 and torch.equal(model.model.rotary_emb.inv_freq, table)
