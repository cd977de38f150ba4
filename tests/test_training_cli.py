import csv
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from mmpreproj.training import ImageClassifier, load_run
from mmpreproj.training.callbacks import BestCheckpoint, Clock
from mmpreproj.training.cli import TrainCLI, find_resumed, main, split_arguments

pytestmark = pytest.mark.slow

CONFIG = """
seed_everything: 3
model:
  class_path: mmpreproj.training.ImageClassifier
  init_args:
    model: vit_preproj_tiny
    model_args: {img_size: 16, patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2, in_chans: 1,
                 drop_path_rate: 0.2, proj_drop_rate: 0.2}
    optimizer: {lr: 3e-3}
    schedule: {warmup_epochs: 1}
    mix: {mixup: 0.2}
    ema_decay: 0.9
data:
  class_path: mmpreproj.data.DigitsDataModule
  init_args: {batch_size: 32}
trainer:
  max_epochs: 3
  limit_train_batches: 6
  accelerator: cpu
  devices: 1
  log_every_n_steps: 4
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One complete run, looked at by several tests."""
    folder = tmp_path_factory.mktemp("finished")
    before = dict(os.environ)
    (folder / "tiny.yaml").write_text(CONFIG)
    run = main(["fit", str(folder / "tiny.yaml"), "--run.root", str(folder / "runs")])
    os.environ.clear()
    os.environ.update(before)
    return run


def state(folder, which="last"):
    return torch.load(Path(folder) / "checkpoints" / f"{which}.ckpt", weights_only=True)


def rows(folder, column):
    with (Path(folder) / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get(column)]


def test_a_run_leaves_everything_in_its_own_folder(finished):
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        "config.yaml", "metrics.csv", "tensorboard", "checkpoints", "record.json",
        "environment.json", "learning_curves.png", "skip_strength.png", "skip_strength.csv",
    }  # fmt: skip
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
    }
    assert any((finished / "tensorboard").iterdir())
    assert finished.parent.name == "tiny" and finished.name.endswith("-seed3")
    assert {path.name for path in finished.parents[2].iterdir()} == {"tiny.yaml", "runs"}


def test_the_record_says_what_was_measured_and_on_what(finished):
    record = json.loads((finished / "record.json").read_text())
    top1 = record["test"]["top1"]
    assert top1["n"] == record["n"]["test"] == record["data"]["n_test"] == 540
    assert top1["interval95"][0] < top1["value"] < top1["interval95"][1]
    assert record["checkpoint"]["which"] == "best" and record["checkpoint"]["weights"] == "ema"
    assert sum(row["n"] for row in record["per_class"]) == 540
    assert sum(row["correct"] for row in record["per_class"]) == top1["correct"]
    assert record["n"]["train"] == 6 * 32 and record["epochs"] == 3 and record["updates"] == 18
    assert record["parameters"]["new"] == 2 * (2 * 40 * 32 + 32 * 32)
    assert record["training"]["images_per_second"] > 0
    assert record["training"]["seconds"] >= record["training"]["train_seconds"]
    assert [row["layer"] for row in record["skip_strength"]] == [0, 1]
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["seed"] == 3 and environment["versions"]["torch"] == torch.__version__


def test_the_record_reports_the_best_checkpoint_as_a_new_process_would(finished):
    record = json.loads((finished / "record.json").read_text())
    module, data = load_run(finished)
    history = state(finished)["mmpreproj"]["history"]
    best = max(history, key=lambda row: (row["val/top1"], -row["val/loss"]))
    assert record["checkpoint"]["epoch"] == module.loaded["epoch"] == best["epoch"]
    assert record["checkpoint"]["val_top1"] == pytest.approx(best["val/top1"])
    data.setup("test")
    right = 0
    for images, targets in data.test_dataloader():
        with torch.no_grad():
            right += int((module(images).argmax(1) == targets).sum())
    assert right == record["test"]["top1"]["correct"]


def test_the_saved_config_runs_again_as_it_is(finished):
    again = TrainCLI(["--config", str(finished / "config.yaml")])
    saved = yaml.safe_load((finished / "config.yaml").read_text())
    dumped = yaml.safe_load(again.parser.dump(again.config, skip_unset=False))
    assert dumped == saved


