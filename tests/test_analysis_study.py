"""Studies: which runs there are, which are skipped or resumed, and what the table says."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmpreproj.studies.launch import run_study
from mmpreproj.studies.study import Study
from mmpreproj.studies.study_plots import arms_by_seed
from mmpreproj.studies.summary import markdown, summarise

# Stands in for tools/train.py: writes the record that its --run options and its seed ask for.
TRAINER = """
import json, pathlib, sys
words = sys.argv[1:]
if "--resume" in words:
    folder = pathlib.Path(words[words.index("--resume") + 1])
    top1 = 0.5
else:
    value = lambda name: words[words.index(name) + 1]
    seed = int(value("--seed_everything"))
    folder = pathlib.Path(value("--run.root"), value("--run.name"), f"20260101-000000-seed{seed}")
    folder.mkdir(parents=True)
    top1 = (0.9 if "--model.wide" in words else 0.8) + seed / 100
    if "--fail" in words:
        sys.exit("no luck")
record = {"finished": True, "test": {"top1": {"value": top1, "n": 100}, "loss": {"value": 0.1}},
          "n": {"test": 100}, "parameters": {"total": 7, "new": 2, "trainable": 5},
          "training": {"seconds": 3.0}, "skip_strength": [{"layer": 0, "weight": 0.25}]}
(folder / "record.json").write_text(json.dumps(record))
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "base.yaml").write_text("seed_everything: 0\n")
    (tmp_path / "s.yaml").write_text(
        "config: base.yaml\nseeds: [0, 2]\narms:\n  plain: {}\n  wide: {model.wide: true}\n"
    )
    return Study.read(tmp_path / "s.yaml")


@pytest.fixture
def train(tmp_path):
    (tmp_path / "train.py").write_text(TRAINER)
    return [sys.executable, str(tmp_path / "train.py")]


def test_every_arm_runs_with_every_seed_and_the_table_adds_up(study, train, tmp_path):
    told = []
    assert run_study(study, train, tmp_path / "runs", jobs=2, tell=told.append) == []
    plain, wide = summarise(study, tmp_path / "runs")
    assert plain["figures"]["test top-1"]["by_seed"] == pytest.approx({0: 0.80, 2: 0.82})
    assert plain["figures"]["test top-1"]["mean"] == pytest.approx(0.81)
    assert plain["figures"]["test top-1"]["std"] == pytest.approx(
        0.0141421, rel=1e-4
    )  # |0.82 - 0.80| / sqrt(2)
    assert plain["differences"] == {}
    difference = wide["differences"]["plain"]["test top-1"]
    assert difference["mean"] == pytest.approx(0.1) and difference["n"] == 2
    assert difference["std"] == pytest.approx(0.0, abs=1e-12)
    assert (wide["parameters"], wide["new_parameters"]) == (7, 2)
    table = markdown(study, [plain, wide])
    assert "| test top-1 (n = 100) | loss |" in table
    assert "| wide | 7 | 2 | 5 | 0.9100 ± 0.0141 | 0.100 ± 0.000 | 3 ± 0 | – | 0, 2 |" in table
    assert "| wide | +0.1000 ± 0.0000 | +0.000 ± 0.000 | 2 |" in table
    assert "| wide | 2 | 0.9200 | 0.100 |" in table


def test_finished_runs_are_skipped_and_broken_ones_resumed(study, train, tmp_path):
    root = tmp_path / "runs"
    run_study(study, train, root, tell=lambda _: None)
    first, second = study.runs()[:2]
    (first.folders(root)[0] / "record.json").unlink()
    (first.folders(root)[0] / "checkpoints").mkdir()
    (first.folders(root)[0] / "checkpoints" / "last.ckpt").touch()
    told = []
    run_study(study, train, root, tell=told.append)
    assert told[0] == "s: 4 runs, 3 done, 1 to do"
    assert told[1].startswith(f"resumes: {first.arm}, seed {first.seed}")
    assert first.record(root)["test"]["top1"]["value"] == 0.5  # what the resumed run wrote
    assert len(second.folders(root)) == 1


SLEEPER = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path("ended").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
with open("begun", "a") as file:
    file.write("x")
