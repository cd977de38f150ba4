"""Items from files: which columns, which join, and what is said of a bad line."""

import bz2
import gzip
import importlib
import json
import lzma
from pathlib import Path

import pytest
import yaml

from mmpreproj.evaluation import ChoiceItem, LambadaItem, read_choices, read_lambada

PASSAGE = "He looked at the stone,\nand at her. It was a small stone"


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_lambada_of_either_form_splits_before_the_last_word(tmp_path):
    whole = json_lines(tmp_path / "a.jsonl", [{"text": PASSAGE}, {"text": PASSAGE + "\n"}])
    context, word = PASSAGE.rsplit(" ", 1)
    expected = LambadaItem(context, " stone")
    assert read_lambada(whole) == [expected, expected]
    # without a space, with one before the word, with one behind the context
    rows = [
        {"context": context, "continuation": word},
        {"context": context, "continuation": f" {word}"},
        {"context": f"{context} ", "continuation": word},
    ]
    found = read_lambada(json_lines(tmp_path / "b.jsonl", rows))
    assert found == [expected, expected, LambadaItem(f"{context} ", "stone")]
    assert len({"".join(item.pair()) for item in found}) == 1


def test_hellaswag_rows_become_the_harnesss_queries_and_choices(tmp_path):
    tasks = pytest.importorskip("lm_eval.tasks.hellaswag.utils")
    datasets = pytest.importorskip("datasets")
    row = {
        "ctx_a": "[header] How to dry a stone [title] Find  a towel.",
        "ctx_b": "the man",
        "activity_label": "Drying [substeps] stones",
        "endings": ["dries [it]  well.", "[title] leaves.", "sings, badly.", "is a stone."],
        "label": "2",
    }
    (expected,) = tasks.process_docs(datasets.Dataset.from_list([row]))
    (found,) = read_choices(json_lines(tmp_path / "a.jsonl", [row]))
    assert found.context == expected["query"]
    assert list(found.choices) == expected["choices"] and found.gold == expected["gold"] == 2
    assert found.pairs()[2] == (expected["query"], " " + expected["choices"][2])
    assert found.pairs()[1] == (expected["query"], "  leaves.")  # "[title] leaves."


def test_piqa_rows_become_a_question_and_its_solutions(tmp_path):
    row = {"goal": "Dry a stone", "sol1": "use a towel", "sol2": "use a lake", "label": 0}
    (found,) = read_choices(json_lines(tmp_path / "a.jsonl", [row]))
    # https://github.com/EleutherAI/lm-evaluation-harness, lm_eval/tasks/piqa/piqa.yaml
    assert found == ChoiceItem(
        "Question: Dry a stone\nAnswer:", ("use a towel", "use a lake"), gold=0, always=True
    )


HUB_ROWS = {
    "hellaswag/hellaswag": {
        "ctx_a": "[header] How to dry a stone",
        "ctx_b": "the man [step]",  # a space stays behind it
        "activity_label": "Drying",
        "endings": ["dries it.", "[title] leaves.", " sings.", "is a stone."],
        "label": "1",
    },
    "piqa/piqa": {"goal": "Dry a stone", "sol1": "a towel", "sol2": " a lake ", "label": 1},
    "arc/arc_easy": {
        "question": "What dries a stone?",
        "choices": {"text": ["a towel", " a lake", "rain"], "label": ["A", "B", "C"]},
        "answerKey": "C",
    },
}


@pytest.mark.parametrize("task", HUB_ROWS)
def test_rows_of_the_hub_become_the_requests_of_the_harnesss_task(task, tmp_path, monkeypatch):
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config = (Path(tasks.__file__).parent / f"{task}.yaml").read_text()
    config = yaml.safe_load(config.replace("!function utils.process_docs", "null"))
    if task == "hellaswag/hellaswag":
        config["process_docs"] = importlib.import_module(
            "lm_eval.tasks.hellaswag.utils"
        ).process_docs
    path = json_lines(tmp_path / "a.jsonl", [HUB_ROWS[task]])
    parts = ("train", "validation", "test")
    config |= {"dataset_path": "json", "dataset_name": None, "tag": None}
    config["dataset_kwargs"] = {"data_files": dict.fromkeys(parts, str(path))}
    task = importlib.import_module("lm_eval.api.task").ConfigurableTask(config=config)
    (doc,) = task.validation_docs()
    requests = task.construct_requests(doc, task.doc_to_text(doc))
    (found,) = read_choices(path)
    # also where a choice starts with white space, or the context ends with it
    assert found.pairs() == [request.args for request in requests]
    assert list(found.choices) == task.doc_to_choice(doc)  # whose lengths normalise
    assert found.gold == int(task.doc_to_target(doc))


