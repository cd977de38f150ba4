import copy
import math

import pytest
import timm
import torch
from lightning.pytorch import LightningDataModule
from training_data import TinyData, classifier, trainer

import mmpreproj
from mmpreproj.data import DigitsDataModule, TextDataModule
from mmpreproj.data.loaders import Answers
from mmpreproj.training import ImageClassifier


def fit(module, data, tmp_path, **kwargs):
    running = trainer(tmp_path, **kwargs)
    running.fit(module, data)
    return running


def test_epoch_and_test_figures_equal_those_of_the_model_run_by_hand(tmp_path):
    module, data = classifier(), TinyData(n_test=10)
    running = fit(module, data, tmp_path)
    running.test(module, data, verbose=False)
    test = data._set(10, 2)
    module.eval()
    with torch.no_grad():
        logits = module(test.images)
    right = (logits.argmax(1) == test.targets).sum()
    loss = torch.nn.functional.cross_entropy(logits, test.targets)
    assert module.test_result["n"] == 10
    assert module.test_result["correct"] == right
    assert module.test_result["loss"] == pytest.approx(float(loss), rel=1e-5)
    row = module.history[0]
    assert (row["epoch"], row["train/n"], row["val/n"]) == (0, 24, 8)
    assert {"lr", "train/loss", "val/loss", "val/top1"} <= set(row)
    assert "val/top5" not in row  # three classes


@pytest.mark.slow
def test_training_learns(tmp_path):
    torch.manual_seed(0)
    module = classifier(optimizer={"lr": 3e-3, "weight_decay": 0.0})
    fit(module, TinyData(n=24, batch_size=8), tmp_path, max_epochs=30)
    assert module.history[-1]["train/loss"] < 0.3 * module.history[0]["train/loss"]


def test_the_average_moves_once_an_optimizer_step_by_its_formula(tmp_path):
    decay, weights = 0.6, []
    module = classifier(ema_decay=decay, optimizer={"lr": 1e-2})

    def after_step(optimizer, args, kwargs):
        weights.append(module.model.head.weight.detach().clone())

    torch.manual_seed(0)
    data = TinyData(n=20, batch_size=4)  # 5 batches by 2: 3 updates, the last window partial
    running = trainer(tmp_path, accumulate_grad_batches=2)

    configure = module.configure_optimizers

    def configured():
        optimizer = configure()
        optimizer.register_step_post_hook(after_step)
        return optimizer

    module.configure_optimizers = configured
    running.fit(module, data)
    assert len(weights) == 3 and running.global_step == 3
    average = weights[0]  # timm's average starts at the first update's weights
    for weight in weights[1:]:
        average = decay * average + (1 - decay) * weight
    torch.testing.assert_close(module.ema.module.head.weight, average)


def test_accumulation_is_the_larger_batch_in_a_last_shorter_window_too(tmp_path):
    found = []
    for batch_size, windows in ((4, 4), (16, 1)):  # 24 images: windows of 16 and 8
        torch.manual_seed(0)
        module = classifier(preproj=None, optimizer={"opt": "momentum", "lr": 0.1})
        data = TinyData(n=24, batch_size=batch_size)
        fit(module, data, tmp_path, accumulate_grad_batches=windows)
        found.append(module.model.state_dict())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_evaluation_uses_the_average(tmp_path):
    module, data = classifier(ema_decay=0.5), TinyData()
    running = fit(module, data, tmp_path)
    module.model.head.weight.data.fill_(math.nan)
    running.test(module, data, verbose=False)
    assert module.evaluated is module.ema.module
    assert math.isfinite(module.test_result["loss"])
    assert not any(p.requires_grad for p in module.ema.parameters())


def test_checkpoints_load_without_running_code_and_hold_no_second_copy(tmp_path):
    module, data = classifier(preproj=None, ema_decay=0.9), TinyData()
    running = fit(module, data, tmp_path)
    path = tmp_path / "a.ckpt"
    running.save_checkpoint(path, weights_only=False)
    checkpoint = torch.load(path, weights_only=True)
    own = checkpoint["mmpreproj"]
    assert own["classes"] == ["class 0", "class 1", "class 2"]
    assert own["data_config"]["input_size"] == [3, 16, 16]

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return 1
        children = value.values() if isinstance(value, dict) else value
        return sum(map(tensors, children)) if isinstance(value, dict | list | tuple) else 0

    assert tensors(checkpoint["hyper_parameters"]) == 0
    weights = sum(t.numel() * t.element_size() for t in checkpoint["state_dict"].values())
    assert path.stat().st_size < 2.2 * weights + 200_000  # weights and average, two Adam moments


def test_a_checkpoint_gives_the_same_model_back(tmp_path):
    module = ImageClassifier(
        "vit_tiny_patch16_224",
        {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2},
        preproj=mmpreproj.PreProjConfig(layers=[1], init_std=0.1),
        freeze_base=True,
    )
    running = fit(module, TinyData(), tmp_path)
    running.save_checkpoint(tmp_path / "a.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "a.ckpt", map_location="cpu").eval()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(loaded(images), module.eval()(images))
    assert loaded.classes == module.classes


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_rate_follows_updates_at_any_accumulation(tmp_path, accumulate):
    module = classifier(
        schedule={"sched": "cosine", "min_lr": 0.0}, optimizer={"opt": "sgd", "lr": 0.01}
    )
    fit(module, TinyData(n=24, batch_size=4), tmp_path, max_epochs=4,
        accumulate_grad_batches=accumulate)  # fmt: skip
    expected = [0.005 * (1 + math.cos(math.pi * epoch / 4)) for epoch in (1, 2, 3, 4)]
    assert [row["lr"] for row in module.history] == pytest.approx(expected, abs=1e-9)


def test_frozen_parts_stay_in_eval_mode_through_training_and_validation(tmp_path):
    module = ImageClassifier(
        "test_resnet", {"drop_path_rate": 0.3}, freeze_base=True, schedule={"sched": "none"}
    )
    before, modes = {}, set()
    forward = module.training_step

    def watched(batch, batch_idx):
        if not before:
            state = module.model.state_dict()
            before.update({k: v.clone() for k, v in state.items() if not k.startswith("fc.")})
        modes.update(n for n, m in module.model.named_modules() if m.training)
        return forward(batch, batch_idx)

    module.training_step = watched
    data = TinyData(n=16, batch_size=4, size=32)
    fit(module, data, tmp_path, max_epochs=2, val_check_interval=2)
    after = module.model.state_dict()
    assert any("running_mean" in name for name in before)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0)
    assert modes == {"fc"}


