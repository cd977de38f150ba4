"""What a mistyped key or value of a config is told as."""

import pytest
import yaml
from jsonargparse import ArgumentParser

from mmpreproj.messages import explain
from mmpreproj.training.cli import main

CONFIG = {
    "model": {
        "class_path": "mmpreproj.training.ImageClassifier",
        "init_args": {"model": "vit_preproj_tiny"},
    },
    "data": {"class_path": "mmpreproj.data.DigitsDataModule"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("trainer.max_epoch", 3, "no --trainer.max_epoch; did you mean --trainer.max_epochs?"),
        ("run.nam", "x", "no --run.nam; did you mean --run.name?"),
        ("model.modle", "x", "no --model.modle; did you mean --model.model?"),
        (
            "model.optimizer.lrr",
            0.1,
            "no --model.optimizer.lrr; did you mean --model.optimizer.lr",
        ),
        (
            "model.preproj.expansoin",
            2,
            "--model.preproj.expansoin; did you mean --model.preproj.expansion",
        ),
        (
            "model.preproj",
            "{expansoin: 2}",
            "--model.preproj.expansoin; did you mean --model.preproj.expansion",
        ),
        ("data.xyz", 4, "no --data.xyz; there are augment, batch_size, .*img_size"),
        ("model.optimizer.lr", "abc", "model.optimizer.lr: expected float, found 'abc'"),
        ("data.batch_size", "x", "data.batch_size: expected int, found 'x'"),
        ("trainer.max_epochs", "x", "trainer.max_epochs: expected int or null, found 'x'"),
        ("model.model_args", 3, "model.model_args: expected dict.str, Any. or null, found '3'"),
        ("seed_everything", "x", "seed_everything: expected bool or int, found 'x'"),
        ("trainer.precision", "bf17", "trainer.precision: expected .*'bf16-mixed'.*, found 'bf17'"),
        ("model.class_path", "mmpreproj.training.Nope", "mmpreproj.training' has no attribute"),
        ("data.batch_size", 0, "^batch sizes must be 1 or more, got 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_in_a_line(tmp_path, key, value, told):
    path = tmp_path / "vit.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(ValueError, match=told.replace("?", r"\?")) as caught:
        main([str(path), f"--{key}", str(value)])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("part", "changed", "told"),
    [
        ("trainer", {"max_epoch": 3}, "no --trainer.max_epoch; did you mean --trainer.max_epochs?"),
        ("trainr", {"max_epochs": 3}, "no --trainr.max_epochs; did you mean --trainer.max_epochs?"),
        (
            "data",
            CONFIG["data"] | {"init_args": {"batch_sise": 3}},
            "no --data.batch_sise; did you mean --data.batch_size?",
        ),
        (
            "model",
            CONFIG["model"] | {"init_args": {"model": "vit_preproj_tiny", "optimizer": {"lrr": 1}}},
            "no --model.optimizer.lrr; did you mean --model.optimizer.lr",
        ),
    ],
)
def test_a_mistake_in_the_file_is_told_too(tmp_path, part, changed, told):
    path = tmp_path / "vit.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {part: changed}))
    with pytest.raises(ValueError, match=told.replace("?", r"\?")):
        main([str(path)])


def test_a_message_of_no_known_form_stays_whole():
    told = explain(ValueError("something new\nin two lines"), ArgumentParser())
    assert told == "something new\nin two lines"


def test_a_config_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="config: .*nowhere.yaml"):
        main(["nowhere.yaml"])
