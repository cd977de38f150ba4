"""Files that are not what they should be: named, refused, and never run."""

import json
import os
import shutil
import sys

import pytest
import torch
import yaml

from mmpreproj.analysis.records import read_record, read_yaml
from mmpreproj.data.video import read_videos
from mmpreproj.files import parse_json
from mmpreproj.messages import about, short
from mmpreproj.training import load_run
from mmpreproj.training.cli import TrainCLI, main
from mmpreproj.training.runs import make_data

CONFIG = """
model:
  class_path: mmpreproj.training.ImageClassifier
  init_args:
    model_args: {img_size: 16, patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2, in_chans: 1}
data: {class_path: mmpreproj.data.DigitsDataModule}
trainer: {max_epochs: 1, limit_train_batches: 1, limit_val_batches: 1, accelerator: cpu}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one batch, which has no record yet."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(CONFIG)
    run = main([str(folder / "tiny.yaml"), "--run.root", str(folder / "runs"), "--run.test=false"])
    (run / "record.json").unlink()
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


# Configs


@pytest.mark.parametrize(
    "content, told",
    [
        (b"model: \xff", "codec can't decode byte 0xff"),
        (b"model: [", "while parsing"),
        (b"- model", "it holds .'model'., where keys and their values are expected"),
        (b"", "it holds None"),
        (b"a: &a [x, *a]", "more than 100,000 values"),  # it holds itself
        (
            b"a: &a [x]\n"
            + b"\n".join(b"%c: &%c [%s]" % (n, n, b"*%c, " % (n - 1) * 9) for n in b"bcdefghijk"),
            "more than 100,000 values, aliases resolved",
        ),
        (b"a: !!python/object/apply:os.system [touch x]", "could not determine a constructor"),
        (b"a: " + b"[" * 100_000, "is not valid YAML"),
    ],
)
def test_a_config_that_is_none_is_named(content, told, tmp_path):
    (path := tmp_path / "c.yaml").write_bytes(content)
    for read in (read_yaml, lambda path: TrainCLI(["--config", str(path)])):
        with pytest.raises(ValueError, match=f"{path} is not valid YAML: .*{told}|{told}"):
            read(path)
    assert os.listdir(tmp_path) == ["c.yaml"]


@pytest.mark.parametrize("name", ["../../x", "/x", ".", "a/../../x"])
def test_a_run_does_not_leave_the_folder_of_runs(name, tmp_path):
    (path := tmp_path / "c.yaml").write_text(CONFIG)
    where = ["--run.root", str(tmp_path / "runs"), "--run.name", name]
    for args in ([str(path), *where], [str(path), "--resume", *where]):
        with pytest.raises(ValueError, match="run.name=.* must name a folder below run.root"):
            main(args)
    assert os.listdir(tmp_path) == ["c.yaml"]


def test_settings_of_another_kind_are_named(tmp_path):
    for key, value, told in (
        ("trainer", 5, "."),
        ("model", {**yaml.safe_load(CONFIG)["model"], "init_args": {"schedule": None}}, "schedule"),
    ):
        (path := tmp_path / "c.yaml").write_text(
            yaml.safe_dump({**yaml.safe_load(CONFIG), key: value})
        )
        with pytest.raises(ValueError, match=told):
            TrainCLI(["--config", str(path)])


# Runs


def change(run, edit):
    path = run / "checkpoints/last.ckpt"
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)


class Runs:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch ran",)


EDITS = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:2000]),
    "text": lambda path: path.write_text("no checkpoint"),
    "code": lambda path: torch.save({"state_dict": Runs()}, path),
    "list": lambda path: torch.save([1], path),
    "no weights": lambda path: change(path.parents[1], lambda c: c.pop("state_dict")),
    "a weight less": lambda path: change(path.parents[1], lambda c: c["state_dict"].popitem()),
    "no optimiser": lambda path: change(path.parents[1], lambda c: c.update(optimizer_states=3)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_checkpoint_that_is_none_is_named_under_resume(run, edit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    EDITS[edit](run / "checkpoints/last.ckpt")
    with pytest.raises(ValueError, match=f"{run} cannot be resumed|{run}/checkpoints/last.ckpt"):
        main(["--resume", str(run)])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("edit", [e for e in EDITS if e != "no optimiser"])
def test_a_checkpoint_that_is_none_is_named_by_load_run(run, edit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = run / "checkpoints/last.ckpt"
    EDITS[edit](path)
    with pytest.raises(ValueError, match=f"{path} (is not a checkpoint of|cannot be loaded)"):
        load_run(path)
    assert not (tmp_path / "ran").exists()


def test_a_config_of_a_run_that_is_none_is_named_under_resume(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"trainer": {"max_epochs": "x"}}))
    with pytest.raises(ValueError, match=f"{run}/config.yaml .*trainer.max_epochs: expected int"):
        main(["--resume", str(run)])
    (run / "config.yaml").write_text("- x")
    with pytest.raises(ValueError, match=f"{run}/config.yaml is not valid YAML"):
        main(["--resume", str(run)])


@pytest.mark.parametrize("value", ["stranger.X", {"class_path": "stranger.X", "init_args": {}}])
def test_a_checkpoint_does_not_import_what_it_names(run, value, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = run / "checkpoints/last.ckpt"
    for place in ("augment", None):
        shutil.copy(run / "checkpoints/best.ckpt", path)
        data = {"class_path": "mmpreproj.data.DigitsDataModule", "init_args": {place: value}}
        spec = data if place else value
        change(run, lambda c, spec=spec: c["mmpreproj"].update(data=spec))
        with pytest.raises(ValueError, match=f"{path} "):
            load_run(path)
    assert "stranger" not in sys.modules


def test_what_a_person_names_is_imported(run, tmp_path, monkeypatch):
    """An override is the person's own word, unlike what the checkpoint says."""
    (tmp_path / "own_augment.py").write_text(
        "from mmpreproj.data import DigitsAugment\nclass Own(DigitsAugment): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module, _ = load_run(run)
    spec = {"class_path": "mmpreproj.data.DigitsDataModule", "init_args": {}}
    with pytest.raises(ValueError, match="Subclasses are disabled"):
        make_data(spec, module, {"augment": "own_augment.Own"})
    assert "own_augment" in sys.modules


# JSON, and what all messages say


def test_json_that_is_none_names_its_place(tmp_path):
    for content, told in (
        (b"\xff", "x is not UTF-8: byte 0xff at offset 0"),
        ("{", "x is not JSON: "),
        ("[" * 100_000, "x is not read: its JSON is nested too deeply"),
        ("9" * 5000, "x is not JSON: .*digits"),
    ):
        with pytest.raises(ValueError, match=told):
            parse_json(content, "x")
    (tmp_path / "record.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="record.json must hold a JSON object"):
        read_record(tmp_path)


def test_errors_about_a_file_name_it_once():
    for error, told in (
        (KeyError("a"), "f cannot be read: KeyError: 'a'"),
        (ValueError("wrong"), "f cannot be read: wrong"),
        (OSError("f is gone"), "f is gone"),
        (ValueError("in f: wrong"), "in f: wrong"),
        (ValueError("x" * 9000), "f cannot be read: " + "x" * 2000 + "…"),
    ):
        with pytest.raises((ValueError, OSError)) as found, about("f"):
            raise error
        assert str(found.value) == told
    for error in (MemoryError(), ImportError("f")):  # they are not about the file
        with pytest.raises(type(error)), about("f"):
            raise error
    assert len(short("x" * 10**6)) < 100 and len(short([10**400] * 1000)) < 1000


# Lists of videos


@pytest.mark.parametrize(
    "text, columns, told",
    [
        ("a.mp4,20000000000000000000", None, "class numbers .* run from 20000000000000000000"),
        ("path,label\na.mp4,20000000000000000000", None, "from 0 to 100000 are expected"),
        (
            "youtube_id,time_start,time_end,label\n../../x,1,2,a",
            None,
            "line 2: youtube_id '../../x'",
        ),
        ("youtube_id,time_start,time_end,label\n/x,1,2,a", None, "name a file in another folder"),
        ("youtube_id,time_start,time_end,label\nx,1e400,2,a", None, "time_start and time_end"),
        ("path,a.b\nx.mp4,1", ["a.b"], r"label_columns \['a.b'\] .* a dot"),
    ],
)
def test_a_list_that_is_none_is_named(text, columns, told, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/a.csv.*{told}"):
        read_videos(tmp_path / "a.csv", tmp_path, columns)
