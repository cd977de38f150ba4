"""train.py, evaluate.py and predict.py on clips and on text: small runs from YAML, end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from clip_files import video_folder
from PIL import Image
from test_training_language import llama
from text_data import character_tokenizer
from training_data import tool_main

import mmpreproj
from mmpreproj.backbones.lm import load_language_model
from mmpreproj.evaluation import Scorer, lambada, read_lambada
from mmpreproj.evaluation.encoding import continue_text
from mmpreproj.training import load_run
from mmpreproj.training.cli import main

pytestmark = pytest.mark.slow

evaluate_main, predict_main = tool_main("evaluate"), tool_main("predict")


def train(tmp_path, config, *words):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    quiet = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    return main([str(path), "--run.root", str(tmp_path / "runs"), *quiet, *words])


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    root = tmp_path_factory.mktemp("videos")
    video_folder(root)
    (root / "train" / "jump" / "empty.mp4").touch()
    (root / "val" / "jump" / "empty.mp4").touch()
    return root


@pytest.fixture(scope="module")
def video_run(clips, tmp_path_factory):
    sizes = {"img_size": 32, "num_frames": 4, "patch_size": 16}
    sizes |= {"embed_dim": 32, "depth": 1, "num_heads": 2}
    config = {
        "seed_everything": 0,
        "model": {
            "class_path": "mmpreproj.training.VideoClassifier",
            "init_args": {"model_args": sizes, "controls": ["still"]},
        },
        "data": {
            "class_path": "mmpreproj.data.VideoDataModule",
            "init_args": {"root": str(clips), "batch_size": 2, "num_workers": 0, "stride": 2},
        },
        "trainer": {"max_epochs": 1},
    }
    return train(tmp_path_factory.mktemp("video"), config)


def test_a_video_run_counts_bad_files_and_tests_without_time(video_run):
    record = json.loads((video_run / "record.json").read_text())
    assert record["test"]["top1"]["n"] == 5 and record["test"]["loss"]["n"] == 4
    assert record["data"]["n_unreadable"]["test"] == 1
    assert record["test"]["controls"]["still"]["top1"]["n"] == 5
    assert record["training"]["videos_per_second"] > 0
    assert record["input"]["input_size"] == [3, 4, 32, 32]


def test_more_views_at_evaluation(video_run, capsys):
    path = evaluate_main([str(video_run), "--data.views", "2", "--data.crops", "3"])
    found = json.loads(path.read_text())
    assert found["data"]["views"] == 2 and found["test"]["top1"]["n"] == 5
    assert {row["class"] for row in found["per_class"]} == {"jump", "shake hands"}


def test_clips_are_predicted_as_in_testing_and_drawn(video_run, clips, tmp_path, capsys):
    good = sorted((clips / "val" / "shake hands").iterdir())[0]
    out, empty = tmp_path / "out.png", clips / "val" / "jump" / "empty.mp4"
    assert predict_main([str(video_run), str(good), str(empty), "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "empty.mp4" in said.err
    with Image.open(out) as picture:
        assert picture.width > picture.height
    module, data = load_run(video_run)
    with torch.no_grad():
        chances = module(data.eval_transform()(good)).softmax(1).mean(0)
    assert f"{float(chances.max()):.2%}" in said.out


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    torch.manual_seed(0)
    llama().save_pretrained(folder / "base")
    character_tokenizer().save_pretrained(folder / "base")
    (folder / "text.txt").write_text("a bad cab\n" * 200)
    config = {
        "seed_everything": 0,
        "model": {
            "class_path": "mmpreproj.training.LanguageModel",
            "init_args": {
                "model": str(folder / "base"),
                "preproj": {},
                "freeze_base": True,
                "optimizer": {"lr": 0.02, "weight_decay": 0.0},
                "prompts": ["a bad"],
                "prompt_tokens": 4,
            },
        },
        "data": {
            "class_path": "mmpreproj.data.TextDataModule",
            "init_args": {
                "train": str(folder / "text.txt"),
                "block_size": 16,
                "cache_dir": str(folder / "cache"),
            },
        },
        "trainer": {"max_epochs": 2},
    }
    return folder, train(folder, config)


def test_a_probe_leaves_record_adapter_and_sample(language):
    folder, run = language
    record = json.loads((run / "record.json").read_text())
    assert record["checkpoint"]["why"] == "lowest val/loss"
    assert record["parameters"]["trainable"] == record["parameters"]["new"]
    assert len(record["skip_strength"]) == 2 and record["skip_strength"][0]["activation"] > 0
    assert (run / "adapter" / "preproj.json").is_file() and (run / "sample.txt").is_file()
    small = (run / "checkpoints" / "best.ckpt").stat().st_size
    assert small < 16 * record["parameters"]["new"] * 1.5 + 60_000  # weights, two moments, the rest


def test_a_text_run_is_evaluated_again_from_its_checkpoint(language, capsys):
    folder, run = language
    found = json.loads(evaluate_main([str(run)]).read_text())
    record = json.loads((run / "record.json").read_text())
    assert found["test"]["loss"]["value"] == pytest.approx(record["test"]["loss"]["value"])
    assert "test perplexity per word" in capsys.readouterr().out


def test_other_evaluations_than_the_configs_on_a_trained_model(language, video_run, tmp_path):
    _, run = language
    (tmp_path / "items.jsonl").write_text('{"text": "a bad cab"}\n{"text": "bad a bad"}\n')
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"lambada: {{task: lambada, source: {tmp_path / 'items.jsonl'}}}\n")
    found = json.loads(evaluate_main([str(run), "--evaluations", str(suite)]).read_text())
    module, _ = load_run(run)
    scorer = Scorer(module.evaluated, module.tokenizer)
    expected = lambada(scorer, read_lambada(tmp_path / "items.jsonl"))
    measured = found["test"]["tasks"]["lambada"]
    assert measured["accuracy"]["n"] == 2
    assert measured["perplexity"]["value"] == pytest.approx(expected["perplexity"]["value"])
    with pytest.raises(ValueError, match="for language models, not for VideoClassifier"):
        evaluate_main([str(video_run), "--evaluations", str(suite)])
    suite.write_text("lambada: {task: lambada}\n")
    with pytest.raises(ValueError, match="EvaluationConfig.*source"):
        evaluate_main([str(run), "--evaluations", str(suite)])
    suite.write_text("lambada: 3\n")
    with pytest.raises(ValueError, match="must map names to evaluations"):
        evaluate_main([str(run), "--evaluations", str(suite)])
    suite.write_text("- lambada\n")
    with pytest.raises(ValueError, match="suite.yaml.*holds .'lambada'., where keys and"):
        evaluate_main([str(run), "--evaluations", str(suite)])


def test_evaluation_keeps_the_precision_of_the_run(language, tmp_path):
    folder, _ = language
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["trainer"] = {"max_steps": 2, "precision": "bf16-mixed"}
    config["model"]["init_args"]["prompts"] = []
    run = train(tmp_path, config)
    record = json.loads((run / "record.json").read_text())
    found = json.loads(evaluate_main([str(run), "--accelerator", "cpu"]).read_text())
    assert found["precision"] == record["precision"] == "bf16-mixed"
    assert found["test"]["loss"]["value"] == record["test"]["loss"]["value"]
    single = evaluate_main([str(run), "--accelerator", "cpu", "--precision", "32-true"])
    assert json.loads(single.read_text())["precision"] == "32-true"


def test_prompts_are_continued_by_run_and_by_adapter_alike(language, capsys):
    folder, run = language
    assert predict_main([str(run), "a bad", "--tokens", "4"]) == 0
    by_run = capsys.readouterr().out
    words = [str(folder / "base"), "a bad", "--tokens", "4", "--adapter", str(run / "adapter")]
    assert predict_main(words) == 0
    assert capsys.readouterr().out == by_run and by_run.startswith("a")
    with pytest.raises(ValueError, match="do not fit the model's 64"):
        predict_main([str(run), "a bad", "--tokens", "100"])


def test_an_adapter_that_peft_saved_continues_prompts_in_a_process_of_its_own(language, tmp_path):
    peft = pytest.importorskip("peft")
    folder, _ = language
    loaded = load_language_model(folder / "base")
    torch.manual_seed(1)
    model = peft.get_peft_model(loaded.model, mmpreproj.PreProjPeftConfig())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "preproj" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "adapter")
    expected = continue_text(model.eval(), loaded.tokenizer, "a bad", 12)
    with model.disable_adapter():
        assert continue_text(model, loaded.tokenizer, "a bad", 12) != expected
    tool = Path(__file__).parent.parent / "tools" / "predict.py"
    words = [str(folder / "base"), "a bad", "--tokens", "12", "--adapter", tmp_path / "adapter"]
    done = subprocess.run(
        [sys.executable, tool, *words],
        env={**os.environ, "PYTHONPATH": str(tool.parent.parent)},
        **{"capture_output": True, "text": True, "timeout": 300},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected.strip()


def test_recomputing_a_frozen_model_gives_the_same_gradients(language):
    from mmpreproj.training import LanguageModel

    folder, _ = language
    ids = torch.arange(24).reshape(2, 12)
    batch = {"input_ids": ids, "targets": ids.roll(-1, 1)}
    gradients, runs = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = LanguageModel(
            model=str(folder / "base"), preproj={}, freeze_base=True, grad_checkpointing=recompute
        )
        module.configure_model()
        module.train()
        with torch.no_grad():
            for m in mmpreproj.preproj_modules(module.model).values():
                m.skip.weight.normal_(std=0.1)
        seen = []
        last = list(mmpreproj.preproj_modules(module.model).values())[-1]
        last.up.register_forward_hook(lambda *_: seen.append(1))  # noqa: B023
        from mmpreproj.training.lm_loss import lm_loss

        lm_loss(module.model, batch["input_ids"], batch["targets"], head=module.head)[0].backward()
        gradients.append([p.grad.clone() for p in module.parameters() if p.requires_grad])
        runs.append(len(seen))
    assert runs == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