def test_last_and_best_hold_weights_and_plain_settings_only(finished):
    for which in ("best", "last"):
        checkpoint = state(finished, which)
        assert checkpoint["hyper_parameters"]["optimizer"]["lr"] == 3e-3
        assert checkpoint["mmpreproj"]["classes"] == [str(digit) for digit in range(10)]
    assert (finished / "config.yaml").stat().st_size < 10_000


def test_a_complete_run_is_not_run_again(finished, capsys):
    before = (finished / "record.json").stat().st_mtime_ns
    assert main(["--resume", str(finished)]) == finished
    assert "is complete already" in capsys.readouterr().out
    assert (finished / "record.json").stat().st_mtime_ns == before


def test_runs_of_one_command_have_folders_of_their_own():
    arguments = ["tiny.yaml", "--trainer.max_epochs", "2", "--run.test", "false"]
    first, second = main(arguments), main(arguments)
    assert first != second
    assert sorted(p.name for p in Path().iterdir()) == ["runs", "tiny.yaml"]
    one, two = state(first), state(second)
    torch.testing.assert_close(one["state_dict"], two["state_dict"], rtol=0, atol=0)


class PowerCut(Exception):
    pass


def interrupted(monkeypatch, at_step, *arguments):
    """Start a run that dies in the given step; the folder that it leaves."""
    step = ImageClassifier.training_step

    def dying(self, batch, batch_idx):
        if self.trainer.global_step == at_step:
            raise PowerCut
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(ImageClassifier, "training_step", dying)
        with pytest.raises(PowerCut):
            main(["tiny.yaml", *arguments])
    return next(Path("runs/tiny").iterdir())


@pytest.mark.parametrize(
    ("at_step", "arguments"),
    [(14, []), (10, ["--run.every_n_steps", "4"]), (13, ["--run.every_n_steps", "6"])],
    ids=["end of an epoch", "mid-epoch", "last step of an epoch"],
)
def test_a_resumed_run_ends_as_the_unbroken_one(finished, monkeypatch, at_step, arguments):
    folder = interrupted(monkeypatch, at_step, *arguments)
    assert not (folder / "record.json").exists()
    moved = folder.rename(folder.with_name("moved"))
    assert main(["tiny.yaml", "--resume"]) == Path("runs/tiny/moved")
    whole, resumed = state(finished), state(moved)
    assert resumed["global_step"] == whole["global_step"] == 18
    torch.testing.assert_close(resumed["state_dict"], whole["state_dict"], rtol=0, atol=0)
    assert state(moved, "best")["epoch"] == state(finished, "best")["epoch"]
    assert rows(moved, "val/top1") == rows(
        finished, "val/top1"
    )  # the file goes on, nothing is lost
    record = json.loads((moved / "record.json").read_text())
    expected = json.loads((finished / "record.json").read_text())
    assert record["test"] == expected["test"]
    assert len(json.loads((moved / "environment.json").read_text())["resumed"]) == 1


def test_the_record_tells_the_time_of_the_whole_run_not_of_its_best_epoch(monkeypatch):
    def load_state_dict(self, state):  # as if the best checkpoint were of the very start
        self.seconds, self.train_seconds, self.images = 0.0, 0.0, 0

    monkeypatch.setattr(Clock, "load_state_dict", load_state_dict)
    folder = main(["tiny.yaml", "--trainer.max_epochs", "1"])
    training = json.loads((folder / "record.json").read_text())["training"]
    seen = training["images_per_second"] * training["train_seconds"]
    assert seen == pytest.approx(6 * 32) and training["seconds"] >= training["train_seconds"] > 0


