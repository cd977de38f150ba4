"""Runs that were killed, stopped, extended: they end as the unbroken run, and nothing is lost."""

import csv
import errno
import importlib.util
import io
import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import timm
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from training_data import TOOLS

import mmpreproj
from mmpreproj.analysis.records import read_record
from mmpreproj.training import ImageClassifier, load_run
from mmpreproj.training.callbacks import BestCheckpoint
from mmpreproj.training.cli import FREE, TrainCLI, main
from mmpreproj.training.console import Patient, run_tool
from mmpreproj.training.run_folder import RunFolder, WholeCheckpoints

pytestmark = pytest.mark.slow

CONFIG = """
seed_everything: 3
model:
  class_path: mmpreproj.training.ImageClassifier
  init_args:
    model: vit_preproj_tiny
    model_args: {img_size: 16, patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2, in_chans: 1,
                 proj_drop_rate: 0.2}
    optimizer: {lr: 3e-3}
    mix: {mixup: 0.2}
data:
  class_path: mmpreproj.data.DigitsDataModule
  init_args: {batch_size: 16}
trainer:
  max_epochs: 2
  limit_train_batches: 5
  limit_val_batches: 2
  limit_test_batches: 2
  accelerator: cpu
  devices: 1
  log_every_n_steps: 1
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Run in an empty folder, without plots."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmpreproj.training.runs._plots", lambda *_: None)
    Path("tiny.yaml").write_text(CONFIG)


@pytest.fixture(scope="session")
def kill_runs():
    spec = importlib.util.spec_from_file_location("kill_runs", TOOLS / "kill_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state(folder, which="last"):
    return torch.load(Path(folder) / "checkpoints" / f"{which}.ckpt", weights_only=True)


def rows(folder):
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def files(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def whole(name, *arguments):
    return main(["tiny.yaml", "--run.name", name, *arguments])


def same(kill_runs, one, other):
    """What differs between two runs, times aside."""
    return list(kill_runs.differences(*(kill_runs.result_of(run) for run in (one, other))))


class PowerCut(Exception):
    pass


def stopped(monkeypatch, at_batch, how, *arguments):
    """Start a run in which `how` happens in that training batch; the folder that it leaves."""
    step, seen = ImageClassifier.training_step, []

    def stopping(self, batch, batch_idx):
        seen.append(batch_idx)
        if len(seen) == at_batch:
            how()
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(ImageClassifier, "training_step", stopping)
        with pytest.raises((PowerCut, SystemExit)):
            main(["tiny.yaml", *arguments])
    return max(Path("runs/tiny").iterdir())


def cut():
    raise PowerCut


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


# Killed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_that_is_killed_anywhere_ends_as_the_unbroken_one(kill_runs, tmp_path):
    # updates 5 and 10, with checkpoints, are the last of an epoch
    arguments = [
        "tiny.yaml", "--run.every_n_steps", "5", "--model.ema_decay", "0.5",
        "--trainer.limit_train_batches", "9", "--trainer.accumulate_grad_batches", "2",
    ]  # fmt: skip
    for name in ("whole", "a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tiny.yaml").write_text(CONFIG)
    expected, places = kill_runs.whole(arguments, tmp_path / "whole")

    def nth(name, n):
        return [place for place, passed in enumerate(places) if passed == name][n]

    kills = {
        "a": [nth("on_validation_start", 0), 40],  # behind the checkpoint of the last update
        "b": [nth("before last.ckpt", 2), nth("after best.ckpt", 0)],
    }
    for name, at in kills.items():
        found = kill_runs.broken(arguments, tmp_path / name, at)
        assert list(kill_runs.differences(expected, found)) == [], name
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("at_batch", [3, 4])
def test_sigterm_within_a_window_lets_the_update_end_and_saves(monkeypatch, kill_runs, at_batch):
    accumulate = ["--trainer.accumulate_grad_batches", "2"]
    folder = stopped(monkeypatch, at_batch, sigterm, *accumulate)
    assert state(folder)["global_step"] == 2  # of batches 3 and 4
    main(["tiny.yaml", *accumulate, "--resume"])
    assert same(kill_runs, folder, whole("whole", *accumulate)) == []


def test_a_checkpoint_is_whole_or_as_it_was(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))  # it is not used
    path = tmp_path / "last.ckpt"
    checkpoints = WholeCheckpoints()
    checkpoints.save_checkpoint({"a": torch.zeros(9)}, path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match="last.ckpt") as told:
            checkpoints.save_checkpoint({"a": torch.zeros(9_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told.value.errno == errno.EFBIG
    assert path.read_bytes() == before and len(os.listdir(tmp_path)) == 2  # with tiny.yaml


def test_metrics_keep_every_row_and_a_torn_one_stops_nothing(monkeypatch, kill_runs):
    scores = (0.9, 0.1)  # the first epoch is the best: its checkpoint is loaded for the test
    candidates = BestCheckpoint._monitor_candidates

    def rigged(self, trainer):
        return candidates(self, trainer) | {"val/top1": torch.tensor(scores[trainer.current_epoch])}

    monkeypatch.setattr(BestCheckpoint, "_monitor_candidates", rigged)
    often = ["--run.every_n_steps", "3"]
    folder = stopped(monkeypatch, 9, cut, *often)
    assert len(rows(folder)) >= 6 + 2  # updates 1 to 6, and the epoch's
    with (folder / "metrics.csv").open("a") as file:
        file.write("1,0.00")
    main(["tiny.yaml", *often, "--resume"])
    unbroken = whole("whole", *often)
    found = rows(folder)
    assert found == rows(unbroken)
    assert [int(r["step"]) for r in found if r["train/loss_step"]] == list(range(1, 11))
    assert sum(bool(r["train/loss"]) for r in found) == 2
    assert read_record(folder / "record.json")["checkpoint"]["epoch"] == 0
    assert same(kill_runs, folder, unbroken) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_that_outlive_a_run_do_not_hold_its_folder(tmp_path):
    pytest.importorskip("fcntl")

    def holding():
        folder = RunFolder("runs", "x", 0, "")
        folder.folder = tmp_path
        folder._hold()
        return folder

    first = holding()
    started, starts = os.pipe()
    if (worker := os.fork()) == 0:
        os.write(starts, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(started, 1)
    try:
        with pytest.raises(ValueError, match="another process is training"):
            holding()
        first.release()  # as the end of its process does
        holding().release()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_several_processes_save_into_one_folder_at_once(tmp_path):
    model = timm.create_model("vit_preproj_tiny", depth=1)  # it carries the method
    ranks = []
    for _ in range(2):
        if (rank := os.fork()) == 0:
            try:
                for _ in range(20):
                    mmpreproj.save(model, tmp_path / "adapter")
                os._exit(0)
            finally:
                os._exit(1)
        ranks.append(rank)
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]
    assert not list((tmp_path / "adapter").glob("*.tmp"))
    mmpreproj.load(model, tmp_path / "adapter")


# Resumed with settings


def test_the_command_that_is_issued_again_resumes_and_others_are_refused(monkeypatch, kill_runs):
    command = ["--data.batch_size", "8", "--trainer.max_epochs", "3"]
    folder = stopped(monkeypatch, 8, cut, *command)
    before = files(folder)
    for settings, told in (
        (["--trainer.max_epochs", "1"], "begun with trainer.max_epochs: 3, .*with 1, unless more"),
        (["--model.optimizer.lr", "0.1"], "begun with model.optimizer.lr: 0.003"),
        (["--data.batch_size", "4"], "of 1 x 8 x 1 items, and here would be of 1 x 4 x 1"),
    ):
        with pytest.raises(ValueError, match=told):
            main(["tiny.yaml", "--resume", *settings])
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"processes": 2}))
    with pytest.raises(ValueError, match="of 2 x 8 x 1 items, and here would be of 1 x 8 x 1"):
        main(["tiny.yaml", "--resume"])
    (folder / "environment.json").write_bytes(before[folder / "environment.json"])
    assert files(folder) == before
    assert main(["tiny.yaml", *command, "--resume", "--data.num_workers", "0"]) == folder
    assert same(kill_runs, folder, whole("whole", *command)) == []


def test_batches_can_be_split_otherwise_between_epochs(monkeypatch, kill_runs):
    half = ["--data.batch_size", "8", "--trainer.accumulate_grad_batches", "2"]
    half += ["--trainer.limit_train_batches", "10"]  # of the same items
    cut_short = stopped(monkeypatch, 8, cut)
    monkeypatch.setattr("mmpreproj.training.cli.FREE", (*FREE, "trainer.limit_train_batches"))
    main(["tiny.yaml", "--resume", *half])
    assert read_record(cut_short / "record.json")["updates"] == 10
    assert state(cut_short)["mmpreproj"]["history"][1]["train/n"] == 80
    within = stopped(monkeypatch, 8, cut, "--run.every_n_steps", "1")
    with pytest.raises(ValueError, match="lies within an epoch"):
        main(["--resume", str(within), *half])


def test_a_finished_run_goes_on_to_more_epochs_by_the_schedule_of_all(tmp_path):
    folder = main(["tiny.yaml", "--trainer.default_root_dir", "elsewhere"])
    assert folder.parts[:2] == ("elsewhere", "tiny")
    longer = ["--trainer.max_epochs", "4"]
    again = main(["tiny.yaml", "--trainer.default_root_dir", "elsewhere", "--resume", *longer])
    assert again == folder
    record = read_record(folder / "record.json")
    assert (record["finished"], record["epochs"], record["updates"]) == (True, 4, 20)
    rates = [row["lr"] for row in state(folder)["mmpreproj"]["history"]]
    curve = [0.0015 * (1 + math.cos(math.pi * epoch / 4)) for epoch in (1, 2, 3, 4)]
    assert rates[:2] == pytest.approx([0.0015, 0.0]) and rates[2:] == pytest.approx(curve[2:])
    first = next(r for r in rows(folder) if r["step"] == "11" and r["lr"])  # behind update 11
    assert float(first["lr"]) == pytest.approx(0.0015 * (1 + math.cos(math.pi * 11 / 20)))
    assert "max_epochs: 4" in (folder / "config.yaml").read_text()
    assert main(["--resume", str(folder), *longer]) == folder  # complete


# What is told


def test_best_holds_the_weights_that_were_validated():
    folder = main(["tiny.yaml", "--trainer.val_check_interval", "2"])  # twice an epoch, inside
    record = read_record(folder / "record.json")
    module, data = load_run(folder)
    data.setup("fit")
    module.eval()
    seen = right = 0
    for number, (images, targets) in enumerate(data.val_dataloader()):
        if number < 2:
            with torch.no_grad():
                right += int((module(images).argmax(1) == targets).sum())
            seen += len(targets)
    assert record["checkpoint"]["val_top1"] == pytest.approx(right / seen)
    assert record["validation"]["top1"]["value"] == pytest.approx(right / seen)


def test_a_run_that_diverged_says_so(monkeypatch, capsys):
    monkeypatch.setattr(ImageClassifier, "forward", lambda self, x: self.model(x) * math.nan)
    step = ImageClassifier.training_step
    monkeypatch.setattr(
        ImageClassifier, "training_step", lambda self, *a: step(self, *a) * math.nan
    )
    folder = main(["tiny.yaml", "--trainer.max_epochs", "1"])
    record = read_record(folder / "record.json")
    assert record["test"]["top1"]["correct"] == 0 and record["test"]["loss"]["value"] is None
    assert record["diverged"] == "losses that are no finite numbers: training, epoch 1; test"
    assert "DIVERGED" in capsys.readouterr().out


# Lightning's parts

WORK = {
    "DeviceStatsMonitor": {},
    "EarlyStopping": {"monitor": "val/loss"},
    "LearningRateMonitor": {},
    "ModelCheckpoint": {},
    "ModelSummary": {},
    "OnExceptionCheckpoint": {"dirpath": "."},
    "RichModelSummary": {},
    "RichProgressBar": {},
    "TQDMProgressBar": {},
    "Timer": {"interval": "step"},
}
ARGUMENTS = {
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
}
BASES = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "LambdaCallback"}
BASES |= {"ProgressBar", "ThroughputMonitor"}  # those that a config cannot make


@pytest.mark.parametrize("name", sorted(set(lightning_callbacks.__all__) - BASES))
def test_every_callback_of_lightnings_works_or_is_refused(name):
    path = {"class_path": f"lightning.pytorch.callbacks.{name}"}
    path["init_args"] = ARGUMENTS.get(name, WORK.get(name, {}))
    arguments = ["tiny.yaml", f"--trainer.callbacks=[{json.dumps(path)}]"]
    if name in WORK:
        folder = main([*arguments, "--trainer.max_epochs", "1"])
        assert read_record(folder / "record.json")["updates"] == 5
    else:
        with pytest.raises(ValueError, match=f"{name} does not work here|trainer.callbacks"):
            TrainCLI(["--config", *arguments])
        assert not Path("runs").exists()


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_strategies_that_would_lose_the_run_are_refused(strategy):
    with pytest.raises(ValueError, match="set trainer.strategy: ddp"):
        TrainCLI(["--config", "tiny.yaml", "--trainer.strategy", strategy])


# The screen


def test_nothing_that_is_printed_ends_a_run(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", narrow)
    assert run_tool(lambda: print("n = 3 – 4 %", flush=True)) == 0
    assert narrow.buffer.getvalue() == b"n = 3 ? 4 %\n"
    read, write = os.pipe()
    os.close(read)
    closed = Patient(os.fdopen(write, "w"))
    print("nobody reads this", file=closed, flush=True)
    closed.close()


def test_an_error_tells_how_to_see_where_it_came_from(capsys):
    def fails():
        raise ValueError("no such thing")

    assert run_tool(fails) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no such thing",
        "(MMPREPROJ_TRACEBACK=1 shows where it came from)",
    ]