def test_a_delimiter_stands_only_where_no_white_space_does():
    item = ChoiceItem("Question: dry?\n", ("a towel", " a lake"), 0)
    assert [text for _, text in item.pairs()] == ["a towel", " a lake"]
    item = ChoiceItem("Then the man", ("sings", " leaves"), 0)
    assert [text for _, text in item.pairs()] == [" sings", " leaves"]
    item = ChoiceItem("Question: dry?", ("a towel", "a lake"), 0, delimiter="\nAnswer: ")
    assert item.pairs()[0][1] == "\nAnswer: a towel"


def test_every_kind_of_file_gives_the_same_items(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"query": "Then é", "choices": ["a", "b", "c"], "gold": i} for i in range(3)]
    expected = read_choices(json_lines(tmp_path / "a.jsonl", rows))
    assert [item.gold for item in expected] == [0, 1, 2]
    text = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "b.jsonl.bz2").write_bytes(bz2.compress(text))
    (tmp_path / "b.json.xz").write_bytes(lzma.compress(text))
    (tmp_path / "c.json").write_bytes(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n\r\n"))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "d.parquet")
    table.save_to_disk(tmp_path / "e")
    for name in ("b.jsonl.gz", "b.jsonl.bz2", "b.json.xz", "c.json", "d.parquet", "e"):
        assert read_choices(tmp_path / name) == expected, name


CHOICES = {"query": "Then", "choices": ["a", "b"], "gold": 1}
ARC = {"question": "What?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}}


@pytest.mark.parametrize(
    ("read", "line", "told"),
    [
        (read_lambada, '{"context": "It was"}', "line 2: no 'text' among .*'context'.*columns are"),
        (read_lambada, '{"context": "It", "continuation": " "}', "line 2: .*continuation is empty"),
        (read_lambada, '{"text": 3}', "line 2: 'text' must be text, found 3"),
        (read_lambada, '{"text": "It', "line 2 is not JSON: .*One object a line"),
        (read_lambada, '["text"]', "line 2 is list .*'text'.*, where an object is expected"),
        (read_lambada, b'{"text": "\xff"}', "line 2 is not UTF-8: byte 0xff at offset 10"),
        (read_choices, json.dumps(CHOICES | {"gold": 2}), "line 2: .*is 2, but there are 2"),
        (read_choices, json.dumps(CHOICES | {"gold": -1}), "line 2: .*is -1"),
        (read_choices, json.dumps(CHOICES | {"gold": ""}), "line 2: .*part without answers"),
        (read_choices, json.dumps(CHOICES | {"choices": ["a"]}), "line 2: at least two"),
        (read_choices, json.dumps(CHOICES | {"choices": ["a", ""]}), "line 2: .*not empty"),
        (read_choices, '{"query": "Then"}', "line 2: no 'choices'"),
        (read_choices, json.dumps(ARC | {"answerKey": "E"}), "line 2: .*of 'E' in .*'A', 'B'"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(read, line, told, tmp_path):
    good = CHOICES | {"text": PASSAGE}
    path = tmp_path / "items.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps(good).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=f"items.jsonl, {told}"):
        read(path)


def test_what_is_no_file_of_items_says_what_would_be(tmp_path):
    with pytest.raises(FileNotFoundError, match="no .*absent.jsonl.*hf:NAME"):
        read_lambada(tmp_path / "absent.jsonl")
    (tmp_path / "items.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="none of .jsonl"):
        read_lambada(tmp_path / "items.csv")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no items"):
        read_lambada(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="which part|say which part"):
        read_choices("hf:hellaswag")
    pytest.importorskip("pyarrow")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="broken.parquet cannot be read as parquet"):
        read_choices(tmp_path / "broken.parquet")


@pytest.mark.parametrize("end", [12, 60, -5])
def test_a_damaged_packed_file_is_named(tmp_path, end):
    row = json.dumps(CHOICES).encode() + b"\n"
    path = tmp_path / "items.jsonl.gz"
    path.write_bytes(gzip.compress(row * 1000)[:end])
    with pytest.raises(ValueError, match=r"items\.jsonl\.gz cannot be unpacked"):
        read_choices(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"items\.jsonl\.gz cannot be unpacked"):
        read_choices(path)


def test_of_a_folder_of_several_data_sets_one_has_to_be_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([CHOICES])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match="several data sets.*both/test, .*both/train"):
        read_choices(tmp_path / "both")
    assert len(read_choices(tmp_path / "both" / "test")) == 1


def test_a_hub_name_without_the_hub_is_a_connection_error(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="parquet or JSON-lines files"):
        read_choices("hf:nobody/nothing-of-this-name::validation")
