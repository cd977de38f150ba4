"""Weights split over two processes (FSDP2): the losses, checkpoints and adapters of one process."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sharded_runs import RUNS, STEPS
from training_data import classifier, trainer
from transformers import AutoModelForCausalLM

import mmpreproj
from mmpreproj.training import ShardedStrategy, load_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="gloo on this platform is not tested"),
]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of everything that sharded_runs.py does, once."""
    folder = tmp_path_factory.mktemp("sharded")
    path = os.pathsep.join((str(HERE.parent), str(HERE)))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, str(HERE / "sharded_runs.py"), str(folder)],
        env={**os.environ, **own}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def losses(folder, name, processes):
    """Of each step over all processes, which have equally many items each."""
    each = [json.loads(path.read_text()) for path in folder.glob(f"{name}.{processes}.*.json")]
    assert len(each) == processes
    return torch.tensor(each, dtype=torch.float64).mean(0)


@pytest.mark.parametrize("name", RUNS)
def test_sharded_training_has_the_losses_of_one_process(runs, name):
    one, two = losses(runs, name, 1), losses(runs, name, 2)
    steps = 2 * STEPS
    assert len(one) == len(two) == steps
    assert (one - one[0]).abs().max() > 1e-3  # the weights moved
    # bfloat16 has 8 bits, float32 24: sums come about in another order
    tolerance = 2e-2 if RUNS[name][2].get("precision") else 2e-5
    assert torch.allclose(two, one, rtol=tolerance, atol=0)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("file", ["plain.ckpt", "one_file.ckpt", "parts.ckpt"])
def test_a_checkpoint_goes_on_with_another_number_of_processes(runs, file, processes):
    unbroken = losses(runs, "probe", 1)[STEPS:]
    assert torch.allclose(losses(runs, f"resumed {file}", processes), unbroken, rtol=2e-5, atol=0)


def test_a_sharded_models_adapter_loads_onto_a_plain_base(runs):
    base = AutoModelForCausalLM.from_pretrained(runs / "base")
    mmpreproj.load(base, runs / "adapter")
    assert any(m.down.weight.abs().max() > 0 for m in mmpreproj.preproj_modules(base).values())
    described = json.loads((runs / "adapter" / "preproj.json").read_text())
    assert described["base"]["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["whole", "parts"])
def test_a_sharded_run_is_a_run_like_any_other(runs, name):
    (folder,) = (runs / "runs" / name).iterdir()
    record = json.loads((folder / "record.json").read_text())
    assert record["training"]["processes"] == 2 and record["test"]["perplexity"]["token"]
    module, _ = load_run(folder)
    adapted = AutoModelForCausalLM.from_pretrained(runs / "base")
    mmpreproj.load(adapted, folder / "adapter")
    trained = dict(module.model.named_parameters())
    for path, parameter in adapted.named_parameters():
        assert torch.equal(parameter, trained[path]), path
    assert (folder / "checkpoints" / "best.ckpt").is_dir() == (name == "parts")


def test_a_sharded_checkpoint_that_names_code_is_refused(runs, tmp_path):
    class Bad:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'ran'}",))

    (tmp_path / "bad.ckpt").mkdir()
    (tmp_path / "bad.ckpt" / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(ValueError, match="system, which no checkpoint needs"):
        load_run(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


def test_a_moving_average_is_refused_where_weights_are_split(tmp_path):
    module = classifier(ema_decay=0.9, num_classes=3)
    module._trainer = trainer(tmp_path)
    module._trainer.strategy.__class__ = type("S", (type(module._trainer.strategy),), {})
    module._trainer.strategy.__class__.__bases__ = (ShardedStrategy,)
    with pytest.raises(ValueError, match="ema_decay=0.9 does not work with S"):
        module.configure_model()
