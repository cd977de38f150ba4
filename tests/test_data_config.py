"""Input configuration, the command line's view of the data modules, and a run through Lightning."""

import warnings

import jsonargparse
import lightning
import pytest
import torch
from test_data_folders import CONFIG, fill

from mmpreproj.data import ImageDataModule, ImageFolderDataModule
from mmpreproj.data.vision import resolve_data_config


def test_what_is_not_given_is_the_models():
    assert resolve_data_config(CONFIG) == {
        "input_size": [3, 8, 8],
        "interpolation": "bilinear",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
        "crop_pct": 1.0,
        "crop_mode": "center",
    }


def test_what_is_given_wins():
    found = resolve_data_config(
        CONFIG, img_size=(4, 6), mean=(0.1, 0.2, 0.3), crop_pct=0.5, interpolation="bicubic"
    )
    assert found["input_size"] == [3, 4, 6]
    assert found["mean"] == [0.1, 0.2, 0.3]
    assert (found["crop_pct"], found["interpolation"]) == (0.5, "bicubic")


def test_grey_model_gets_the_average_of_rgb_statistics():
    config = {**CONFIG, "input_size": (1, 8, 8), "mean": (0.2, 0.4, 0.6)}
    assert resolve_data_config(config)["mean"] == [pytest.approx(0.4)]


def test_mean_of_another_length_is_refused():
    with pytest.raises(ValueError, match="mean has 2 values"):
        resolve_data_config(CONFIG, mean=(0.5, 0.5))


def parser():
    made = jsonargparse.ArgumentParser(exit_on_error=False)
    made.add_subclass_arguments(ImageDataModule, "data")
    return made


@pytest.mark.parametrize("name", ["DigitsDataModule", "ImageFolderDataModule", "TimmDataModule"])
def test_yaml_builds_each_data_module(name):
    arguments = {"batch_size": 8, "val_fraction": 0.2, "img_size": [32, 48], "mean": [0.5]}
    if name != "DigitsDataModule":
        arguments |= {"root": "/data", "augment": {"color_jitter": 0.3, "scale": [0.5, 1.0]}}
    text = {"data": {"class_path": f"mmpreproj.data.{name}", "init_args": arguments}}
    built = parser().instantiate(parser().parse_object(text)).data
    assert built.batch_size == 8 and built.overrides["img_size"] == (32, 48)
    if name != "DigitsDataModule":
        assert built.augment.color_jitter == 0.3 and built.augment.scale == (0.5, 1.0)


@pytest.mark.parametrize(
    "arguments, key",
    [
        ({"batchsize": 8}, "batchsize"),
        ({"batch_size": "many"}, "batch_size"),
        ({"augment": {"hflipp": 1.0}}, "hflipp"),
        ({"augment": {"re_mode": "dots"}}, "re_mode"),
        ({"bad_images": "ignore"}, "bad_images"),
    ],
)
def test_mistyped_keys_are_named(arguments, key):
    text = {
        "data": {
            "class_path": "mmpreproj.data.ImageFolderDataModule",
            "init_args": {"root": "/data", **arguments},
        }
    }
    with pytest.raises((jsonargparse.ArgumentError, TypeError), match=key):
        parser().parse_object(text)


class Probe(lightning.LightningModule):
    """Records the batches that a model is shown."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.seen = {"train": [], "val": [], "test": []}

    def step(self, batch, split):
        images, targets = batch
        self.seen[split].append((images, targets))
        return self.layer(images.mean((2, 3))).sum()

    def training_step(self, batch):
        return self.step(batch, "train")

    def validation_step(self, batch):
        self.step(batch, "val")

    def test_step(self, batch):
        self.step(batch, "test")

    def configure_model(self):
        self.trainer.datamodule.data_config = CONFIG

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_lightning_is_given_normalised_batches_in_its_precision(tmp_path, precision):
    for name in "abcd":
        fill(tmp_path / "train" / name, 10, 100)
        fill(tmp_path / "val" / name, 5, 100)
    data = ImageFolderDataModule(str(tmp_path), num_workers=0, batch_size=6)
    model = Probe()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision=precision,
        num_sanity_val_steps=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers
        trainer.fit(model, data)
        trainer.test(model, data)
    dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16}[precision]
    for split, n in (("train", 2 * 36), ("val", 2 * 4), ("test", 20)):
        batches = model.seen[split]
        assert sum(len(targets) for _, targets in batches) == n
        assert all(images.dtype == dtype for images, _ in batches)
    # red is 100 in every image: (100 / 255 - 0.5) / 0.25
    images, _ = model.seen["test"][0]
    assert images[:, 0].float().mean().item() == pytest.approx(-0.4314, abs=2e-3)
    first, second = (torch.cat([t for _, t in model.seen["train"][k : k + 6]]) for k in (0, 6))
    assert not torch.equal(first, second)  # another order in the second epoch
