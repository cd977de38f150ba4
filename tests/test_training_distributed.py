"""Two processes on the CPU: figures are over all images, and averages are the same everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clip_files import video_folder

from mmpreproj.training.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
CONFIG = """
seed_everything: 0
model:
  class_path: mmpreproj.training.ImageClassifier
  init_args:
    model: vit_preproj_tiny
    model_args: {img_size: 16, patch_size: 8, embed_dim: 32, depth: 1, num_heads: 2, in_chans: 1}
    schedule: {sched: none}
    ema_decay: 0.5
    freeze_base: true
data:
  class_path: mmpreproj.data.DigitsDataModule
  init_args: {batch_size: 64, val_fraction: 0.101,
              augment: {degrees: 0, translate: 0, scale: [1, 1]}}
trainer: {max_epochs: 1, limit_train_batches: 3, accelerator: cpu, devices: 2, strategy: ddp}
"""
CHECK = """
import hashlib, pathlib
from lightning.pytorch import Callback
from mmpreproj.training import cli

class Sums(Callback):
    def on_train_end(self, trainer, module):
        state = b"".join(t.numpy().tobytes() for t in module.ema.module.state_dict().values())
        # a file each: lines that two processes print at once can run together
        name = f"rank{trainer.global_rank}.sum"
        pathlib.Path(name).write_text(hashlib.sha256(state).hexdigest())

build = cli.TrainCLI._instantiate_trainer
cli.TrainCLI._instantiate_trainer = lambda self, config, callbacks: build(
    self, config, [*callbacks, Sums()]
)
cli.main()
"""


def run(folder, script):
    """Run a script on tiny.yaml in the folder; Lightning starts the second process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("PL_GLOBAL_SEED", "MASTER_PORT", "LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(script), "tiny.yaml"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def history_of(run):
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint["mmpreproj"]["history"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="gloo on this platform is not tested")
def test_two_processes_share_one_run_and_count_every_image_once(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(CHECK)
    run(tmp_path, "script.py")
    sums = {path.stem: path.read_text() for path in tmp_path.glob("rank*.sum")}
    assert set(sums) == {"rank0", "rank1"} and sums["rank0"] == sums["rank1"]
    (folder,) = (tmp_path / "runs" / "tiny").iterdir()
    record = json.loads((folder / "record.json").read_text())
    assert record["n"]["test"] == 540
    assert record["n"]["val"] == record["data"]["n_val"]
    assert record["data"]["n_val"] % 2 == 1  # an odd part, that two processes cannot share evenly
    assert record["n"]["train"] == 2 * 3 * 64
    assert record["training"]["processes"] == 2
    monkeypatch.chdir(tmp_path)
    one = main(["tiny.yaml", "--run.name", "one", "--trainer.devices", "1", "--trainer.strategy",
                "auto", "--data.batch_size", "128"])  # fmt: skip
    losses = [history_of(run)[0] for run in (folder, one)]
    for name in ("train/loss", "val/loss"):  # without random changes of images: to rounding
        assert losses[0][name] == pytest.approx(losses[1][name], rel=1e-6)
    for name in ("val/top1", "val/n", "train/n", "lr"):
        assert losses[0][name] == losses[1][name]


VIDEO = """
seed_everything: 0
model:
  class_path: mmpreproj.training.VideoClassifier
  init_args:
    model_args: {img_size: 32, num_frames: 4, embed_dim: 32, depth: 1, num_heads: 2}
    controls: [shuffled]
data:
  class_path: mmpreproj.data.VideoDataModule
  init_args: {root: videos, batch_size: 1, num_workers: 0, stride: 2}
trainer: {max_epochs: 1, accelerator: cpu, devices: 2, strategy: ddp}
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="gloo on this platform is not tested")
def test_two_processes_count_every_video_once_and_name_all_bad_ones(tmp_path):
    video_folder(tmp_path / "videos")
    for name in ("a", "b", "c"):  # 7 videos, 3 of them unreadable, on two processes
        (tmp_path / "videos" / "val" / "jump" / f"zz{name}.mp4").touch()
    (tmp_path / "tiny.yaml").write_text(VIDEO)
    run(tmp_path, ROOT / "tools" / "train.py")
    record = json.loads(next(tmp_path.glob("runs/tiny/*/record.json")).read_text())
    assert record["test"]["top1"]["n"] == 7 and record["test"]["loss"]["n"] == 4
    assert record["test"]["controls"]["shuffled"]["top1"]["n"] == 7
    assert record["data"]["n_unreadable"]["test"] == 3
    assert len(record["data"]["unreadable"]["test"]) == 3
