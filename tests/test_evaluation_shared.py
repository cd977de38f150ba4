"""Contexts that continuations share: the same scores in fewer tokens, within the model's length."""

import copy
import itertools

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from evaluation_models import by_hand, byte_tokenizer, questions, random_model  # noqa: E402
from helpers import perturb  # noqa: E402
from transformers_models import DECODERS, tiny  # noqa: E402

from mmpreproj import attach  # noqa: E402
from mmpreproj.evaluation import Scorer, scoring  # noqa: E402
from mmpreproj.evaluation.encoding import Request, by_context, partition  # noqa: E402


@pytest.mark.slow
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
    assert shared.shares
    found = [score.logprob for score in shared.score(requests)]
    alone = Scorer(model, tokenizer, share_contexts=False, batch_size=1).score(requests)
    assert found == pytest.approx([s.logprob for s in alone], abs=2e-5)  # float32, sums near -90


def test_a_shared_context_is_run_once():
    tokenizer = byte_tokenizer(merges=60)
    model = random_model("llama", tokenizer)
    read = []
    scorer = Scorer(model, tokenizer)
    assert scorer.shares
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


@pytest.fixture
def read(monkeypatch):
    """Shapes of what the base model reads, in order."""
    shapes = []

    def hidden_states(model, ids, *args, **keywords):
        shapes.append(tuple(ids.shape))
        return plain(model, ids, *args, **keywords)

    plain = scoring.hidden_states
    monkeypatch.setattr(scoring, "hidden_states", hidden_states)
    return shapes


@pytest.mark.slow
@pytest.mark.parametrize("end", [2, 3, 13])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gptj", "codegen", "opt", "mpt", "llama"])
def test_no_row_of_shared_contexts_is_longer_than_the_model_reads(name, end, read):
    tokenizer = byte_tokenizer()  # a token a byte
    model = random_model(name, tokenizer)  # which reads 64
    # the longest context and the longest ending are those of two items
    pairs = [("a" * 63, end) for end in ("xy", "zw")]
    pairs += [("b" * 52, letter * end) for letter in "cd"]
    scorer = Scorer(model, tokenizer, max_length=64)
    found = scorer.loglikelihood(pairs)
    assert scorer.shares
    for score, pair in zip(found, pairs, strict=True):
        assert score.logprob == pytest.approx(by_hand(model, tokenizer, *pair)[0], abs=1e-4)
        assert score.n_cut == 0
    # all but the last token of an ending is read: 63 + 1 fit
    assert ((2, 63) in read) == (end == 2) and ((1, 52) in read) == (end != 2)


def test_many_continuations_of_one_context_keep_to_the_size_of_a_batch(read):
    tokenizer = byte_tokenizer()
    model = random_model("llama", tokenizer)
    pairs = [("Hello there", f" w{i:04d}") for i in range(100)]  # 11 and 6 tokens, 5 of them read
    expected = by_hand(model, tokenizer, *pairs[77])[0]
    for options, rows in (({"batch_tokens": 64}, 12), ({"batch_size": 2}, 8), ({}, 100)):
        scorer = Scorer(model, tokenizer, **options)
        assert scorer.shares
        read.clear()
        found = scorer.loglikelihood(pairs)
        assert found[77].logprob == pytest.approx(expected, abs=1e-4)
        context, *runs = read
        assert context == (1, 11)
        assert {tokens for _, tokens in runs} == {5}
        assert sum(n for n, _ in runs) == 100 and max(n for n, _ in runs) == rows
    # and a long context of few tokens behind it holds fewer of them
    pairs = [("x" * 48, f" {a}{b}") for a in "abcdefgh" for b in "abcdefgh"]
    scorer = Scorer(model, tokenizer, batch_tokens=128)
    assert scorer.shares
    read.clear()
    scorer.loglikelihood(pairs)
    # 4 * 128 tokens of contexts are 10 rows of 48
    assert max(n for n, _ in read[1:]) == 10


@pytest.mark.parametrize("options", [{"batch_tokens": 320}, {"batch_size": 8}])
def test_four_choices_of_a_full_batch_of_contexts_are_one_run(options, read):
    tokenizer = byte_tokenizer()
    scorer = Scorer(random_model("llama", tokenizer), tokenizer, **options)
    assert scorer.shares
    read.clear()
    contexts = [letter * 40 for letter in "abcdefgh"]
    scorer.loglikelihood([(c, f" choice {n}") for c in contexts for n in range(4)])
    assert read == [(8, 40), (32, 8)]


def cost(runs, lengths, run_tokens):
    return sum((stop - start) * lengths[start] + run_tokens for start, stop in runs)


def test_runs_of_ragged_rows_cost_the_fewest_tokens():
    # 30 alone; the eight of 3 together: 30 + 24 + 2 runs, against 9 * 30 in one
    assert partition([30, *[3] * 8], 99, run_tokens=10) == [(0, 1), (1, 9)]
    assert partition([30, 29, 28], 99, run_tokens=10) == [(0, 3)]
    assert partition([], 99, run_tokens=10) == []


@pytest.mark.parametrize(("rows", "tokens"), [(99, None), (3, None), (99, 20), (3, 14), (1, 1)])
def test_limits_of_a_run_are_kept_at_the_least_cost(rows, tokens):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = sorted(torch.randint(1, 12, (7,), generator=generator).tolist(), reverse=True)
        allowed = []
        for cuts in itertools.product((False, True), repeat=6):
            bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 7]
            runs = list(itertools.pairwise(bounds))
            if all(
                b - a <= rows and (b - a == 1 or not tokens or (b - a) * lengths[a] <= tokens)
                for a, b in runs
            ):
                allowed.append(runs)
        found = partition(lengths, rows, tokens, run_tokens=5)
        assert found in allowed
        assert cost(found, lengths, 5) == min(cost(runs, lengths, 5) for runs in allowed)


def test_a_cut_context_is_shared_where_it_is_the_same():
    cut = [Request(list(range(40)) + end, len(end), n_cut=3) for end in ([7, 8], [9, 9], [5])]
    cut[2] = Request(list(range(1, 41)) + [5], 1, n_cut=4)
    assert by_context(cut) == [cut[:2], cut[2:]]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
        (
            "phi3",
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 16,
                "rope_parameters": LONG,
            },
        ),
        (
            "gemma3",
            {
                "max_position_embeddings": 16,
                "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
            },
        ),
    ],
)
def test_frequencies_that_follow_the_length_are_those_of_each_item_alone(name, config):
    tokenizer = byte_tokenizer()
    if name == "gemma3":
        config = {**config, "layer_types": ["sliding_attention", "full_attention"]}
    model = random_model(name, tokenizer, **config)
    pairs = [("c" * n, end) for n in (3, 50, 8, 40, 5) for end in (" ef", " gh", " ijk")]
    pairs.append(("d" * 45, " ef"))  # shares no context, and is longer than others of that kind
    # a model that has read nothing else
    expected = [by_hand(copy.deepcopy(model), tokenizer, *pair)[0] for pair in pairs]
    for order in (pairs, pairs[::-1]):
        for options in ({}, {"batch_size": 1}, {"batch_size": 4}):
            scorer = Scorer(model, tokenizer, max_length=64, **options)
            found = dict(zip(order, scorer.loglikelihood(order), strict=True))
            assert [found[p].logprob for p in pairs] == pytest.approx(expected, abs=1e-4)
