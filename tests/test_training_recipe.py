import math

import pytest
import timm
import torch
from torch import nn

from mmpreproj.training.recipe import (
    MixConfig,
    Mixer,
    OptimizerConfig,
    ScheduleConfig,
    make_loss,
    make_optimizer,
    make_schedule,
)


def sgd(lr=1.0):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def rates(config, total, per_epoch):
    """The rate of every update, as a training loop sees it."""
    optimizer = sgd()
    schedule = make_schedule(optimizer, config, total, per_epoch)
    found = []
    for update in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(update + 1)
    return found, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", [{"mixup": 0.8}, {"cutmix": 1.0}])
def test_batches_of_any_size_are_mixed(size, mode, kind):
    mixer = Mixer(MixConfig(mode=mode, **kind), num_classes=5, label_smoothing=0.1)
    images, targets = torch.randn(size, 3, 16, 16), torch.arange(size) % 5
    original = images.clone()
    mixed, soft = mixer(images, targets)
    assert mixed.shape == original.shape and soft.shape == (size, 5)
    torch.testing.assert_close(soft.sum(1), torch.ones(size))
    if size % 2:  # the last image is left as it is, with smoothed targets: 0.1/5, and 0.9 more
        torch.testing.assert_close(mixed[-1], original[-1])
        expected = torch.full((5,), 0.02)
        expected[targets[-1]] = 0.92
        torch.testing.assert_close(soft[-1], expected)


def test_the_even_part_of_an_odd_batch_is_really_mixed():
    mixer = Mixer(MixConfig(mixup=1.0), num_classes=3, label_smoothing=0.0)
    images = torch.randn(5, 1, 4, 4)
    mixed, _ = mixer(images.clone(), torch.tensor([0, 1, 2, 0, 1]))
    assert not torch.allclose(mixed[:4], images[:4])


def test_mixing_stops_at_its_epoch_with_targets_still_soft():
    mixer = Mixer(MixConfig(mixup=1.0, off_epoch=2), num_classes=3, label_smoothing=0.0)
    images, targets = torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    mixer.set_epoch(2)
    mixed, soft = mixer(images.clone(), targets)
    torch.testing.assert_close(mixed, images)
    torch.testing.assert_close(soft, nn.functional.one_hot(targets, 3).float())


def test_losses_equal_torchs_own():
    logits, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, targets)
    torch.testing.assert_close(make_loss(False, 0.1, False, None)(logits, targets), smooth)
    plain = nn.CrossEntropyLoss()(logits, targets)
    torch.testing.assert_close(make_loss(False, 0.0, False, None)(logits, targets), plain)
    soft = torch.rand(6, 4).softmax(1)
    expected = nn.CrossEntropyLoss()(logits, soft)
    torch.testing.assert_close(make_loss(True, 0.1, False, None)(logits, soft), expected)
    bits = (soft > 0.25).float()
    expected = nn.BCEWithLogitsLoss()(logits, bits)
    torch.testing.assert_close(make_loss(True, 0.0, True, 0.25)(logits, soft), expected)


def test_cosine_follows_its_formula_over_updates():
    found, end = rates(ScheduleConfig(min_lr=0.1), total=12, per_epoch=4)
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * t / 12)) for t in range(12)]
    assert found == pytest.approx(expected)
    assert end == pytest.approx(0.1)


def test_warmup_rises_linearly_and_counts_updates():
    found, _ = rates(ScheduleConfig(warmup_epochs=1, warmup_lr=0.0), total=12, per_epoch=4)
    assert found[:4] == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert max(found) == found[4]


def test_accumulation_leaves_the_curve_over_epochs_alone():
    config = ScheduleConfig(warmup_epochs=2, warmup_lr=0.0, min_lr=0.01)
    every, _ = rates(config, total=60, per_epoch=6)
    fourth, end = rates(config, total=20, per_epoch=2)  # 6 batches by 4: 2 updates, one partial
    assert fourth[::2] == pytest.approx(every[::6])  # the rate at the start of each epoch
    assert end == pytest.approx(0.01)


@pytest.mark.parametrize("sched", ["tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant"])
def test_every_schedule_of_the_list_runs_to_its_end(sched):
    decay = 1.0 if sched == "step" else None
    config = ScheduleConfig(
        sched=sched, warmup_epochs=1, decay_epochs=decay, decay_milestones=[1, 2]
    )
    found, _ = rates(config, total=12, per_epoch=4)
    assert all(0 <= rate <= 1 for rate in found) and max(found) > 0.5


