import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from scipy.stats import binomtest
from training_data import TOOLS, classifier, tool_main, trainer

import mmpreproj
from mmpreproj.data import DigitsDataModule
from mmpreproj.data.image.digits import load_digits
from mmpreproj.training import load_run

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


def test_measuring_says_what_each_part_does(run, tmp_path, capsys):
    """The loss with the skip off is that of a skip whose weight is zero."""
    tool_main("measure")([str(run), "--items", "40", "--out", str(tmp_path / "measured.json")])
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["n"] == 40 and "blocks.0.attn" in capsys.readouterr().out
    module, data = load_run(run)
    data.setup("test")
    batches = [(data.finish(*batch), batch[1]) for batch in data.test_dataloader()]  # of 32
    images, targets = (torch.cat(parts)[:40] for parts in zip(*batches, strict=True))

    def loss():
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(module.evaluated(images), targets))

    whole = loss()
    (preproj,) = mmpreproj.preproj_modules(module.evaluated).values()
    torch.nn.init.zeros_(preproj.skip.weight)
    (row,) = found["loss_rises"]
    assert row["skip"] == pytest.approx(loss() - whole, abs=1e-5)


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


def rows_of(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_file_and_every_confusion_is_written_when_asked(run):
    path = evaluate_main([str(run), "--files"])
    record = json.loads(path.read_text())
    rows = rows_of(path.with_suffix(".files.csv"))
    assert len(rows) == 540
    assert sum(int(row["correct"]) for row in rows) == record["test"]["top1"]["correct"]
    table = rows_of(path.with_suffix(".confusion.csv"))
    for row, known in zip(table, record["per_class"], strict=True):
        counts = {name: int(count) for name, count in row.items() if name != "true"}
        assert sum(counts.values()) == known["n"] and counts[row["true"]] == known["correct"]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_folder_of_pictures_is_predicted_into_a_table(kind, run, tmp_path, capsys):
    pixels = (load_digits()[0][:3, 0] * 255).byte().numpy()
    (tmp_path / "below").mkdir()
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / "below" / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    table = tmp_path / f"table.{kind}"
    options = ["--table", str(table), "--top", "2", "--out", str(tmp_path / "o.png")]
    assert predict_main([str(run), str(tmp_path), *options, "--dtype", "bfloat16"]) == 0
    rows = rows_of(table)
    assert [Path(row["file"]).name for row in rows] == [f"{i}.png" for i in range(3) for _ in "ab"]
    assert [int(row["rank"]) for row in rows] == [1, 2] * 3
    assert float(rows[0]["probability"]) >= float(rows[1]["probability"])
    with pytest.raises(FileNotFoundError, match="holds no pictures or clips"):
        (tmp_path / "empty").mkdir()
        predict_main([str(run), str(tmp_path / "empty")])


def test_an_adapter_folder_of_a_timm_model_is_enough(tmp_path, monkeypatch):
    create = timm.create_model
    name, weights = "vit_tiny_patch16_224.augreg_in21k_ft_in1k", {}

    def cached(name, pretrained=False, **kwargs):  # as if its weights had been downloaded
        model = create(name, **kwargs)
        if pretrained:
            weights.update(weights or model.state_dict())
            state = {k: v for k, v in weights.items() if not k.startswith("head")}
            model.load_state_dict(state, strict=False)
        return model

    monkeypatch.setattr(timm, "create_model", cached)
    model = timm.create_model(name, pretrained=True, num_classes=3)
    mmpreproj.freeze_base(mmpreproj.attach(model), also=["head"])
    adapter = mmpreproj.save(model, tmp_path / "adapter")
    Image.new("RGB", (20, 30), "white").save(tmp_path / "white.png")
    options = ["--table", str(tmp_path / "t.csv"), "--out", str(tmp_path / "o.png")]
    assert predict_main([str(adapter), str(tmp_path / "white.png"), *options]) == 0
    found = {row["class"]: float(row["probability"]) for row in rows_of(tmp_path / "t.csv")}
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.no_grad(), Image.open(tmp_path / "white.png") as picture:
        expected = model.eval()(transform(picture.convert("RGB"))[None])[0].softmax(0)
    assert [found[str(c)] for c in range(3)] == pytest.approx(expected.tolist(), abs=1e-6)


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