def test_without_a_validation_part_the_last_epoch_is_the_best(tmp_path):
    folder = main(["tiny.yaml", "--data.val_fraction", "0", "--trainer.max_epochs", "2"])
    record = json.loads((folder / "record.json").read_text())
    assert record["checkpoint"]["which"] == "last" and record["checkpoint"]["epoch"] == 1
    assert "no validation split" in record["checkpoint"]["why"]
    assert record["validation"] is None and record["n"]["val"] is None
    assert not (folder / "checkpoints" / "best.ckpt").exists()
    module, _ = load_run(folder, "best")
    assert module.loaded["epoch"] == 1


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", '"1e-3"'])
def test_yaml_numbers_are_numbers(text):
    Path("tiny.yaml").write_text(CONFIG.replace("3e-3", text))
    cli = TrainCLI(["--config", "tiny.yaml"])
    assert cli.model.optimizer_config.lr == 0.001
    cli = TrainCLI(["--config", "tiny.yaml", "--model.optimizer.lr", text.strip('"')])
    assert cli.model.optimizer_config.lr == 0.001


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("lr: 3e-3", "lr: off", "optimizer.lr"),
        ("lr: 3e-3", "lr: no", "optimizer.lr"),
        ("lr: 3e-3", "lr: [1]", "optimizer.lr"),
        ("lr: 3e-3", "lrr: 1", "lrr"),
        ("ema_decay: 0.9", "ema_decya: 0.9", "ema_decya"),
        ("batch_size: 32", "batch_sise: 32", "batch_sise"),
        ("batch_size: 32", "batch_size: many", "batch_size"),
        ("max_epochs: 3", "max_epoch: 3", "max_epoch"),
        ("trainer:", "trainr:", "trainr"),
    ],
)
def test_what_is_mistyped_in_the_yaml_is_named(old, new, named):
    Path("tiny.yaml").write_text(CONFIG.replace(old, new))
    with pytest.raises(ValueError, match=named):
        main(["tiny.yaml"])
    assert not Path("runs").exists()


def test_values_that_cannot_work_are_errors_that_name_them():
    for new, message in (
        ("lr: null", r"optimizer\.lr must be of type float, found null"),
        ("lr: -1", r"optimizer\.lr must be above 0, found -1\.0"),
    ):
        Path("tiny.yaml").write_text(CONFIG.replace("lr: 3e-3", new))
        with pytest.raises(ValueError, match=message):
            main(["tiny.yaml"])


def test_abbreviated_options_are_refused():
    with pytest.raises(ValueError, match="no --trainer.max_epoch; did you mean"):
        main(["tiny.yaml", "--trainer.max_epoch", "1"])