def test_no_schedule_leaves_the_rate_alone():
    assert make_schedule(sgd(), ScheduleConfig(sched="none"), math.inf, 1) is None


def test_a_warmup_longer_than_the_run_is_shortened_with_a_warning():
    config = ScheduleConfig(warmup_epochs=3, warmup_lr=0.0)
    with pytest.warns(UserWarning, match=r"warmup_epochs=3 .* 2 epochs \(20 updates\).* 2 upd"):
        found, _ = rates(config, total=20, per_epoch=10)
    # a linear rise over a tenth, then the cosine at 2 / 20 of its way
    assert found[:3] == pytest.approx([0.0, 0.5, 0.5 * (1 + math.cos(math.pi * 0.1))])


def test_schedules_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="needs an end: set trainer.max_epochs"):
        make_schedule(sgd(), ScheduleConfig(), math.inf, 4)
    with pytest.raises(ValueError, match="cooldown_epochs=2 leaves nothing of a run of 2 epochs"):
        make_schedule(sgd(), ScheduleConfig(cooldown_epochs=2), 8, 4)
    with pytest.raises(ValueError, match="must be one of cosine.*'plateau'.*follows a metric"):
        ScheduleConfig(sched="plateau")


def test_null_where_a_number_belongs_names_the_field():
    with pytest.raises(ValueError, match=r"optimizer\.lr must be of type float, found null"):
        OptimizerConfig(lr=None)
    with pytest.raises(ValueError, match=r"mix\.mixup"):
        MixConfig(mixup=None)


def test_an_unknown_optimizer_lists_those_there_are():
    with pytest.raises(ValueError, match="optimizer.opt='adammm'.*adamw"):
        make_optimizer(nn.Linear(2, 2), OptimizerConfig(opt="adammm"))


def test_layer_decay_scales_by_block_and_frozen_blocks_do_not_shift_it():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=2)
    config = OptimizerConfig(lr=1.0, layer_decay=0.5, weight_decay=0.1)

    def scale_of(name):
        parameter = model.get_parameter(name)
        for group in make_optimizer(model, config).param_groups:
            if any(parameter is p for p in group["params"]):
                return group["lr_scale"]

    names = ["head.weight", "blocks.2.mlp.fc1.weight", "blocks.1.mlp.fc1.weight"]
    before = [scale_of(name) for name in names]
    assert before[1] / before[2] == pytest.approx(2.0)  # one factor of 0.5 a block
    model.blocks[0].requires_grad_(False)
    model.patch_embed.requires_grad_(False)
    assert [scale_of(name) for name in names] == before


def test_parts_of_the_method_have_rates_and_decay_of_their_own():
    model = timm.create_model("vit_preproj_tiny", depth=1, img_size=32, skip_rank=2)
    parts = {"skip": {"lr": 0.1, "weight_decay": 0.3}, "down": {"lr": 4}}
    config = OptimizerConfig(lr=1e-2, weight_decay=0.05, parts=parts)
    optimizer = make_optimizer(model, config)
    names = {id(p): name.removeprefix("blocks.0.attn.") for name, p in model.named_parameters()}
    of = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert of.keys() == set(names.values())  # each once, none lost
    found = {n: (of[f"preproj.{n}.weight"]["lr"], of[f"preproj.{n}.weight"]["weight_decay"])
             for n in ("skip", "reduce", "down", "up")}  # fmt: skip
    small = (pytest.approx(1e-3), 0.3)
    assert found == {"skip": small, "reduce": small, "down": (0.04, 0.05), "up": (0.01, 0.05)}
    schedule = make_schedule(optimizer, ScheduleConfig(), 10, 10)
    schedule.step_update(5)  # the middle of a cosine: half of each rate
    assert of["preproj.down.weight"]["lr"] == pytest.approx(0.02)
    assert of["preproj.skip.weight"]["lr"] == pytest.approx(5e-4)


@pytest.mark.parametrize(
    "parts, told",
    [
        ({"skipp": {"lr": 1}}, "up, down, skip"),
        ({"skip": {"rate": 1}}, "an lr"),
        ({"up": {"lr": -1}}, "up.lr must be 0 or above"),
    ],
)
def test_parts_that_do_not_exist_are_refused(parts, told):
    with pytest.raises(ValueError, match=told):
        OptimizerConfig(parts=parts)


def test_parts_that_the_model_lacks_are_refused():
    model = timm.create_model("vit_preproj_tiny", depth=1, img_size=32, content_skip=False)
    with pytest.raises(ValueError, match="names skip"):
        make_optimizer(model, OptimizerConfig(parts={"skip": {"lr": 0.1}}))
