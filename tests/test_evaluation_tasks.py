"""Accuracies and perplexities against arithmetic on paper."""

import json
import math

import pytest

pytest.importorskip("transformers")

import torch  # noqa: E402
from evaluation_models import bigram_model, byte_tokenizer, position_model  # noqa: E402

from mmpreproj.evaluation import (  # noqa: E402
    ChoiceItem,
    LambadaItem,
    Scorer,
    choices,
    lambada,
    perplexity,
    perplexity_ratio,
)

V = 258


def uniform(positions=64, **keywords):
    """Every token has probability 1/258."""
    return Scorer(bigram_model(torch.ones(V, V), positions), byte_tokenizer(), **keywords)


def knowing(*followers):
    """A scorer that knows what follows some bytes: each of a pair makes the other 3 logits likelier
    than the rest."""
    table = torch.zeros(V, V)
    tokenizer = byte_tokenizer()
    for pair in followers:
        first, second = tokenizer("".join(pair))["input_ids"]
        table[first, second] = 3.0
    return Scorer(bigram_model(table), tokenizer)


LIKELY = math.log(math.exp(3) / (math.exp(3) + V - 1))
UNKNOWN = math.log(1 / V)


def test_a_last_word_is_right_only_if_all_of_its_tokens_are():
    # a token is a byte: " sun" is four. The second item's last two are right, its first two not.
    scorer = knowing(("A", " "), (" ", "s"), ("s", "u"), ("u", "n"))
    right = LambadaItem("A", " sun")
    partly = LambadaItem("B", " sun")
    found = lambada(scorer, [right, partly])
    assert (found["accuracy"]["correct"], found["accuracy"]["n"]) == (1, 2)
    assert found["accuracy"]["value"] == 0.5 and found["n_tokens"] == 8
    # a bigram table of zeros is uniform: byte 0 is the greedy one
    nll = -(4 * LIKELY + 3 * LIKELY + UNKNOWN)
    assert found["perplexity"]["nll_sum"] == pytest.approx(nll, rel=1e-5)
    assert found["perplexity"]["value"] == pytest.approx(math.exp(nll / 2), rel=1e-5)
    assert found["perplexity"]["n"] == 2
    assert "every token of the last word" in found["accuracy"]["rule"]


def test_the_variant_of_lambada_is_named():
    scorer = uniform()
    assert lambada(scorer, [LambadaItem("He had a", " stone")])["variant"] == "openai"
    assert lambada(scorer, [LambadaItem("he had a", " stone")])["variant"] == "standard"
    named = lambada(scorer, [LambadaItem("he had a", " stone")], variant="translated")
    assert named["variant"] == "translated"


def test_each_item_counts_once_in_every_pass_and_with_an_uneven_last_batch():
    scorer = knowing(("A", " "), (" ", "s"))
    scorer.batch_size = 3
    items = [LambadaItem(f"{'x' * i}{'A' if i % 5 < 2 else 'B'}", " s") for i in range(10)]
    for _ in range(2):
        accuracy = lambada(scorer, items)["accuracy"]
        assert (accuracy["value"], accuracy["correct"], accuracy["n"]) == (0.4, 4, 10)
    assert lambada(scorer, items, limit=5)["accuracy"]["n"] == 5
    json.dumps(lambada(scorer, items))  # plain values


@pytest.mark.parametrize(
    ("texts", "raw", "by_character", "by_byte"),
    [
        # tokens are bytes, and every one costs the same: a space and the choice's bytes
        (("éé", "abcdef"), 0, 1, 1),  # 5 and 7; 2.5 and 1.17 a character; 1.25 and 1.17 a byte
        (("ééé", "abcd"), 1, 1, 0),  # 7 and 5; 2.33 and 1.25; 1.17 and 1.25
        (("🙂🙂", "ab", "abc"), 1, 2, 0),  # 9, 3 and 4; 4.5, 1.5 and 1.33; 1.13, 1.5 and 1.33
    ],
)
def test_choices_are_normalised_by_characters(texts, raw, by_character, by_byte):
    scorer = uniform()
    for gold in range(len(texts)):
        found = choices(scorer, [ChoiceItem("Then", texts, gold)], name="toy")
        assert found["accuracy"]["correct"] == (gold == raw)
        assert found["accuracy_normalised"]["correct"] == (gold == by_character)
    assert "number of characters" in found["accuracy_normalised"]["rule"]
    assert (found["task"], found["n_choices"]) == ("toy", len(texts))


