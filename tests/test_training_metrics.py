import math

import pytest
import torch

from mmpreproj.data.targets import PADDING, unreadable
from mmpreproj.training import ImageClassifier
from mmpreproj.training.metrics import EvaluationMetrics, metrics_of


def certain(classes, num_classes=3, sure=10.0):
    """Logits that name these classes."""
    return sure * torch.nn.functional.one_hot(torch.tensor(classes), num_classes).float()


def test_accuracy_and_loss_equal_those_worked_out_by_hand():
    metrics = EvaluationMetrics(3, per_class=True)
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 3.0, 0.0]])
    metrics.update(logits[:2], torch.tensor([0, 1]))
    metrics.update(logits[2:], torch.tensor([2]))  # another batch size: n weighs the mean
    found = metrics.compute()
    losses = [math.log(2 * 1 + math.e**2) - 2, math.log(2 + math.e) - 1, math.log(2 + math.e**3)]
    assert (found["n"], found["correct"], found["n_loss"]) == (3, 2, 3)
    assert found["top1"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert (found["class_correct"], found["class_n"]) == ([1, 1, 0], [1, 1, 1])
    assert "top5" not in found  # three classes: top-5 would always be 1


def test_padding_is_not_counted_and_unreadable_images_are_wrong():
    metrics = EvaluationMetrics(3, per_class=True)
    # 4 right, padding, and an unreadable image of class 1 whose zeros happen to be named class 1.
    targets = torch.tensor([0, 1, 2, 0, PADDING, unreadable(1)])
    metrics.update(certain([0, 1, 2, 0, 0, 1]), targets)
    found = metrics.compute()
    assert (found["n"], found["correct"], found["n_loss"]) == (5, 4, 4)
    assert found["top1"] == pytest.approx(0.8)
    assert (found["class_correct"], found["class_n"]) == ([2, 1, 1], [2, 2, 1])
    assert found["loss"] == pytest.approx(math.log(1 + 2 * math.exp(-10)), rel=1e-3)


def test_scores_of_nan_are_wrong_for_every_class():
    metrics = EvaluationMetrics(6, per_class=True)
    metrics.update(torch.full((3, 6), math.nan), torch.tensor([0, 1, 5]))
    metrics.update(certain([2], 6), torch.tensor([2]))
    found = metrics.compute()
    assert (found["correct"], found["top5"], found["class_correct"]) == (
        1,
        0.25,
        [0, 0, 1, 0, 0, 0],
    )
    assert math.isnan(found["loss"])


def test_an_unreadable_image_is_not_among_the_five_likeliest_either():
    metrics = EvaluationMetrics(10)
    metrics.update(certain([4, 4], 10), torch.tensor([4, unreadable(4)]))
    assert metrics.compute()["top5"] == pytest.approx(0.5)


def test_top5_counts_the_five_likeliest():
    metrics = EvaluationMetrics(7)
    logits = torch.arange(7.0).repeat(7, 1)  # class 6 first, 0 last
    metrics.update(logits, torch.arange(7))
    assert metrics.compute()["top5"] == pytest.approx(5 / 7)
    assert metrics.compute()["top1"] == pytest.approx(1 / 7)


def test_batches_of_marks_alone_and_no_batch_at_all():
    metrics = EvaluationMetrics(3)
    assert metrics.compute() == {"n": 0}
    metrics.update(certain([0, 0]), torch.tensor([PADDING, PADDING]))
    assert metrics.compute() == {"n": 0}
    metrics.update(certain([0]), torch.tensor([unreadable(0)]))
    found = metrics.compute()
    assert (found["n"], found["correct"], found["loss"]) == (1, 0, None)


def test_a_loss_that_is_nan_stays_nan():
    metrics = EvaluationMetrics(3)
    metrics.update(certain([0]), torch.tensor([0]))
    metrics.update(torch.full((1, 3), math.nan), torch.tensor([0]))
    assert math.isnan(metrics.compute()["loss"])


def test_reset_forgets():
    metrics = EvaluationMetrics(3)
    metrics.update(certain([0, 1]), torch.tensor([0, 0]))
    metrics.reset()
    metrics.update(certain([0]), torch.tensor([0]))
    assert (metrics.compute()["n"], metrics.compute()["top1"]) == (1, 1.0)


def test_the_table_of_an_image_run_counts_unreadable_files():
    metrics = EvaluationMetrics(3)
    metrics.update(certain([0, 1, 2]), torch.tensor([0, 1, unreadable(2)]))
    rows = ImageClassifier().headline(metrics_of(metrics.compute()))
    assert rows[-1] == ["  of them unreadable, so wrong", "1"]
    metrics.reset()
    metrics.update(certain([0, 1]), torch.tensor([0, 1]))
    assert len(ImageClassifier().headline(metrics_of(metrics.compute()))) == len(rows) - 1
    assert ImageClassifier().headline({}) == [[row[0], "–"] for row in rows[:2]]
