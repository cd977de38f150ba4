"""The video classifier: views are averaged, label sets are counted apart, time is tested."""

import math

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from mmpreproj.training import VideoClassifier, load_run
from mmpreproj.training.video_classifier import output_names, retimed

TINY = {
    "img_size": 16,
    "patch_size": 8,
    "num_frames": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
}
SETS = {"digit": ["0", "1", "2"], "way": ["left", "right"]}


class Clips(LightningDataModule):
    """Random clips; those of the evaluation have two views."""

    def __init__(self, sets=None, n=8, marks=()):
        super().__init__()
        self.label_sets = SETS if sets is None else sets
        self.opposites = {"way": {"left": "right", "right": "left"}}
        draw = torch.Generator().manual_seed(5)
        sizes = [len(classes) for classes in self.label_sets.values()]
        self.targets = torch.stack([torch.arange(n) % size for size in sizes], 1)
        self.clips = torch.randn(n, 3, 4, 16, 16, generator=draw)
        self.views = torch.randn(n, 2, 3, 4, 16, 16, generator=draw)
        self.marked = self.targets.clone()
        for index in marks:
            self.marked[index] = -2 - self.marked[index]
        self.data_config = None

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.clips, self.targets), batch_size=4)

    def val_dataloader(self):
        return DataLoader(TensorDataset(self.views[:, :1], self.marked), batch_size=4)

    def test_dataloader(self):
        return DataLoader(TensorDataset(self.views, self.marked), batch_size=3)


def trainer(folder, **keywords):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False}
    return Trainer(default_root_dir=folder, **{**settings, **quiet, **keywords})


def classifier(**keywords):
    return VideoClassifier(model_args=TINY, **keywords)


@torch.no_grad()
def test_a_video_scores_the_mean_probability_of_its_views(tmp_path):
    module, data = classifier(), Clips()
    trainer(tmp_path).test(module, data, verbose=False)
    logits = torch.stack([module.model(data.views[:, view]) for view in (0, 1)]).double()
    result = module.test_result
    for name, part, target in zip(SETS, logits.split([3, 2], -1), data.targets.T, strict=True):
        scores = part.softmax(-1).mean(0)
        found = result["sets"][name]
        assert found["n"] == 8
        assert found["correct"] == int((scores.argmax(1) == target).sum())
        loss = -scores[torch.arange(8), target].log().mean()
        assert found["loss"] == pytest.approx(float(loss), rel=1e-5)
    tops = [result["sets"][name]["top1"] for name in SETS]
    assert result["top1"] == pytest.approx(sum(tops) / 2)


@torch.no_grad()
def test_the_training_loss_is_the_sum_over_label_sets(tmp_path):
    module, data = classifier(optimizer={"lr": 1e-12}), Clips(n=4)
    trainer(tmp_path).fit(module, data)
    parts = module.model.eval()(data.clips).split([3, 2], 1)
    expected = sum(F.cross_entropy(p, t) for p, t in zip(parts, data.targets.T, strict=True))
    assert module.history[0]["train/loss"] == pytest.approx(float(expected), rel=1e-4)
    assert module.history[0]["val/top1"] == pytest.approx(
        (module.history[0]["val/top1_digit"] + module.history[0]["val/top1_way"]) / 2
    )


def test_an_unreadable_video_counts_as_wrong_in_every_label_set(tmp_path):
    module = classifier(controls=["reversed"])
    trainer(tmp_path).test(module, Clips(marks=(0, 5)), verbose=False)
    for found in module.test_result["sets"].values():
        assert (found["n"], found["n_loss"]) == (8, 6) and found["correct"] <= 6
    reversed_ = module.metrics(module.test_result)["controls"]["reversed"]
    assert reversed_["opposite"]["n"] == 6


class ReadsTheWay(torch.nn.Module):
    """Says which of the first and last frames is the brighter one: left or right. Digits: 0."""

    num_frames = 4
    patch_embed = None

    def forward(self, clips):
        means = clips.mean((1, 3, 4))
        later = 20 * (means[:, -1] - means[:, 0])
        zeros = torch.zeros_like(later)
        return torch.stack([zeros + 9, zeros, zeros, -later, later], 1)