def test_of_equal_choices_the_first_is_taken():
    items = [ChoiceItem("Then", ("abc", "abd", "abe"), gold) for gold in range(3)]
    found = choices(uniform(), items)
    assert found["accuracy"]["correct"] == found["accuracy_normalised"]["correct"] == 1
    assert found["accuracy"]["value"] == pytest.approx(1 / 3)


def test_perplexities_per_token_word_and_byte_are_labelled_and_as_by_hand():
    text = "the café is a fine place to be in today"  # 10 words, 40 bytes, 40 tokens
    nll = 40 * math.log(V)
    tokenizer = byte_tokenizer(bos=True)
    scorer = Scorer(bigram_model(torch.ones(V, V)), tokenizer, add_bos=True)
    found = perplexity(scorer, text)
    assert found["first_token_counts"] and found["nll_sum"] == pytest.approx(nll, rel=1e-6)
    for unit, n in (("token", 40), ("word", 10), ("byte", 40)):
        figure = found[f"{unit}_perplexity"]
        assert (figure["unit"], figure["n"]) == (unit, n)
        assert figure["value"] == pytest.approx(math.exp(nll / n), rel=1e-5)


def test_without_bos_the_first_token_counts_nowhere():
    found = perplexity(uniform(), ["the stone", "é stone"])
    assert not found["first_token_counts"]
    # "he stone" and, as a byte is no text, " stone"
    assert found["token_perplexity"]["n"] == 8 + 7
    assert found["byte_perplexity"]["n"] == 8 + 6
    assert found["word_perplexity"]["n"] == 2 + 1
    assert found["nll_sum"] == pytest.approx(15 * math.log(V), rel=1e-6)


def test_a_text_longer_than_the_context_counts_whole_in_sum_and_number():
    table = torch.randn(10, V)
    scorer = Scorer(position_model(table, V), byte_tokenizer())
    text = "thirty bytes are three windows"
    ids = scorer.tokenizer(text)["input_ids"]
    logprobs = table.double().log_softmax(-1)
    # windows side by side: position p of each predicts its token p + 1
    expected = sum(logprobs[p % 10, ids[p + 1]] for p in range(20))
    # the last nine are read behind one more token
    expected += sum(logprobs[p, ids[19 + p + 1]] for p in range(1, 10))
    found = perplexity(scorer, text, stride=10)
    assert (found["window"], found["stride"]) == (10, 10)
    assert found["token_perplexity"]["n"] == 29
    value = math.exp(-expected.item() / 29)
    assert found["token_perplexity"]["value"] == pytest.approx(value, rel=1e-5)


def test_texts_start_afresh():
    scorer = uniform()
    table = torch.randn(V, V)
    scorer = Scorer(bigram_model(table), byte_tokenizer())
    both = perplexity(scorer, ["the stone", "a man"])["nll_sum"]
    apart = [perplexity(scorer, text)["nll_sum"] for text in ("the stone", "a man")]
    assert both == pytest.approx(sum(apart), rel=1e-6)


def test_a_ratio_of_perplexities_is_the_first_over_the_second():
    text = "the small stone"
    a = perplexity(uniform(), text)
    b = perplexity(Scorer(bigram_model(torch.ones(330, 330)), byte_tokenizer()), text)
    assert perplexity_ratio(a, b) == pytest.approx(258 / 330, rel=1e-5)
    assert perplexity_ratio(b, a, "token") == pytest.approx(330 / 258, rel=1e-5)
    # 14 bytes are 3 words: "he small stone"
    assert perplexity_ratio(a, b, "word") == pytest.approx((258 / 330) ** (14 / 3), rel=1e-5)


