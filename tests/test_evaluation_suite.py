"""Evaluations of a config: what is refused before anything is scored, and what fails alone."""

import gzip
import importlib
import json
import math
import sys

import pytest

pytest.importorskip("transformers")

import torch  # noqa: E402
from evaluation_models import bigram_model, byte_tokenizer, random_model  # noqa: E402

from mmpreproj.evaluation import Scorer, lambada, read_lambada  # noqa: E402
from mmpreproj.evaluation.tasks import EvaluationConfig, read_suite, run_suite  # noqa: E402


def read(source, task="perplexity", **options):
    return read_suite({"x": EvaluationConfig(task, str(source), **options)})["x"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_tokens": 0}, "batch_tokens must be 1 or more, found 0"),
        ({"limit": 0}, "limit must be 1 or more, or null, found 0"),
        ({"window": -5}, "window must be 1 or more, or null, found -5"),
        ({"stride": 0}, "stride must be 1 or more, or null, found 0"),
        ({"window": 10, "stride": 11}, r"stride must be at most the window \(10\), found 11"),
        ({"task": "lambada", "stride": 0}, "window and stride are for perplexity"),
        ({"task": "hellaswag"}, "task must be one of lambada, choices, perplexity"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_config(options, told):
    with pytest.raises(ValueError, match=told):
        EvaluationConfig(**{"task": "perplexity", "source": "a.txt", **options})
    EvaluationConfig("perplexity", "a.txt", limit=1, window=10, stride=10, batch_tokens=1)


def test_a_text_is_read_as_that_of_training_is(tmp_path):
    text = "Naïve  café,\n\n\tand\u00a0more \u2028 of it. \n" * 9000  # several pieces
    plain = tmp_path / "a.txt"
    plain.write_bytes(text.encode())
    assert read(plain) == text
    others = {
        "bom.txt": b"\xef\xbb\xbf" + text.encode(),
        "windows.txt": text.replace("\n", "\r\n").encode(),
        "packed.txt.gz": gzip.compress(text.encode()),
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == text, name
    assert read(plain, limit=3) == "Naïve  café,\n\n\tand"
    assert read(plain, limit=10**9) == text.rstrip()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "evaluation 'x': .*a.txt is empty"),
        (b" \r\n\n", "evaluation 'x': .*a.txt is empty"),
        (b"abc \xe9 de", "evaluation 'x': .*a.txt is not UTF-8: byte 0xe9 at offset 4"),
    ],
)
def test_a_text_without_a_perplexity_is_told_before_training(tmp_path, content, told):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        read(tmp_path / "a.txt")


def test_a_folder_or_a_damaged_file_is_told_before_training(tmp_path):
    with pytest.raises(ValueError, match="'x': perplexity takes one text file, found the folder"):
        read(tmp_path)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one two three " * 99)[:30])
    with pytest.raises(ValueError, match=r"'x': .*a\.txt\.gz cannot be unpacked"):
        read(tmp_path / "a.txt.gz")
    with pytest.raises(FileNotFoundError, match="'x': there is no file"):
        read(tmp_path / "absent.txt")


@pytest.fixture
def suite(tmp_path):
    """Two evaluations: of last words, and of a text."""
    (tmp_path / "items.jsonl").write_text(json.dumps({"text": "The old man"}) + "\n")
    (tmp_path / "a.txt").write_text("the stone")
    return {
        "words": EvaluationConfig("lambada", str(tmp_path / "items.jsonl")),
        "text": EvaluationConfig("perplexity", str(tmp_path / "a.txt")),
    }


def test_results_are_those_of_the_tasks_with_their_source(suite):
    tokenizer = byte_tokenizer()
    model = random_model("llama", tokenizer)
    found = run_suite(model, tokenizer, suite)
    items = read_lambada(suite["words"].source)
    expected = lambada(Scorer(model, tokenizer), items)
    assert found["words"] == expected | {"source": "items.jsonl", "limit": None}
    uniform = run_suite(bigram_model(torch.ones(258, 258)), tokenizer, suite)["text"]
    assert uniform["byte_perplexity"]["value"] == pytest.approx(258, rel=1e-5)


def test_evaluations_need_no_harness_which_says_how_it_is_installed(suite, monkeypatch):
    for name in ("lm_eval", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "mmpreproj.evaluation.harness", raising=False)
    tokenizer = byte_tokenizer()
    found = run_suite(random_model("llama", tokenizer), tokenizer, suite)
    assert not any("error" in result for result in found.values())
    with pytest.raises(ImportError, match=r"pip install -e '\.\[eval\]'"):
        importlib.import_module("mmpreproj.evaluation.harness")


@torch.no_grad()
def test_logits_that_are_not_finite_are_the_error_of_each_evaluation(suite):
    tokenizer = byte_tokenizer()
    model = random_model("llama", tokenizer)
    model.model.norm.weight.fill_(math.nan)  # a run that has diverged
    with pytest.warns(UserWarning, match="evaluation 'words' failed"):
        found = run_suite(model, tokenizer, suite)
    for name, task in (("words", "lambada"), ("text", "perplexity")):
        assert found[name]["task"] == task and "not finite" in found[name]["error"]
    # and where it shows on some tokens only
    model = random_model("llama", tokenizer)
    model.get_input_embeddings().weight[tokenizer("z")["input_ids"]] = math.nan
    text = suite["text"].source
    with open(text, "w") as file:
        file.write("the zoo")
    with pytest.warns(UserWarning, match="evaluation 'text' failed"):
        found = run_suite(model, tokenizer, suite)
    assert "error" not in found["words"] and "is NaN" in found["text"]["error"]


@pytest.mark.parametrize("kind", [RuntimeError, IndexError])
def test_what_the_model_raises_is_the_error_of_its_evaluation(suite, kind, monkeypatch):
    tokenizer = byte_tokenizer()
    model = random_model("llama", tokenizer)
    Scorer(model, tokenizer)  # its head is known from now on
    forward = model.model.forward

    def fail(*args, input_ids, **keywords):
        if input_ids.shape[1] == 8:  # all of "the stone" but its last byte
            raise kind("not enough memory")
        return forward(*args, input_ids=input_ids, **keywords)

    monkeypatch.setattr(model.model, "forward", fail)
    suite = {name: suite[name] for name in ("text", "words")}
    with pytest.warns(UserWarning, match="evaluation 'text' failed: .*not enough memory"):
        found = run_suite(model, tokenizer, suite)
    assert found["text"]["error"] == f"{kind.__name__}: not enough memory"
    assert found["words"]["accuracy"]["n"] == 1