def test_the_frozen_probe_moves_every_new_parameter_and_nothing_else(tmp_path):
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    module = ImageClassifier(
        "vit_tiny_patch16_224", args, preproj=mmpreproj.PreProjConfig(), freeze_base=True,
        optimizer={"lr": 1e-2}, schedule={"sched": "none"},
    )  # fmt: skip
    start = {}

    def remember(trainer_, module_):
        start.update(copy.deepcopy(module.model.state_dict()))

    module.on_train_start = lambda: remember(None, None)
    with pytest.warns(UserWarning, match="freezes random weights of vit_tiny_patch16_224"):
        fit(module, TinyData(), tmp_path)
    for name, tensor in module.model.state_dict().items():
        moved = not torch.equal(tensor, start[name])
        assert moved == (".preproj." in name or name.startswith("head.")), name


@pytest.mark.parametrize("batch_size", [4, 6])
def test_a_last_batch_of_one_or_of_odd_size_works_with_mixing(tmp_path, batch_size):
    module = classifier(mix={"mixup": 0.8, "cutmix": 1.0}, label_smoothing=0.1)
    fit(module, TinyData(n=13, batch_size=batch_size), tmp_path)
    assert module.history[0]["train/n"] == 13


def test_settings_that_do_not_fit_the_data_are_errors_before_training(tmp_path):
    data = TinyData()
    with pytest.raises(ValueError, match="num_classes=7, but the data have 3 classes: class 0"):
        fit(classifier(num_classes=7), data, tmp_path)
    data.resolved_data_config = {"input_size": [3, 48, 48]}
    with pytest.raises(ValueError, match="48x48 px, the model takes 16x16"):
        fit(classifier(), data, tmp_path)
    for settings, message in (
        ({"ema_decay": 1.5}, "ema_decay must be between 0 and 1"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"weights": "a", "pretrained": True}, "not both"),
        ({"optimizer": {"lrr": 1}}, "OptimizerConfig has no field 'lrr'; it has"),
        ({"optimizer": {"lr": 0.0}}, "optimizer.lr must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier(**settings)


def test_a_model_keeps_its_classes_on_other_data(tmp_path):
    module, data = classifier(), TinyData()
    running = fit(module, data, tmp_path)
    other = TinyData()
    other.classes = ["x", "y", "z"]
    with pytest.raises(ValueError, match="data x, y, z, model class 0, class 1, class 2"):
        running.test(module, other)


def test_moving_averages_are_refused_where_weights_are_split(tmp_path):
    module = classifier(ema_decay=0.9)
    running = trainer(tmp_path)
    running.strategy.__class__ = type("FSDPStrategy", (type(running.strategy),), {})
    with pytest.raises(ValueError, match="ema_decay=0.9 does not work with FSDPStrategy"):
        running.fit(module, TinyData())


def test_gradient_checkpointing_leaves_the_loss_alone(tmp_path):
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        module = classifier(grad_checkpointing=on)
        fit(module, TinyData(), tmp_path)
        losses.append(module.history[0]["train/loss"])
        assert module.model.grad_checkpointing == on
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_grey_models_and_any_timm_model_train(tmp_path):
    module = ImageClassifier("test_vit", {"in_chans": 1, "img_size": 32})
    data = TinyData(channels=1, size=32, num_classes=6)
    fit(module, data, tmp_path)
    assert data.data_config["input_size"] == [1, 32, 32]
    assert "val/top5" in module.history[0]


def test_compiled_models_are_those_of_timm_compiled(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(type(self)))
    module = classifier(compile=True)
    fit(module, TinyData(), tmp_path)
    expected = type(timm.create_model("vit_preproj_tiny", img_size=32, depth=1))
    assert compiled == [expected]


def test_a_data_module_of_ones_own_needs_none_of_what_training_asks(tmp_path):
    class Own(LightningDataModule):
        train_dataloader = TinyData.train_dataloader
        _set = TinyData._set
        n, batch_size, size, channels, classes = 8, 4, 16, 3, ("a", "b", "c")

    answers = Answers(Own())
    assert answers.gives is None and answers.label_sets is None and not answers.opposites
    assert answers.has_split("test") and answers.describe() == {"name": "Own"}
    answers.gather_bad_files()
    module = classifier()
    fit(module, Own(), tmp_path)
    assert module.classes == ["a", "b", "c"] and module.history[0]["train/n"] == 8


def test_data_of_another_kind_are_refused_by_name(tmp_path):
    assert Answers(DigitsDataModule()).gives == "images"
    with pytest.raises(ValueError, match="TextDataModule goes with LanguageModel, not with Image"):
        fit(classifier(), TextDataModule(), tmp_path)
