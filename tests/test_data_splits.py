"""Stratified hold-out, and the marks in targets. Counts are worked out by hand."""

import numpy as np
import pytest
import torch

from mmpreproj.data import stratified_holdout
from mmpreproj.data.targets import PADDING, decode, unreadable


def counts(targets, indices, n):
    return np.bincount(np.asarray(targets)[indices], minlength=n).tolist()


def test_classes_are_held_out_in_proportion():
    targets = np.repeat([0, 1, 2], [100, 50, 10])
    kept, held = stratified_holdout(targets, fraction=0.2)
    assert counts(targets, held, 3) == [20, 10, 2]
    assert sorted([*kept, *held]) == list(range(160))


def test_largest_remainders_make_the_total_exact():
    # 4 out of 10: exact shares 1.2, 1.2, 1.6: one each, and the fourth goes to the largest
    # remainder
    targets = np.repeat([0, 1, 2], [3, 3, 4])
    assert counts(targets, stratified_holdout(targets, n_held=4)[1], 3) == [1, 1, 2]


def test_single_images_stay_and_pairs_give_one():
    targets = np.repeat([0, 1, 2, 3], [1, 2, 3, 94])
    kept, held = stratified_holdout(targets, fraction=0.05)
    assert counts(targets, held, 4)[:3] == [0, 1, 1]
    assert counts(targets, kept, 4)[:3] == [1, 1, 2]


def test_every_class_keeps_one_however_large_the_fraction():
    targets = np.repeat([0, 1], [2, 10])
    assert counts(targets, stratified_holdout(targets, fraction=0.99)[0], 2) == [1, 1]


def test_the_split_follows_its_seed_and_nothing_else():
    targets = np.arange(300) % 7
    first = stratified_holdout(targets, fraction=0.1, seed=3)[1]
    np.random.seed(99)
    assert np.array_equal(first, stratified_holdout(targets, fraction=0.1, seed=3)[1])
    assert not np.array_equal(first, stratified_holdout(targets, fraction=0.1, seed=4)[1])


def test_nothing_is_held_at_fraction_zero():
    kept, held = stratified_holdout(np.zeros(5, int), fraction=0.0)
    assert kept.tolist() == [0, 1, 2, 3, 4] and len(held) == 0


@pytest.mark.parametrize(
    "wrong", [{}, {"fraction": 1.0}, {"fraction": 0.1, "n_held": 2}, {"n_held": 9}]
)
def test_senseless_requests_are_refused(wrong):
    with pytest.raises(ValueError):
        stratified_holdout(np.zeros(5, int), **wrong)


def test_marks_decode_to_class_readable_and_counted():
    targets = torch.tensor([0, 4, PADDING, unreadable(0), unreadable(7)])
    assert targets.tolist() == [0, 4, -1, -2, -9]
    classes, readable, counted = decode(targets)
    assert classes.tolist() == [0, 4, 0, 0, 7]
    assert readable.tolist() == [True, True, False, False, False]
    assert counted.tolist() == [True, True, False, True, True]
