"""Loaders over class folders: batches, ranks, random numbers, what reaches the model."""

import pickle
import random

import numpy as np
import pytest
import torch
from test_data_folders import CONFIG, all_of, four_classes, module

from mmpreproj.data import AugmentConfig


@pytest.fixture
def tree(tmp_path):
    return four_classes(tmp_path)


def test_too_few_images_for_a_batch_is_an_error_before_training(tree):
    with pytest.raises(ValueError, match="36 training images .* 64"):
        module(tree, batch_size=64).train_dataloader()
    assert len(module(tree, batch_size=64, drop_last=False).train_dataloader()) == 1


def test_last_training_batch_is_dropped_or_kept(tree):
    sizes = [len(t) for _, t in module(tree, batch_size=10).train_dataloader()]
    assert sizes == [10, 10, 10]  # of 36
    sizes = [len(t) for _, t in module(tree, batch_size=10, drop_last=False).train_dataloader()]
    assert sizes == [10, 10, 10, 6]


def test_last_evaluation_batch_is_kept(tree):
    sizes = [len(t) for _, t in module(tree, eval_batch_size=6).test_dataloader()]
    assert sizes == [6, 6, 6, 2]


@pytest.mark.parametrize("world, n_padding", [(1, 0), (2, 0), (3, 1), (7, 1), (8, 4)])
def test_evaluation_is_padded_to_whole_ranks(tree, monkeypatch, world, n_padding):
    data = module(tree)
    monkeypatch.setattr(data, "_world", lambda: (world, 0))
    dataset = data.test_dataloader().dataset
    assert len(dataset) == 20 + n_padding and len(dataset) % world == 0
    # What Lightning puts in: each of the 20 images exactly once over the ranks, and the padding
    ranks = [
        torch.utils.data.DistributedSampler(dataset, world, rank, shuffle=False)
        for rank in range(world)
    ]
    targets = [dataset[i][1] for sampler in ranks for i in sampler]
    assert sorted(targets) == [-1] * n_padding + sorted([0, 1, 2, 3] * 5)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_train_on_different_images(tree, monkeypatch, world):
    seen = []
    for rank in range(world):
        data = module(tree, val_fraction=0.0, drop_last=False)
        monkeypatch.setattr(data, "_world", lambda rank=rank: (world, rank))
        sampler = data.train_dataloader().sampler
        seen.append([i % 40 for i in sampler])
    assert len({len(s) for s in seen}) == 1
    assert set().union(*seen) == set(range(40))
    assert sum(map(len, seen)) == -(-40 // world) * world


# Random numbers

STRONG = AugmentConfig(auto_augment="rand-m9-mstd0.5-inc1")


def epochs(tree, seed, workers, monkeypatch, n=2):
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    data = module(tree, num_workers=workers, augment=STRONG)
    loader = data.train_dataloader()
    return [all_of(loader) for _ in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_equal_seeds_give_equal_batches_with_any_number_of_workers(tree, monkeypatch, workers):
    first = epochs(tree, 1, workers, monkeypatch)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    again = epochs(tree, 1, 2, monkeypatch)
    for (images, targets), (images_again, targets_again) in zip(first, again, strict=True):
        assert torch.equal(images, images_again) and torch.equal(targets, targets_again)


def test_epochs_and_seeds_differ(tree, monkeypatch):
    (first, _), (second, _) = epochs(tree, 1, 0, monkeypatch)
    (other, _), _ = epochs(tree, 2, 0, monkeypatch)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_resuming_at_an_epoch_gives_the_batches_of_an_unbroken_run(tree, monkeypatch):
    unbroken = epochs(tree, 1, 0, monkeypatch, n=3)
    loader = module(tree, augment=STRONG).train_dataloader()
    loader.sampler.set_epoch(2)
    assert torch.equal(all_of(loader)[0], unbroken[2][0])


class Draws:
    """A transform that shows the three global generators' next numbers."""

    def __call__(self, image):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])


@pytest.mark.slow
def test_workers_epochs_and_ranks_draw_different_numbers(tree, monkeypatch):
    data = module(tree, num_workers=2, batch_size=5)
    draws = []
    for rank in (0, 1):
        loader = data.train_dataloader()
        loader.dataset.transform = Draws()
        loader.dataset.rank = rank
        draws += [all_of(loader)[0] for _ in range(2)]
    draws = torch.cat(draws)
    assert draws.shape == (140, 3)  # 2 ranks, 2 epochs, 35 of 36 images
    for column in draws.T:
        assert len(set(column.tolist())) == 140


def test_reading_in_the_main_process_leaves_its_generators_alone(tree):
    loader = module(tree, augment=STRONG).train_dataloader()
    iterator = iter(loader)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    next(iterator)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    # torch's moved by what DataLoader draws for its workers' base seed, if at all: not by the
    # transforms
    assert torch.equal(before[2], after[2])


def test_repeated_augmentation_shows_each_image_three_times_in_different_guise(tree):
    data = module(tree, aug_repeats=3, val_fraction=0.0, augment=STRONG, batch_size=20)
    loader = data.train_dataloader()
    order = [i % 40 for i in loader.sampler]
    assert len(order) == 40
    assert order[0] == order[1] == order[2] != order[3]
    assert len(set(order)) == 14  # 40 of 3 x 40
    images, _ = next(iter(loader))
    assert not torch.equal(images[0], images[1])


def test_datasets_pickle_for_spawned_workers(tree):
    data = module(tree)
    for loader in (data.train_dataloader(), data.test_dataloader()):
        copy = pickle.loads(pickle.dumps(loader.dataset))
        assert len(copy) == len(loader.dataset) and copy[0][0].shape == (3, 8, 8)


def test_random_erasing_is_for_training_batches_only(tree):
    data = module(tree, augment=AugmentConfig(no_aug=True, re_prob=1.0, re_mode="const"))
    images, targets = next(iter(data.train_dataloader()))
    kept = data.finish(images, targets, training=False)
    erased = data.finish(images, targets, training=True)
    assert not (kept == 0).any()
    assert ((erased == 0).flatten(1).any(1)).all()


def test_grey_models_get_grey_images(tree):
    data = module(tree, augment=STRONG)
    data.data_config = {**CONFIG, "input_size": (1, 8, 12)}
    batch = next(iter(data.train_dataloader()))
    assert batch[0].shape == (4, 1, 8, 12)
    assert data.on_after_batch_transfer(batch, 0)[0].shape == (4, 1, 8, 12)


def test_models_with_four_channels_are_refused_before_training(tree):
    data = module(tree)
    data.data_config = {**CONFIG, "input_size": (4, 8, 8)}
    with pytest.raises(ValueError, match="takes 4 input channels"):
        data.train_dataloader()
