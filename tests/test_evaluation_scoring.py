"""Log-likelihoods against the model's own logits, and what they must not depend on."""

import math

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from evaluation_models import (  # noqa: E402
    TEXT,
    bigram_model,
    byte_tokenizer,
    position_model,
    random_model,
)
from helpers import perturb  # noqa: E402
from transformers_models import DECODERS, tiny  # noqa: E402

from mmpreproj import attach  # noqa: E402
from mmpreproj.evaluation import Scorer  # noqa: E402
from mmpreproj.evaluation.encoding import Request, windows  # noqa: E402
from mmpreproj.evaluation.shared import partition  # noqa: E402

WORDS = TEXT.split()


def mixed_pairs(n=20):
    """Contexts of 1 to n words, with continuations of 1 to 4 words, in an order of no kind."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for i in torch.randperm(n, generator=generator).tolist():
        pairs.append((" ".join(WORDS[: i + 1]), " " + " ".join(WORDS[i + 1 :][: 1 + i % 4])))
    return pairs


def questions(n=4):
    """Contexts that are long enough to be shared, each with three continuations."""
    contexts = [" ".join(WORDS[i : i + 9 + i]) for i in range(n)]
    return [(c, end) for c in contexts for end in (" stone", " the old man", " be? A small stone")]


@torch.no_grad()
def by_hand(model, tokenizer, context, continuation):
    """(sum of log-probabilities in float64, greedy, number) from the whole logits of one text."""
    before = tokenizer(context)["input_ids"]
    ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    logits = model(ids).logits[0, len(before) - 1 : -1].double()
    wanted = ids[0, len(before) :]
    picked = logits.log_softmax(-1).gather(1, wanted[:, None])
    return picked.sum().item(), bool((logits.argmax(-1) == wanted).all()), len(wanted)


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


@pytest.mark.parametrize("name", DECODERS)
def test_a_shared_context_changes_no_score_on_any_decoder(name):
    model = perturb(attach(tiny(name)))
    generator = torch.Generator().manual_seed(1)

    def draw(n):
        return torch.randint(3, 99, (n,), generator=generator).tolist()

    # longer than the sliding windows of 4 that some of these have
    contexts = [draw(n) for n in (9, 30, 17)]
    requests = [Request(context + draw(n), n) for context in contexts for n in (1, 3, 12, 3)]
    tokenizer = byte_tokenizer()  # its ids are not used
    tokenizer.eos_token = None
    shared = Scorer(model, tokenizer)
    assert shared.shared.exact
    found = [score.logprob for score in shared.score(requests)]
    alone = Scorer(model, tokenizer, share_contexts=False, batch_size=1).score(requests)
    assert found == pytest.approx([s.logprob for s in alone], abs=2e-5)  # float32, sums near -90


def test_a_shared_context_is_run_once():
    tokenizer = byte_tokenizer(merges=60)
    model = random_model("llama", tokenizer)
    read = []
    scorer = Scorer(model, tokenizer)
    assert scorer.shared.exact
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: read.append(args[0].numel())
    )
    pairs = questions(1)
    n_context = len(tokenizer(pairs[0][0])["input_ids"])
    scorer.loglikelihood(pairs)
    # all but the last token of each continuation, in one run: padded to the longest
    longest = max(len(tokenizer(end)["input_ids"]) - 1 for _, end in pairs)
    assert read[0] == n_context and sum(read[1:]) <= 3 * longest


def test_a_model_that_cannot_share_a_context_exactly_says_so_and_scores_plainly(caplog):
    config = transformers.MambaConfig(
        vocab_size=330, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0
    )
    tokenizer = byte_tokenizer(merges=60)
    model = transformers.MambaForCausalLM(config).eval()  # keeps a state, no keys and values
    found = Scorer(model, tokenizer).loglikelihood(questions())
    assert "MambaForCausalLM" in caplog.text and "run once" in caplog.text
    for score, pair in zip(found, questions(), strict=True):
        assert score.logprob == pytest.approx(by_hand(model, tokenizer, *pair)[0], abs=1e-4)


def test_runs_of_ragged_rows_cost_the_fewest_tokens():
    # 30 alone; the eight of 3 together: 30 + 24 + 2 runs, against 9 * 30 in one
    assert partition([30, *[3] * 8], run_tokens=10) == [(0, 1), (1, 9)]
    assert partition([30, 29, 28], run_tokens=10) == [(0, 3)]
    assert partition([], run_tokens=10) == []


def test_bfloat16_models_are_scored_in_float32():
    tokenizer = byte_tokenizer(merges=60)
    model = tiny("llama", vocab_size=50_000, hidden_size=16).to(torch.bfloat16)
    pairs = [pair for pair in mixed_pairs() if len(pair[0]) < 60]
    found = Scorer(model, tokenizer, batch_size=1, share_contexts=False).loglikelihood(pairs)
    for score, pair in zip(found, pairs, strict=True):
        # the model's bfloat16 logits, taken on in float64. They are of order 10: one rounding of a
        # bfloat16 log-probability would be 0.03
        assert score.logprob == pytest.approx(by_hand(model, tokenizer, *pair)[0], abs=0.02)


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
    ids = list(b"a text of 25 bytes, by hand"[:25])
    logprobs = table.double().log_softmax(-1)
    # Reads 0-9, scores 1-10; then reads 5-14, scores the last five (at positions 5-9); and so on
    expected = sum(logprobs[position, ids[position + 1]] for position in range(10))
    for first in (5, 10):
        expected += sum(logprobs[position, ids[first + position + 1]] for position in range(5, 10))
    # four are left: the window still reads ten
    expected += sum(logprobs[position, ids[14 + position + 1]] for position in range(6, 10))
    (score,) = scorer.in_windows([ids], window=10, stride=5)
    assert score.n_tokens == 24
    assert score.logprob == pytest.approx(expected.item(), abs=1e-4)


def test_a_memoryless_models_score_is_the_same_for_every_stride():
    vocabulary = 258
    table = torch.randn(vocabulary, vocabulary)
    scorer = Scorer(bigram_model(table), byte_tokenizer())
    ids = list(b"the small stone in his hand")
    expected = sum(table[a].double().log_softmax(-1)[b] for a, b in zip(ids, ids[1:], strict=False))
    for window, stride in ((10, 1), (10, 5), (10, 10), (64, 32)):
        (score,) = scorer.in_windows([ids], window, stride)
        assert score.n_tokens == len(ids) - 1
        assert score.logprob == pytest.approx(expected.item(), abs=1e-3)


def test_uniform_logits_give_the_logarithm_of_the_vocabulary_and_the_lowest_id_is_greedy():
    scorer = Scorer(bigram_model(torch.ones(258, 258)), byte_tokenizer())
    (score,) = scorer.loglikelihood([("The", " old")])
    assert score.logprob == pytest.approx(-4 * math.log(258), rel=1e-6)
    assert not score.greedy
    assert scorer.score([Request([5, 0], 1)])[0].greedy
