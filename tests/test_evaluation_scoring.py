"""Log-likelihoods against the model's own logits, and what they must not depend on."""

import math

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from evaluation_models import (  # noqa: E402
    TEXT,
    bigram_model,
    by_hand,
    byte_tokenizer,
    position_model,
    questions,
    random_model,
)
from transformers_models import tiny  # noqa: E402

from mmpreproj.backbones.lm.lm_tokenizer import tokenizer_hash  # noqa: E402
from mmpreproj.evaluation import Scorer, perplexity, scoring  # noqa: E402
from mmpreproj.evaluation.encoding import Request, windows  # noqa: E402

WORDS = TEXT.split()


def mixed_pairs(n=20):
    """Contexts of 1 to n words, with continuations of 1 to 4 words, in an order of no kind."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for i in torch.randperm(n, generator=generator).tolist():
        pairs.append((" ".join(WORDS[: i + 1]), " " + " ".join(WORDS[i + 1 :][: 1 + i % 4])))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "gptj", "gemma2", "cohere", "granite"])
def test_scores_are_those_of_the_models_own_logits(name):
    tokenizer = byte_tokenizer(merges=60)
    model = random_model(
        name, tokenizer, **({"final_logit_softcapping": 2.0} if name == "gemma2" else {})
    )
    pairs = mixed_pairs() + questions()
    for found, pair in zip(Scorer(model, tokenizer).loglikelihood(pairs), pairs, strict=True):
        logprob, greedy, n = by_hand(model, tokenizer, *pair)
        assert found.logprob == pytest.approx(logprob, abs=1e-4)  # float32 sums of 20 numbers
        assert (found.greedy, found.n_tokens, found.n_cut) == (greedy, n, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_scores_depend_on_neither_batch_size_nor_order_nor_other_items(name):
    tokenizer = byte_tokenizer(merges=60)
    model = random_model(name, tokenizer)
    pairs = mixed_pairs() + questions()
    expected = [Scorer(model, tokenizer).loglikelihood([pair])[0].logprob for pair in pairs]
    for options in ({"batch_size": 1}, {"batch_size": 2}, {"batch_size": 7}, {"batch_tokens": 50}):
        found = Scorer(model, tokenizer, **options).loglikelihood(pairs)
        assert [s.logprob for s in found] == pytest.approx(expected, abs=1e-5)
        found = Scorer(model, tokenizer, **options).loglikelihood(pairs[::-1])
        assert [s.logprob for s in found[::-1]] == pytest.approx(expected, abs=1e-5)


def test_bfloat16_models_are_scored_in_float32():
    tokenizer = byte_tokenizer(merges=60)
    model = tiny("llama", vocab_size=50_000, hidden_size=16).to(torch.bfloat16)
    pairs = [pair for pair in mixed_pairs() if len(pair[0]) < 60]
    found = Scorer(model, tokenizer, batch_size=1, share_contexts=False).loglikelihood(pairs)
    for score, pair in zip(found, pairs, strict=True):
        # the model's bfloat16 logits, taken on in float64. They are of order 10: one rounding of a
        # bfloat16 log-probability would be 0.03
        assert score.logprob == pytest.approx(by_hand(model, tokenizer, *pair)[0], abs=0.02)


def test_logits_that_are_made_in_pieces_give_the_same_scores(monkeypatch):
    tokenizer = byte_tokenizer(merges=60)
    model = random_model("llama", tokenizer)
    scorer = Scorer(model, tokenizer)
    rows = []
    logits = type(scorer.head).logits
    monkeypatch.setattr(
        *(type(scorer.head), "logits"),
        lambda head, hidden: (rows.append(len(hidden)), logits(head, hidden))[1],
    )
    monkeypatch.setattr(scoring, "_LOGITS", 3 * len(tokenizer))
    pairs = mixed_pairs() + questions()
    for found, pair in zip(scorer.loglikelihood(pairs), pairs, strict=True):
        logprob, greedy, n = by_hand(model, tokenizer, *pair)
        assert found.logprob == pytest.approx(logprob, abs=1e-4)
        assert (found.greedy, found.n_tokens) == (greedy, n)
    assert max(rows) == 3 and len(rows) > len(pairs)


@torch.no_grad()
def test_a_log_likelihood_that_is_no_number_names_its_request():
    tokenizer = byte_tokenizer()
    model = random_model("gptj", tokenizer)
    scorer = Scorer(model, tokenizer)
    pairs = [("The old", " man"), ("The q", " man"), ("The", " old man")]
    model.lm_head.bias[
        tokenizer(" ")["input_ids"]
    ] = -math.inf  # what has no probability is not an error
    assert [score.logprob for score in scorer.loglikelihood(pairs)] == [-math.inf] * 3
    model.get_input_embeddings().weight[tokenizer("q")["input_ids"]] = math.nan
    assert scorer.loglikelihood(pairs[::2])
    with pytest.raises(ValueError, match="request 1: .*' man' is NaN.*logits are not finite"):
        scorer.loglikelihood(pairs)


@torch.no_grad()
def test_a_model_of_weights_that_are_no_numbers_is_told_as_that():
    model = random_model("llama")
    model.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="hidden states of LlamaForCausalLM are not finite"):
        Scorer(model, byte_tokenizer())


def test_a_scorer_describes_what_it_computes_in():
    tokenizer = byte_tokenizer()
    scorer = Scorer(random_model("llama", tokenizer), tokenizer)
    facts = scorer.describe()
    assert (facts["dtype"], facts["autocast"]) == ("float32", None)
    assert facts["tokenizer"]["hash"] == tokenizer_hash(tokenizer)
    with torch.autocast("cpu", torch.bfloat16):
        facts = scorer.describe()
    assert (facts["dtype"], facts["autocast"]) == ("float32", "bfloat16")


def test_a_peft_model_scores_as_the_model_it_was_merged_into():
    peft = pytest.importorskip("peft")
    tokenizer = byte_tokenizer(merges=60)
    model = tiny("llama", vocab_size=len(tokenizer))
    plain = [s.logprob for s in Scorer(model, tokenizer).loglikelihood(questions())]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    scorer = Scorer(model, tokenizer)
    found = [s.logprob for s in scorer.loglikelihood(questions())]
    with model.disable_adapter():
        assert [s.logprob for s in scorer.loglikelihood(questions())] == pytest.approx(plain)
    merged = Scorer(model.merge_and_unload(), tokenizer).loglikelihood(questions())
    assert found == pytest.approx([s.logprob for s in merged], abs=1e-4)
    assert found != pytest.approx(plain, abs=0.1)


def test_scoring_leaves_every_module_in_its_mode():
    tokenizer = byte_tokenizer(merges=60)
    model = random_model("gpt2", tokenizer, resid_pdrop=0.5)
    expected = Scorer(model, tokenizer).loglikelihood(questions())
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    assert Scorer(model, tokenizer).loglikelihood(questions()) == expected  # dropout is off
    assert [module.training for module in model.modules()] == modes


def test_white_space_at_the_end_of_a_context_moves_to_the_continuation():
    tokenizer = byte_tokenizer(merges=60)
    scorer = Scorer(random_model(tokenizer=tokenizer), tokenizer)
    moved, plain = scorer.loglikelihood([("The old man ", "held"), ("The old man", " held")])
    assert moved == plain


def test_a_token_across_the_join_leaves_the_continuations_own_tokens():
    tokenizer = byte_tokenizer(merges=60)
    whole, before, behind = (tokenizer(t)["input_ids"] for t in ("a small", "a sm", "all"))
    assert len(whole) < len(before)  # " small" is one token, " sm" is two
    scorer = Scorer(random_model(tokenizer=tokenizer), tokenizer)
    (request,) = scorer.encoder.pairs([("a sm", "all")])
    assert (request.ids, request.n_scored) == (before + behind, len(behind))
    assert scorer.loglikelihood([("a sm", "all")])[0].n_tokens == len(behind)


def test_an_empty_context_is_bos_else_eos_else_the_first_token():
    model = random_model()
    for keywords, first in (
        ({"bos": True}, ["<s>"]),
        ({"eos_token": "</s>"}, ["</s>"]),
        ({}, []),
    ):
        tokenizer = byte_tokenizer(merges=60, **keywords)
        encoder = Scorer(model, tokenizer).encoder
        ids = tokenizer("stone", add_special_tokens=False)["input_ids"]
        (request,) = encoder.pairs([("", "stone")])
        assert request.ids == tokenizer.convert_tokens_to_ids(first) + ids
        assert request.n_scored == len(ids) - (not first)
        (blank,) = encoder.pairs([("  ", "stone")])
        assert blank.ids[len(first) :] == tokenizer("  stone")["input_ids"]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_follows_the_tokenizer_unless_it_is_set(adds_bos):
    tokenizer = byte_tokenizer(merges=60, bos=True, adds_bos=adds_bos)
    model = random_model()
    bos = [tokenizer.bos_token_id]
    for add_bos, prefix in ((None, bos * adds_bos), (True, bos), (False, [])):
        scorer = Scorer(model, tokenizer, add_bos=add_bos)
        (request,) = scorer.encoder.pairs([("The old", " man")])
        assert (
            request.ids == prefix + tokenizer("The old man", add_special_tokens=False)["input_ids"]
        )
        assert scorer.describe()["prefix"] == ["<s>"] * len(prefix)
        # one that is in the text already is not doubled
        (request,) = scorer.encoder.pairs([("<s>The old", " man")])
        assert request.ids[:2] == bos + tokenizer("The", add_special_tokens=False)["input_ids"][:1]
    with pytest.raises(ValueError, match="no BOS token"):
        Scorer(model, byte_tokenizer(), add_bos=True)


def test_a_context_that_is_too_long_loses_its_left_and_the_score_says_how_much(caplog):
    tokenizer = byte_tokenizer()  # a token a byte
    model = random_model("llama", tokenizer)
    scorer = Scorer(model, tokenizer, max_length=20)
    long, short = scorer.loglikelihood(
        [("x" * 30 + "The old man", " held"), ("The old man", " held")]
    )
    assert "1 of 2 contexts" in caplog.text
    # 20 are read: 30 + 11 + 5 - 1, so 25 are cut
    assert (long.n_cut, short.n_cut) == (25, 0)
    expected = by_hand(model, tokenizer, "x" * 5 + "The old man", " held")[0]
    assert long.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        (("The", ""), "pair 1: .*no tokens"),
        (("", ""), "pair 1: .*no tokens"),
        (("The", "x" * 21), "pair 1: .*21 tokens, more than the 20"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_is(pair, told):
    tokenizer = byte_tokenizer(bos=True)
    model = random_model("llama", tokenizer)
    scorer = Scorer(model, tokenizer, max_length=20)
    model.forward = None  # would fail if it ran
    with pytest.raises(ValueError, match=told):
        scorer.loglikelihood([("The", " old"), pair])


def test_a_tokenizer_smaller_than_the_embedding_without_padding_token_works():
    tokenizer = byte_tokenizer(merges=10)
    assert tokenizer.pad_token is None
    model = random_model("llama", vocab_size=len(tokenizer) + 6, max_position_embeddings=200)
    pairs = mixed_pairs()
    found = Scorer(model, tokenizer).loglikelihood(pairs)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) + 6
    for score, pair in zip(found, pairs, strict=True):
        assert score.logprob == pytest.approx(by_hand(model, tokenizer, *pair)[0], abs=1e-4)


def test_ids_beyond_the_embedding_are_refused_with_both_numbers():
    tokenizer = byte_tokenizer(merges=60)
    model = random_model("llama", vocab_size=256)
    with pytest.raises(ValueError, match=r"id \d+, but the model has 256 embeddings"):
        Scorer(model, tokenizer).loglikelihood([("The old", " man")])
    # ids from 0 to 315: the last one is in, the next one out
    last = tokenizer.convert_ids_to_tokens(315)
    assert last not in tokenizer.all_special_tokens and len(tokenizer) == 318
    text = tokenizer.convert_tokens_to_string([last])
    assert tokenizer(text)["input_ids"] == [315]
    fits = Scorer(random_model("llama", vocab_size=316), tokenizer).encoder
    assert fits.encode([text]) == [[315]]
    beyond = Scorer(random_model("llama", vocab_size=315), tokenizer).encoder
    with pytest.raises(ValueError, match="id 315, but the model has 315 embeddings"):
        beyond.encode([text])


@pytest.mark.parametrize("options", [{"batch_tokens": 0}, {"batch_size": 0}, {"max_length": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="at least 1"):
        Scorer(random_model(), byte_tokenizer(), **options)


@pytest.mark.parametrize(
    ("n", "window", "stride"), [(25, 10, 5), (25, 10, 10), (7, 10, 3), (26, 5, 1)]
)
def test_windows_score_every_token_but_the_first_once(n, window, stride):
    seen = []
    for start, end, scored in windows(n, window, stride):
        assert end - start - 1 <= window
        # as much before the first scored token as the stride promises, or all there is
        assert end - scored - start >= min(window - stride + 1, end - scored)
        seen.extend(range(end - scored, end))
    assert seen == list(range(1, n))


def test_windows_are_as_few_as_can_be():
    # ten are read at once: 1-10 are scored, then five more each time, the last four behind six
    assert list(windows(25, 10, 5)) == [(0, 11, 10), (5, 16, 5), (10, 21, 5), (14, 25, 4)]


def test_windows_refuse_a_stride_that_would_skip_tokens():
    for stride in (0, 11):
        with pytest.raises(ValueError, match="from 1 to the window"):
            list(windows(25, 10, stride))


def test_a_text_in_windows_sums_what_each_window_sees():
    vocabulary = 258
    table = torch.randn(10, vocabulary)
    tokenizer = byte_tokenizer()
    scorer = Scorer(position_model(table, vocabulary), tokenizer)
    assert scorer.max_length == 10
    text = "a text of 25 bytes, by hand"[:25]
    ids = tokenizer(text)["input_ids"]
    logprobs = table.double().log_softmax(-1)
    # Reads 0-9, scores 1-10; then reads 5-14, scores the last five (at positions 5-9); and so on
    expected = sum(logprobs[position, ids[position + 1]] for position in range(10))
    for first in (5, 10):
        expected += sum(logprobs[position, ids[first + position + 1]] for position in range(5, 10))
    # four are left: the window still reads ten
    expected += sum(logprobs[position, ids[14 + position + 1]] for position in range(6, 10))
    found = perplexity(scorer, text, window=10, stride=5)
    assert found["token_perplexity"]["n"] == 24
    assert -found["nll_sum"] == pytest.approx(expected.item(), abs=1e-4)


def test_a_memoryless_models_score_is_the_same_for_every_stride():
    vocabulary = 258
    table = torch.randn(vocabulary, vocabulary)
    scorer = Scorer(bigram_model(table), byte_tokenizer())
    text = "the small stone in his hand"
    ids = scorer.tokenizer(text)["input_ids"]
    expected = sum(table[a].double().log_softmax(-1)[b] for a, b in zip(ids, ids[1:], strict=False))
    for window, stride in ((10, 1), (10, 5), (10, 10), (64, 32)):
        found = perplexity(scorer, text, stride, window)
        assert found["token_perplexity"]["n"] == len(ids) - 1
        assert -found["nll_sum"] == pytest.approx(expected.item(), abs=1e-3)


def test_uniform_logits_give_the_logarithm_of_the_vocabulary_and_the_lowest_id_is_greedy():
    scorer = Scorer(bigram_model(torch.ones(258, 258)), byte_tokenizer())
    (score,) = scorer.loglikelihood([("The", " old")])
    assert score.logprob == pytest.approx(-4 * math.log(258), rel=1e-6)
    assert not score.greedy
    assert scorer.score([Request([5, 0], 1)])[0].greedy
