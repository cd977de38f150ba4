import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from training_data import TOOLS, classifier, tool_main, trainer

from mmpreproj.data import DigitsDataModule
from mmpreproj.data.image.digits import load_digits

pytestmark = pytest.mark.slow

evaluate_main, predict_main = tool_main("evaluate"), tool_main("predict")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a checkpoint in it, barely trained."""
    folder = tmp_path_factory.mktemp("run")
    args = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    module = classifier(model_args={**args, "in_chans": 1})
    init = {"batch_size": 32}
    module.run_info = {"data": {"class_path": "mmpreproj.data.DigitsDataModule", "init_args": init}}
    running = trainer(folder, limit_train_batches=4)
    running.fit(module, DigitsDataModule(**init))
    running.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    return folder


def test_evaluation_gives_figures_with_intervals_and_a_table_by_class(run, capsys):
    path = evaluate_main([str(run), "--data.eval_batch_size", "200"])
    assert path.parent == run and path.name.startswith("evaluation-last-")
    found = json.loads(path.read_text())
    top1 = found["test"]["top1"]
    expected = binomtest(top1["correct"], 540).proportion_ci(0.95, method="wilson")
    assert top1["n"] == 540
    assert top1["interval95"] == pytest.approx([expected.low, expected.high])
    assert [row["class"] for row in found["per_class"]] == [str(digit) for digit in range(10)]
    assert sum(row["n"] for row in found["per_class"]) == 540
    assert sum(row["correct"] for row in found["per_class"]) == top1["correct"]
    assert found["test"]["top5"]["value"] >= top1["value"]
    assert found["checkpoint"]["which"] == "best" and found["checkpoint"]["epoch"] == 0
    assert "n = 540" in capsys.readouterr().out


def test_evaluating_again_overwrites_nothing(run):
    before = set(run.glob("evaluation-*.json"))
    assert evaluate_main([str(run)]) not in before
    assert before < set(run.glob("evaluation-*.json"))


def test_evaluation_refuses_what_it_does_not_know(run):
    with pytest.raises(ValueError, match="unknown argument '--model.lr'"):
        evaluate_main([str(run), "--model.lr", "3"])
    with pytest.raises(ValueError, match="eval_batch_sise"):
        evaluate_main([str(run), "--data.eval_batch_sise", "3"])
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        evaluate_main([str(run / "none")])


def test_overrides_are_taken_from_the_command_line():
    split_overrides = evaluate_main.__globals__["split_overrides"]
    words = ["--data.root", "a b", "--data.x=1", "--data.init_args.y", "z"]
    assert split_overrides(words) == {"root": "a b", "x": "1", "y": "z"}
    with pytest.raises(ValueError, match="--data.root needs a value"):
        split_overrides(["--data.root"])


def test_predictions_are_those_of_the_model_as_a_table_and_a_picture(run, tmp_path, capsys):
    pixels = (load_digits()[0][0, 0] * 255).byte().numpy()
    file = tmp_path / "digit.png"
    Image.fromarray(pixels).save(file)
    out = tmp_path / "out.png"
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert predict_main([str(checkpoint), str(file), "--top", "3", "--out", str(out)]) == 0
    with Image.open(out) as picture:
        assert min(picture.size) > 100
    shown = capsys.readouterr().out

    from mmpreproj.training import load_run

    module, data = load_run(run)
    with torch.no_grad():
        chances = module(data.eval_transform()(Image.open(file))[None])[0].softmax(0)
    best = int(chances.argmax())
    assert f"{float(chances[best]):.2%}" in shown and "digit.png" in shown.replace("\n", "")


def test_a_bad_file_is_named_the_others_go_on_and_the_status_tells(run, tmp_path, capsys):
    fake, good = tmp_path / "fake.jpg", tmp_path / "good.jpg"
    fake.write_text("no image")
    Image.new("RGB", (20, 30), "white").save(good)
    files = [str(fake), str(good), str(tmp_path / "absent.png")]
    assert predict_main([str(run), *files, "--out", str(tmp_path / "o.png")]) == 1
    said = capsys.readouterr()
    assert "fake.jpg" in said.err and "absent.png" in said.err
    assert "good.jpg" in said.out.replace("\n", "")
    assert (tmp_path / "o.png").is_file()


def test_only_bad_files_draw_nothing(run, tmp_path):
    out = tmp_path / "o.png"
    assert predict_main([str(run), str(tmp_path / "absent.png"), "--out", str(out)]) == 1
    assert not out.exists()


def test_a_tool_runs_from_any_folder_and_shows_its_help(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent)}
    done = subprocess.run(
        [sys.executable, str(TOOLS / "train.py"), "--help"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "--trainer.max_epochs" in done.stdout
    with pytest.raises(SystemExit, match="0"):
        predict_main(["--help"])
    with pytest.raises(SystemExit, match="0"):
        evaluate_main(["--help"])