def test_the_config_can_be_printed(capsys):
    with pytest.raises(SystemExit):
        main(["tiny.yaml", "--model.ema_decay", "0.5", "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["init_args"]["ema_decay"] == 0.5


def test_the_command_line_is_taken_apart():
    config = ["--config", "a.yaml"]
    assert split_arguments(["a.yaml", "--x", "1"]) == ([*config, "--x", "1"], "a.yaml", False, None)
    assert split_arguments(["fit", "--config=b.yaml"]) == (
        ["--config=b.yaml"],
        "b.yaml",
        False,
        None,
    )
    assert split_arguments(["a.yaml", "--resume"]) == (config, "a.yaml", True, None)
    assert split_arguments(["--resume", "a.yaml"]) == (config, "a.yaml", True, None)
    assert split_arguments(["--resume", "runs/x"]) == ([], None, True, "runs/x")
    assert split_arguments(["a.yaml", "--resume=runs/x"]) == (config, "a.yaml", True, "runs/x")
    with pytest.raises(ValueError, match="train.py has no 'test': evaluate.py RUN"):
        split_arguments(["test", "a.yaml"])


@pytest.mark.parametrize(
    ("scores", "method", "epoch"),
    [((0.3, 0.9, 0.5), "training_step", 1), ((0.3, 0.9, 0.95), "test_step", 2)],
    ids=["cut behind the best epoch", "cut in the test"],
)
def test_a_resumed_run_knows_which_epoch_was_best(monkeypatch, scores, method, epoch):
    candidates = BestCheckpoint._monitor_candidates

    def rigged(self, trainer):
        score = torch.tensor(scores[trainer.current_epoch])
        return candidates(self, trainer) | {"val/top1": score}

    def dying(self, *_):
        if method == "test_step" or self.trainer.global_step == 13:
            raise PowerCut
        return step(self, *_)

    monkeypatch.setattr(BestCheckpoint, "_monitor_candidates", rigged)
    step = getattr(ImageClassifier, method)
    with monkeypatch.context() as patch:
        patch.setattr(ImageClassifier, method, dying)
        with pytest.raises(PowerCut):
            main(["tiny.yaml"])
    folder = main(["tiny.yaml", "--resume"])
    record = json.loads((folder / "record.json").read_text())
    assert record["checkpoint"]["which"] == "best"
    assert record["checkpoint"]["epoch"] == state(folder, "best")["epoch"] == epoch
    assert record["checkpoint"]["val_top1"] == pytest.approx(scores[epoch])


def test_sigterm_leaves_a_checkpoint_between_two_steps(finished, monkeypatch):
    step = ImageClassifier.training_step

    def stopping(self, batch, batch_idx):
        if self.trainer.global_step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(ImageClassifier, "training_step", stopping)
        with pytest.raises(SystemExit, match="143"):
            main(["tiny.yaml"])
    folder = next(Path("runs/tiny").iterdir())
    assert state(folder)["global_step"] == 11
    assert main(["tiny.yaml", "--resume"]) == folder
    torch.testing.assert_close(
        state(folder)["state_dict"], state(finished)["state_dict"], rtol=0, atol=0
    )
    found, expected = (json.loads((f / "record.json").read_text()) for f in (folder, finished))
    assert found["test"] == expected["test"] and found["n"] == expected["n"]
    losses = [r["train/loss"] for r in state(folder)["mmpreproj"]["history"]]
    whole = [r["train/loss"] for r in state(finished)["mmpreproj"]["history"]]
    assert losses == pytest.approx(whole, rel=1e-12)


def test_metrics_of_a_resumed_run_have_no_step_twice(monkeypatch):
    often = ["--run.every_n_steps", "4", "--trainer.log_every_n_steps", "2"]
    folder = interrupted(monkeypatch, 11, *often)
    assert max(rows(folder, "train/loss_step")) == 10  # behind the checkpoint, which is of 8
    main(["tiny.yaml", "--resume"])
    whole = main(["tiny.yaml", "--run.name", "whole", *often])
    for column in ("train/loss_step", "train/loss", "val/top1"):
        assert rows(folder, column) == rows(whole, column)


def test_a_run_that_another_process_trains_is_left_alone(finished, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    folder = interrupted(monkeypatch, 14)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = os.open(folder, os.O_RDONLY)  # as another process would hold it
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the interrupted run has let go of it
    with pytest.raises(ValueError, match="another process is training in"):
        main(["tiny.yaml", "--resume"])
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    os.close(other)
    assert main(["tiny.yaml", "--resume"]) == folder


def test_what_cannot_be_resumed_says_why(finished):
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        main(["tiny.yaml", "--resume"])
    with pytest.raises(ValueError, match="needs CONFIG"):
        main(["--resume"])
    with pytest.raises(FileNotFoundError, match="cannot be resumed"):
        main(["--resume", "runs/none"])
    with pytest.raises(ValueError, match="which config"):
        main([])
    root = str(finished.parents[1])
    assert find_resumed(["--run.root", root], "x/tiny.yaml", None) == finished


def test_a_checkpoint_is_enough_to_load_a_run_and_options_of_the_data_can_be_replaced(finished):
    alone = shutil.copy(finished / "checkpoints" / "best.ckpt", "alone.ckpt")
    module, data = load_run(alone, overrides={"batch_size": "7"})
    assert data.batch_size == 7 and module.classes == data.classes
    assert not module.training
    with pytest.raises(ValueError, match="batch_sise"):
        load_run(alone, overrides={"batch_sise": 7})
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        load_run("nothing")
    with pytest.raises(FileNotFoundError, match="no run folder"):
        load_run(Path.cwd())
    torch.save({"a": 1}, "other.ckpt")
    with pytest.raises(ValueError, match="not a checkpoint of mmpreproj"):
        load_run("other.ckpt")


def test_a_checkpoint_cannot_make_code_be_imported(finished):
    checkpoint = state(finished, "best")
    checkpoint["mmpreproj"]["data"]["class_path"] = "this.Thing"
    torch.save(checkpoint, "odd.ckpt")
    with pytest.raises(ValueError, match="names this.Thing, which is no LightningDataModule"):
        load_run("odd.ckpt")