def test_perplexities_that_no_float_holds_have_a_ratio():
    table = torch.full((V, V), 4000.0)
    text = "the stone"
    table[:, byte_tokenizer()(text)["input_ids"]] = 0.0  # 8 tokens at exp(-4000) each, or less
    a = perplexity(Scorer(bigram_model(table), byte_tokenizer()), text)
    table[:, byte_tokenizer()(text)["input_ids"]] = 1.0
    b = perplexity(Scorer(bigram_model(table), byte_tokenizer()), text)
    assert a["byte_perplexity"]["value"] is b["byte_perplexity"]["value"] is None
    assert perplexity_ratio(a, b) == pytest.approx(math.e, rel=1e-3)
    assert perplexity_ratio(a, perplexity(uniform(), text)) == math.inf
    assert perplexity_ratio(perplexity(uniform(), text), a) == 0.0


def test_perplexities_of_different_rules_do_not_compare():
    text = "the small stone in his hand"
    a = perplexity(uniform(), text, window=16, stride=8)
    for b, told in (
        (perplexity(uniform(), text, window=10, stride=8), "window is 16 .*, 10"),
        (perplexity(uniform(), text, window=16, stride=4), "stride is 8 .*, 4"),
        (a | {"first_token_counts": True}, "first_token_counts is False .*, True"),
    ):
        with pytest.raises(ValueError, match=told):
            perplexity_ratio(a, b)
    one = perplexity(uniform(), "s ")
    with pytest.raises(ValueError, match="no words that count"):
        perplexity_ratio(one, one, "word")


def test_items_whose_context_was_cut_are_counted():
    scorer = uniform(positions=16)
    # 16 are read: of 4 and 5 tokens scored, 13 and 12 of context stay
    lengths = (20, 13, 12)
    found = lambada(scorer, [LambadaItem("x" * n, " sun") for n in (14, *lengths)])
    assert (found["n_cut"], found["accuracy"]["n"]) == (2, 4)
    items = [ChoiceItem("x" * n, ("sun", "moon"), 0) for n in lengths]
    assert choices(scorer, items)["n_cut"] == 2  # by one choice of the second, by none of the third


def test_perplexities_compare_only_where_they_can():
    text = "the small stone"
    a = perplexity(uniform(), text)
    other = Scorer(bigram_model(torch.ones(330, 330)), byte_tokenizer(merges=60))
    b = perplexity(other, "t" + text[1:])
    with pytest.raises(ValueError, match="different tokenizers.*word or per byte"):
        perplexity_ratio(a, b, "token")
    assert perplexity_ratio(a, perplexity(uniform(), text), "token") == 1.0
    with pytest.raises(ValueError, match="not the same text: 14 bytes.*13"):
        perplexity_ratio(a, perplexity(uniform(), text[1:]), "byte")
    # the same text behind a first token of one byte, and of two
    merged = perplexity(Scorer(bigram_model(torch.ones(330, 330)), byte_tokenizer(merges=60)), text)
    with pytest.raises(ValueError, match="of the same text another part counts .*first token"):
        perplexity_ratio(a, merged, "byte")
    with pytest.raises(ValueError, match="unit must be one of token, word, byte"):
        perplexity_ratio(a, b, "character")


def test_what_has_no_perplexity_is_refused():
    scorer = uniform(positions=16)
    with pytest.raises(ValueError, match="no texts"):
        perplexity(scorer, [])
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        perplexity(scorer, ["stone", "s"])
    with pytest.raises(ValueError, match="window must be from 1 to the 16"):
        perplexity(scorer, "stone", window=17)
    with pytest.raises(ValueError, match="stride must be from 1"):
        perplexity(scorer, "stone", window=8, stride=9)
    with pytest.raises(ValueError, match="no items"):
        lambada(scorer, [])
    with pytest.raises(ValueError, match="limit must be at least 1"):
        lambada(scorer, [LambadaItem("a", " b")], limit=0)