def test_controls_change_the_order_of_frames_and_nothing_else(tmp_path):
    module, data = classifier(controls=["reversed", "shuffled", "still"]), Clips(n=12)
    ramp = torch.linspace(-1, 1, 4).view(1, 1, 1, 4, 1, 1)
    sign = torch.where(data.targets[:, 1] == 1, 1.0, -1.0).view(-1, 1, 1, 1, 1, 1)
    data.views = (ramp * sign).expand(12, 2, 3, 4, 16, 16).contiguous()
    running = trainer(tmp_path)
    module.trainer = running
    running.datamodule = data
    module.configure_model()
    module.model = ReadsTheWay()
    running.test(module, data, verbose=False)
    found = module.metrics(module.test_result)
    assert found["label_sets"]["way"]["top1"]["value"] == 1.0
    controls = found["controls"]
    assert controls["reversed"]["label_sets"]["way"]["top1"]["value"] == 0.0
    assert controls["reversed"]["opposite"] == {**controls["reversed"]["opposite"], "correct": 12}
    assert controls["still"]["label_sets"]["way"]["top1"]["value"] == 0.5  # always the first class
    digits = {n: c["label_sets"]["digit"]["top1"]["correct"] for n, c in controls.items()}
    assert set(digits.values()) == {4}  # a third of the twelve
    assert any("opposite" in row[0] for row in module.headline(found))


def test_retimed_clips():
    clips = torch.arange(2 * 3 * 5).float().reshape(2, 1, 1, 15, 1, 1)[:, :, :, :5]
    assert retimed(clips, "reversed", [0, 1])[0].flatten().tolist() == [4, 3, 2, 1, 0]
    assert retimed(clips, "still", [0, 1])[1].flatten().tolist() == [17] * 5
    shuffled = retimed(clips, "shuffled", [0, 1])
    assert sorted(shuffled[0].flatten().tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(shuffled[1:], retimed(clips[1:], "shuffled", [1]))
    orders = shuffled.flatten(1) - torch.tensor([[0.0], [15.0]])
    assert not torch.equal(orders[0], orders[1])


def test_one_label_set_is_recorded_as_for_images(tmp_path):
    module = classifier(mix={"mixup": 0.8, "cutmix": 1.0})
    data = Clips(sets={"class": ["a", "b", "c"]})
    running = trainer(tmp_path)
    running.fit(module, data)
    assert math.isfinite(module.history[0]["train/loss"])
    running.test(module, data, verbose=False)
    found = module.metrics(module.test_result)
    assert found["top1"]["n"] == 8 and "label_sets" not in found
    assert [row["class"] for row in module.facts()["per_class"]] == ["a", "b", "c"]
    running.save_checkpoint(tmp_path / "last.ckpt")
    loaded, _ = load_run(tmp_path / "last.ckpt")
    assert loaded.label_sets == {"class": ["a", "b", "c"]}
    clips = data.clips[:2]
    assert torch.equal(loaded(clips), module.eval()(clips))


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mixed clips have one label set"):
        trainer(tmp_path).fit(classifier(mix={"mixup": 0.8}), Clips())
    with pytest.raises(ValueError, match="found 'backwards'"):
        classifier(controls=["backwards"])
    module = classifier()
    trainer(tmp_path).test(module, Clips(), verbose=False)
    other = Clips(sets={"digit": ["0", "1", "2"], "way": ["right", "left"]})
    with pytest.raises(ValueError, match="classes are not those the model was trained on"):
        trainer(tmp_path).test(module, other, verbose=False)


def test_outputs_are_named():
    assert output_names({"class": ["a", "b"]}) == ["a", "b"]
    assert output_names(SETS)[-2:] == ["way: left", "way: right"]


def test_shuffled_frames_do_not_depend_on_the_batches(tmp_path):
    found = []
    for size in (2, 5):
        data = Clips(n=10)
        data.test_dataloader = lambda size=size, data=data: DataLoader(
            TensorDataset(data.views, data.marked), batch_size=size
        )
        torch.manual_seed(0)
        module = classifier(controls=["shuffled"])
        trainer(tmp_path).test(module, data, verbose=False)
        found.append(module.test_result["controls"]["shuffled"]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_data_module_of_another_kind_is_refused_by_name(tmp_path):
    from mmpreproj.data import DigitsDataModule
    from mmpreproj.training import ImageClassifier

    with pytest.raises(ValueError, match="takes a VideoDataModule, found DigitsDataModule"):
        trainer(tmp_path).fit(classifier(), DigitsDataModule(num_workers=0))
    with pytest.raises(ValueError, match="Clips goes with VideoClassifier"):
        trainer(tmp_path).fit(ImageClassifier(), Clips())
