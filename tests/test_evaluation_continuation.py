"""Prompts continued: which tokens go in, and what the model is left as."""

import pytest

pytest.importorskip("transformers")

import torch  # noqa: E402
from evaluation_models import bigram_model, byte_tokenizer, random_model  # noqa: E402
from tokenizers import processors  # noqa: E402

from mmpreproj.evaluation.encoding import continue_text  # noqa: E402


def prompt_of(model, tokenizer, text, monkeypatch):
    """The ids that generate is given."""
    seen = []
    generate = model.generate

    def spy(**keywords):
        seen.append(keywords["input_ids"].tolist())
        return generate(**keywords)

    monkeypatch.setattr(model, "generate", spy)
    continue_text(model, tokenizer, text, 2)
    return seen[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_prompt_is_what_the_tokenizer_makes_of_it(adds_bos, monkeypatch):
    tokenizer = byte_tokenizer(merges=60, bos=True, adds_bos=adds_bos)
    text = "The old man"
    found = prompt_of(random_model("llama", tokenizer), tokenizer, text, monkeypatch)
    assert found == tokenizer(text)["input_ids"]
    assert (found[0] == tokenizer.bos_token_id) == adds_bos


def test_a_token_that_the_tokenizer_puts_behind_a_text_does_not_end_the_prompt(monkeypatch):
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)],
    )
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"]
    model = random_model("llama", tokenizer)
    assert prompt_of(model, tokenizer, "ab", monkeypatch) == [tokenizer.bos_token_id, a, b]


def test_a_greedy_continuation_follows_a_chain():
    tokenizer = byte_tokenizer(bos=True)
    table = torch.zeros(258, 258)
    ids = tokenizer("abcd")["input_ids"]
    for token, following in zip(ids, [*ids[1:], tokenizer.eos_token_id], strict=True):
        table[token, following] = 1.0
    model = bigram_model(table)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    assert continue_text(model, tokenizer, "xa", 2) == "xabc"
    assert continue_text(model, tokenizer, "a", 9) == "abcd"  # up to </s>


def test_every_module_keeps_its_mode():
    tokenizer = byte_tokenizer()
    model = random_model("gpt2", tokenizer, resid_pdrop=0.9)
    expected = continue_text(model, tokenizer, "The", 9)
    model.train()
    model.transformer.h[0].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    assert continue_text(model, tokenizer, "The", 9) == expected  # dropout is off
    assert [module.training for module in model.modules()] == modes


def test_what_cannot_be_continued_is_refused():
    tokenizer = byte_tokenizer()
    model = random_model("llama", tokenizer)
    with pytest.raises(ValueError, match="no tokens"):
        continue_text(model, tokenizer, "", 3)
    with pytest.raises(ValueError, match="3 tokens and 62 new ones do not fit the model's 64"):
        continue_text(model, tokenizer, "abc", 62)
    with pytest.raises(ValueError, match="not the model's tokenizer"):
        continue_text(random_model("llama", vocab_size=60), tokenizer, "zzz", 3)