time.sleep(60)
"""
STUDY = """
import pathlib, signal, sys
from mmpreproj.studies.launch import run_study
from mmpreproj.studies.study import Study
from mmpreproj.studies.study_plots import arms_by_seed
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run_study(Study.read("s.yaml"), [sys.executable, "sleeper.py"], pathlib.Path("runs"))
"""


@pytest.mark.slow
def test_a_stopped_study_stops_its_runs_and_starts_no_other(study, tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    package = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", STUDY], cwd=tmp_path, env=package) as process:
        deadline = time.monotonic() + 60
        begun = tmp_path / "begun"
        while not (begun.exists() and begun.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    assert (tmp_path / "ended").exists() and (tmp_path / "begun").read_text() == "x"


def test_a_failed_run_is_named_and_stays_missing(study, train, tmp_path):
    told = []
    failed = run_study(study, train, tmp_path / "runs", ["--fail"], tell=told.append)
    assert len(failed) == 4 and sum("FAILED" in line for line in told) == 4
    rows = summarise(study, tmp_path / "runs", ["--fail"])
    assert rows[0]["missing"] == [0, 2] and rows[0]["figures"]["test top-1"]["mean"] is None
    assert "| plain | – | – | – | – | – | – | – | none |" in markdown(study, rows)
    arms_by_seed(rows)


def test_a_figure_that_some_seeds_lack_says_so(study, train, tmp_path):
    root = tmp_path / "runs"
    run_study(study, train, root, tell=lambda _: None)
    run = next(run for run in study.runs() if (run.arm, run.seed) == ("wide", 2))
    path = run.folders(root)[0] / "record.json"
    record = json.loads(path.read_text())
    record["test"]["top1"] = None
    path.write_text(json.dumps(record))
    rows = summarise(study, root)
    assert "0.9000 (1 of 2 seeds) | 0.100 ± 0.000" in markdown(study, rows)
    assert rows[1]["differences"]["plain"]["test top-1"]["n"] == 1


def test_arguments_that_an_arm_or_the_choice_sets_are_refused(study, tmp_path):
    for words in (["--model.wide", "false"], ["--model.wide=false"], ["--model", "x"]):
        with pytest.raises(ValueError, match="override what arm 'wide' sets"):
            run_study(study, ["none"], tmp_path, words)
        with pytest.raises(ValueError, match="override what arm 'wide' sets"):
            summarise(study, tmp_path, words)
    study.check(["--model.wider", "true", "--trainer.max_epochs", "1"])
    content = {"config": "base.yaml", "seeds": [0], "arms": {"a": {"r": {"choose": [1, 2]}}}}
    content["choose"] = {"by": "validation.x", "settings": {"data.init_args.max_train_tokens": 9}}
    (tmp_path / "t.yaml").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="override what choose.settings sets"):
        Study.read(tmp_path / "t.yaml").check(["--data.max_train_tokens", "7"])


def test_settings_are_told_by_what_differs_and_the_edge_of_what_was_tried(tmp_path):
    (tmp_path / "base.yaml").touch()
    lora = [{"rank": 4, "scale": 1.0}, {"rank": 4, "scale": 2.0}]
    arm = {
        "model.init_args.lora": {"choose": lora},
        "model.init_args.lr": {"choose": ["1e-3", "1e-4", 0.01]},
    }
    content = {"config": "base.yaml", "seeds": [0], "arms": {"a": arm}}
    content["choose"] = {"by": "validation.x"}
    (tmp_path / "t.yaml").write_text(json.dumps(content))
    study = Study.read(tmp_path / "t.yaml")
    chosen = {"model.init_args.lora": lora[1], "model.init_args.lr": 0.01}
    assert study.told("a", chosen) == "scale 2.0, lr 0.01"
    assert study.told("a", chosen, edges=True) == "scale 2.0, lr 0.01 (the highest tried)"
    assert study.told("a", chosen | {"model.init_args.lr": "1e-3"}, edges=True).endswith("lr 1e-3")
    lowest = study.told("a", chosen | {"model.init_args.lr": "1e-4"}, edges=True)
    assert lowest.endswith("lr 1e-4 (the lowest tried)")


def test_a_changed_definition_is_a_new_run(study, tmp_path):
    place = study.runs()[0].place
    assert study.runs(["--trainer.max_epochs", "1"])[0].place != place
    study.config.write_text("seed_everything: 1\n")
    assert study.runs()[0].place != place


@pytest.mark.parametrize(
    "change, told",
    [
        ({"arm": {}}, "must have the keys config, seeds and arms"),
        ({"config": "no.yaml"}, "config='no.yaml' is no file"),
        ({"seeds": []}, "seeds must be a list of whole numbers"),
        ({"seeds": ["a"]}, "seeds must be a list of whole numbers"),
        ({"seeds": [0, 0]}, "seeds must be a list of whole numbers, each once"),
        ({"arms": {"a/../b": {}}}, "arm 'a/../b' must be a name of letters"),
        ({"settings": "abc"}, "settings must map names to values, found 'abc'"),
        ({"choose": "min"}, "choose must map names to values, found 'min'"),
        ({"choose": {"by": "validation.x", "settings": None}}, "choose.settings must map keys"),
        ({"figures": {"x": {"path": "a.b", "form": ".3q"}}}, "a.b: form='.3q' prints no number"),
        ({"frontier": {"learned": "loss", "kept": "loss"}}, "kept must be a list of figures"),
        (
            {"frontier": {"learned": "loss", "kept": ["x"]}},
            "frontier names 'x', which is not among",
        ),
        ({"against": ["b"]}, "against names 'b', which is not among a"),
        ({"arms": {}}, "arms must map names"),
        ({"arms": {"x": 3}}, "arm 'x' must map keys"),
    ],
)
def test_a_study_that_does_not_fit_is_refused(tmp_path, change, told):
    (tmp_path / "base.yaml").touch()
    content = {"config": "base.yaml", "seeds": [0], "arms": {"a": {}}, **change}
    (tmp_path / "s.yaml").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=told):
        Study.read(tmp_path / "s.yaml")


# Stands in for a trainer whose validation loss is lowest at rate 0.2, and whose test would say 0.3.
CHOOSER = """
import json, pathlib, sys
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
seed, rate = int(value("--seed_everything")), float(value("--rate"))
folder = pathlib.Path(value("--run.root"), value("--run.name"), f"20260101-000000-seed{seed}")
folder.mkdir(parents=True)
record = {"finished": True, "validation": {"loss": {"value": abs(rate - 0.2)}},
          "test": {"top1": {"value": rate}, "loss": {"value": 0.0}}, "short": "--short" in words,
          "training": {"seconds": 1.0}}
(folder / "record.json").write_text(json.dumps(record))
"""


def test_what_an_arm_leaves_open_is_chosen_on_validation_and_trained_with_all_seeds(tmp_path):
    (tmp_path / "base.yaml").touch()
    (tmp_path / "train.py").write_text(CHOOSER)
    (tmp_path / "s.yaml").write_text(
        "config: base.yaml\nseeds: [0, 1]\narms:\n  open: {rate: {choose: [0.1, 0.2, 0.3]}}\n"
        "  shut: {rate: 0.3}\n"
        "choose: {by: validation.loss.value, seed: 5, settings: {short: true}}\n"
        "frontier: {learned: loss, kept: [test top-1]}\n"
    )
    study, root = Study.read(tmp_path / "s.yaml"), tmp_path / "runs"
    assert [run.arm for run in study.runs(root=root)] == ["shut", "shut"]  # nothing chosen yet
    train = [sys.executable, str(tmp_path / "train.py")]
    told = []
    assert run_study(study, train, root, tell=told.append) == []
    assert "open: rate 0.2 was best on validation" in told
    opened, shut = summarise(study, root)
    assert opened["chosen"] == {"rate": 0.2} and shut["chosen"] == {}
    assert opened["figures"]["test top-1"]["by_seed"] == {0: 0.2, 1: 0.2}
    assert [found["settings"]["rate"] for found in opened["candidates"]] == [0.1, 0.2, 0.3]
    runs = study.choosing_runs()
    assert all(run.seed == 5 and run.record(root)["short"] for run in runs)
    assert not any(run.record(root)["short"] for run in study.runs(root=root))
    table = markdown(study, [opened, shut])
    assert "Candidates, short True, seed 5 (* chosen)" in table
    assert "| open | rate 0.3 | 0.1000 | 0.3000 |" in table
    assert "| open | rate 0.2 * | 0.0000 | 0.2000 |" in table


def test_a_choice_by_the_reported_part_is_refused(tmp_path):
    (tmp_path / "base.yaml").touch()
    content = {"config": "base.yaml", "seeds": [0], "arms": {"a": {"rate": {"choose": [1, 2]}}}}
    (tmp_path / "s.yaml").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="leaves a choice"):
        Study.read(tmp_path / "s.yaml")
    (tmp_path / "s.yaml").write_text(json.dumps({**content, "choose": {"by": "test.loss.value"}}))
    with pytest.raises(ValueError, match="what is reported must not choose"):
        Study.read(tmp_path / "s.yaml")


def test_seed_1_is_not_seed_10(tmp_path):
    (tmp_path / "base.yaml").touch()
    (tmp_path / "s.yaml").write_text("config: base.yaml\nseeds: [10, 1]\narms:\n  a: {}\n")
    study, root = Study.read(tmp_path / "s.yaml"), tmp_path / "runs"
    ten, one = study.runs()
    for name in ("20260101-000000-seed10", "20260101-000001-seed1-2"):
        (root / one.place / name).mkdir(parents=True)
    assert [folder.name for folder in one.folders(root)] == ["20260101-000001-seed1-2"]
    assert [folder.name for folder in ten.folders(root)] == ["20260101-000000-seed10"]


@pytest.mark.parametrize("goal", ["min", "max"])
def test_a_candidate_without_the_figure_is_never_the_best(goal):
    from mmpreproj.studies.study import Choice

    choice = Choice(by="validation.loss.value", goal=goal)
    assert choice.best([None, 2.0, float("nan"), 3.0]) == (1 if goal == "min" else 3)
    assert choice.best([None, None]) is None


@pytest.mark.parametrize("name", ["probe", "claims_images"])
def test_the_records_in_docs_give_the_table_there(name):
    """Their folders are named after what the runs were made of, configs/probe.yaml included."""
    root = Path(__file__).parents[1]
    study, results = Study.read(root / f"configs/studies/{name}.yaml"), root / "docs/results"
    assert markdown(study, summarise(study, results)) == (results / f"{name}.md").read_text()
