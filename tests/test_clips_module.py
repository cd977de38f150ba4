"""The video data module: parts, batches, marks, seeds, workers."""

import pickle

import numpy as np
import pytest
import torch
from clip_files import (
    CONFIG,
    number_of,
    reference_frames,
    video_folder,
    write_clip,
)

from mmpreproj.data.video import VideoAugment, VideoDataModule
from mmpreproj.data.video.clips import EvalClips
from mmpreproj.data.vision import normalize

pytestmark = pytest.mark.slow

PLAIN = VideoAugment(no_aug=True)
SMALL = {"input_size": (3, 4, 64, 64), "mean": (0.5,) * 3, "std": (0.25,) * 3}


def module(root, config=CONFIG, **keywords):
    settings = {"batch_size": 4, "num_workers": 0, "val_fraction": 0.25, "stride": 2}
    data = VideoDataModule(str(root), **{**settings, **keywords})
    data.data_config = config
    data.setup()
    return data


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return video_folder(tmp_path_factory.mktemp("videos"))


def all_of(loader):
    batches = list(loader)
    return torch.cat([clips for clips, _ in batches]), torch.cat([t for _, t in batches])


def test_batches_have_the_stated_shapes_and_types(tree):
    data = module(tree, views=2, crops=3)
    assert data.label_sets == {"class": ["jump", "shake hands"]} and len(data.classes) == 2
    clips, targets = next(iter(data.train_dataloader()))
    assert clips.shape == (4, 3, 4, 32, 32) and clips.dtype == torch.uint8
    assert targets.shape == (4, 1) and targets.dtype == torch.int64
    clips, targets = next(iter(data.val_dataloader()))
    assert clips.shape == (2, 1, 3, 4, 32, 32)
    clips, targets = next(iter(data.test_dataloader()))
    assert clips.shape == (4, 6, 3, 4, 32, 32) and targets[:, 0].tolist() == [0, 0, 1, 1]
    assert [data.split_size(split) for split in ("train", "val", "test")] == [6, 2, 4]


def numbers_of(clip):
    return [number_of(frame.numpy()) for frame in clip.permute(1, 2, 3, 0)]


def test_test_views_are_the_stated_frames_and_crops(tmp_path):
    video_folder(tmp_path, (("train", 4),))
    for name in ("jump/a", "shake hands/b"):
        write_clip(tmp_path / "val" / f"{name}.mp4", 30, size=(128, 64))
    data = module(tmp_path, SMALL, views=3, crops=3, stride=4, val_fraction=0.0)
    clips, _ = next(iter(data.test_dataloader()))
    # 13 frames of 30 in a clip, 17 to spare: starts 0, 8, 17
    expected = [[start, start + 4, start + 8, start + 12] for start in (0, 8, 17)]
    frames = reference_frames(tmp_path / "val" / "jump" / "a.mp4")
    for v, numbers in enumerate(expected):
        for s, left in enumerate((0, 32, 64)):
            for t, number in enumerate(numbers):
                crop = frames[number][:, left : left + 64].transpose(2, 0, 1)
                assert np.array_equal(clips[0, v * 3 + s, :, t], crop)


def test_uniform_sampling_reaches_over_the_whole_video(tree):
    data = module(tree, SMALL, sampling="uniform", augment=PLAIN)
    clips, _ = all_of(data.test_dataloader())
    assert all(numbers_of(clip[0]) == [2, 7, 12, 17] for clip in clips)
    clips, _ = all_of(data.train_dataloader())
    for clip in clips:
        assert all(5 * k <= number < 5 * k + 5 for k, number in enumerate(numbers_of(clip)))


@pytest.mark.parametrize("n", [1, 5, 6, 7, 8])
def test_videos_shorter_than_a_clip_are_padded(tmp_path, n):
    video_folder(tmp_path, (("train", 4), ("val", 2)), n=n)
    data = module(tmp_path, SMALL, views=3, augment=PLAIN, val_fraction=0.0)
    expected = [min(i, n - 1) for i in (0, 2, 4, 6)]  # a clip reaches over 7 frames
    clips, _ = all_of(data.test_dataloader())
    assert numbers_of(clips[0, 0]) == expected
    clips, _ = all_of(data.train_dataloader())
    assert clips.shape[2] == 4
    assert n > 7 or all(numbers_of(clip) == expected for clip in clips)


# Random numbers and workers


def epochs(tree, seed, monkeypatch, n=2, workers=0, **keywords):
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    augment = VideoAugment(rand_augment=1)
    data = module(tree, num_workers=workers, augment=augment, drop_last=False, **keywords)
    loader = data.train_dataloader()
    return [all_of(loader) for _ in range(n)]


@pytest.mark.parametrize("workers", [1, 2])
def test_equal_seeds_give_equal_clips_with_any_number_of_workers(tree, monkeypatch, workers):
    expected = epochs(tree, 1, monkeypatch, n=3)
    torch.manual_seed(5), np.random.seed(5)
    again = epochs(tree, 1, monkeypatch, n=3, workers=workers)
    for one, other in zip(expected, again, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_a_clip_does_not_depend_on_its_batch(tree, monkeypatch):
    by_four = epochs(tree, 1, monkeypatch, n=1)[0][0]
    by_three = epochs(tree, 1, monkeypatch, n=1, batch_size=3)[0][0]
    assert torch.equal(by_four, by_three)


def test_epochs_and_seeds_differ(tree, monkeypatch):
    (first, _), (second, _) = epochs(tree, 1, monkeypatch)
    ((other, _),) = epochs(tree, 2, monkeypatch, n=1)
    ordered = lambda clips: sorted(clip.numpy().tobytes() for clip in clips)  # noqa: E731
    assert ordered(first) != ordered(second) != ordered(other)


def test_items_of_an_epoch_start_at_frames_of_their_own(tree):
    dataset = module(tree, SMALL, augment=PLAIN).train_dataloader().dataset
    starts = {numbers_of(dataset[epoch * 6 + i][0])[0] for epoch in range(4) for i in range(6)}
    assert {numbers_of(dataset[i][0])[0] for i in range(6)} != {numbers_of(dataset[0][0])[0]}
    assert len(starts) > 6 and max(starts) <= 13  # a clip reaches over 7 of 20 frames


def test_reading_in_the_main_process_first_does_not_stop_workers(tree, monkeypatch):
    data = module(tree, num_workers=2)
    loader = data.train_dataloader()
    expected = [loader.dataset[i] for i in range(6)]
    seen = [all_of(loader) for _ in range(3)]  # persistent workers, forked after the reading
    assert [len(clips) for clips, _ in seen] == [4, 4, 4]
    for i, (clip, target) in enumerate(expected):
        again = loader.dataset[i]
        assert torch.equal(clip, again[0]) and torch.equal(target, again[1])


def test_spawned_workers_read_the_same(tree, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    dataset = module(tree).train_dataloader().dataset
    assert len(pickle.dumps(dataset)) < 20_000  # no decoder, no frames
    loader = torch.utils.data.DataLoader(dataset, 3, num_workers=1, multiprocessing_context="spawn")
    clips, _ = all_of(loader)
    assert torch.equal(clips, torch.stack([dataset[i][0] for i in range(6)]))


@pytest.mark.parametrize("world, n_padding", [(1, 0), (3, 2), (8, 4)])
def test_evaluation_counts_each_video_once_on_any_number_of_processes(
    tree, monkeypatch, world, n_padding
):
    data = module(tree, views=2)
    monkeypatch.setattr(data, "_world", lambda: (world, 0))
    dataset = data.test_dataloader().dataset
    ranks = [
        torch.utils.data.DistributedSampler(dataset, world, rank, shuffle=False)
        for rank in range(world)
    ]
    items = [dataset[i] for sampler in ranks for i in sampler]
    assert sorted(int(t) for _, t in items) == [-1] * n_padding + [0, 0, 1, 1]
    assert all(clip.shape == (2, 3, 4, 32, 32) for clip, _ in items)


# Parts and classes


def test_classes_are_those_of_training_in_every_part(tmp_path):
    video_folder(tmp_path, (("train", 6),), classes=("a", "b", "c"), n=2)
    video_folder(tmp_path, (("val", 2),), classes=("a", "c"), n=2)
    with pytest.warns(UserWarning, match="test split has no videos of 'b'"):
        data = module(tmp_path)
    assert [int(t) for _, t in data.test_dataloader().dataset] == [0, 2]
    video_folder(tmp_path, (("val", 1),), classes=("new",), n=2)
    with pytest.raises(ValueError, match="does not know: 'new'"):
        module(tmp_path)


def test_classes_can_come_from_a_checkpoint(tree):
    data = VideoDataModule(str(tree), label_sets={"class": ["shake hands", "x", "jump"]})
    data.data_config = CONFIG
    with pytest.warns(UserWarning, match="no videos of 'x'"):
        data.setup("test")
    assert [int(t) for _, t in data.dataset("test")] == [2, 2, 0, 0]
    with pytest.raises(ValueError, match="does not know: 'shake hands'"):
        VideoDataModule(str(tree), label_sets={"class": ["jump", "x"]}).setup("test")


def test_numbers_in_a_list_are_positions_in_given_names(tmp_path):
    write_clip(tmp_path / "a.mp4", 2)
    (tmp_path / "test.txt").write_text("a.mp4 1\n")
    data = VideoDataModule(str(tmp_path), label_sets={"class": ["jump", "shake hands"]})
    data.data_config = CONFIG
    with pytest.warns(UserWarning, match="no videos of 'jump'"):
        data.setup("test")
    assert int(data.dataset("test")[0][1]) == 1


def test_numbers_are_not_taken_for_names_that_training_found(tmp_path):
    for part, labels in (("train", ("jump", "run")), ("test", ("0", "1"))):
        for k, label in enumerate(labels):
            write_clip(tmp_path / part / f"{k}.mp4", 2)
            with open(tmp_path / f"{part}.txt", "a") as file:
                file.write(f"{part}/{k}.mp4 {label}\n")
    with pytest.raises(ValueError, match="does not know: '0', '1'; known are 'jump', 'run'"):
        module(tmp_path, val_fraction=0.0)


def test_kinetics_layout_with_two_label_sets(tmp_path):
    for part in ("train", "val", "test"):
        rows = "digit,direction,youtube_id,time_start,time_end,split\n"
        for k in range(4):
            rows += f"{k % 2},{'north east'.split()[k // 2]},{part}{k},0,1,{part}\n"
            write_clip(tmp_path / part / f"{part}{k}_000000_000001.mp4", 8)
        (tmp_path / f"{part}.csv").write_text(rows)
    keywords = {"val": "val", "test": "test", "label_columns": ["digit", "direction"]}
    data = module(tmp_path, **keywords)
    assert data.label_sets == {"digit": ["0", "1"], "direction": ["east", "north"]}
    with pytest.raises(AttributeError, match="2 label sets"):
        _ = data.classes
    clips, targets = next(iter(data.test_dataloader()))
    assert targets.tolist() == [[0, 1], [1, 1], [0, 0], [1, 0]]
    assert data.split_size("val") == 4 and data.describe()["val_fraction"] is None


def test_marks_fill_all_label_sets(tmp_path):
    (tmp_path / "l.csv").write_text("path,digit,direction\na.mp4,3,west\n")
    (tmp_path / "a.mp4").touch()
    sets = {"digit": list("0123"), "direction": ["east", "west"]}
    data = VideoDataModule(
        str(tmp_path), test="l.csv", label_columns=["digit", "direction"], label_sets=sets
    )
    data.data_config = CONFIG
    with pytest.warns(UserWarning):
        data.setup("test")
        assert data.dataset("test")[0][1].tolist() == [-5, -3]
        assert data.dataset("test", n_padding=1)[1][1].tolist() == [-1, -1]


@pytest.mark.filterwarnings("ignore:the .* split has no videos of")
def test_the_test_part_must_be_clear(tree, tmp_path):
    video_folder(tmp_path, (("train", 2), ("val", 1), ("test", 1)), n=2)
    with pytest.raises(ValueError, match="several could be it: .*test.*val.* say it with test"):
        module(tmp_path)
    assert module(tmp_path, val="val", drop_last=False).split_size("test") == 1
    with pytest.warns(UserWarning, match="nothing will be reported: .*none of"):
        data = module(tree, val="val")  # training goes on
    assert not data.has_split("test") and data.has_split("val")
    with pytest.raises(FileNotFoundError, match="none of"):
        data.setup("test")
    with pytest.raises(FileNotFoundError, match="no 'absent' .*there are .*train"):
        module(tree, test="absent")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        module(tree / "absent")


def test_parts_must_not_be_the_same_list(tree, tmp_path):
    with pytest.raises(ValueError, match="train and test would be the same"):
        module(tree, test="train")
    write_clip(tmp_path / "a.mp4", 2)
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text("a.mp4 0\n")
    with pytest.warns(UserWarning, match="1 videos are in train and in test: .*a.mp4"):
        module(tmp_path)


def test_held_out_videos_do_not_train(tree):
    data = module(tree)
    train, val = data._parts["train"][1], data._parts["val"][1]
    assert len(train) == 6 and len(val) == 2 and not set(train) & set(val)
    targets = data._parts["val"][2][val, 0]
    assert sorted(targets.tolist()) == [0, 1]  # class by class


# On the way to the model


def test_clips_are_normalised_on_the_device(tree):
    data = module(tree)
    clips, targets = data.on_after_batch_transfer(next(iter(data.test_dataloader())), 0)
    assert clips.dtype == torch.float32 and clips.shape == (4, 1, 3, 4, 32, 32)
    raw, _ = next(iter(data.test_dataloader()))
    expected = (raw[:, :, 1].double() / 255 - 0.4) / 0.25
    assert torch.allclose(clips[:, :, 1].double(), expected, atol=1e-6)


def test_a_file_given_by_path_is_read_as_in_testing(tree):
    data = module(tree, views=2, crops=3)
    clips, _ = next(iter(data.test_dataloader()))
    transform = data.eval_transform()
    path = tree / "val" / "jump" / "0.mp4"
    frames = transform.frames(path)
    assert frames.shape == (2, 4, 64, 64, 3)
    assert [number_of(frame) for frame in frames[1]] == [13, 15, 17, 19]
    assert torch.equal(transform(path), normalize(clips[0], data.resolved_data_config))
    again = EvalClips(data.resolved_data_config, 3)(frames)
    assert torch.equal(again, clips[0])


def test_settings_that_cannot_be_are_refused(tree):
    for wrong in ({"views": 0}, {"sampling": "sparse"}, {"missing": "ignore"}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
            module(tree, **wrong)
    with pytest.raises(ValueError, match="6 training videos .* 64"):
        module(tree, batch_size=64).train_dataloader()
    data = VideoDataModule(str(tree))
    data.setup()
    with pytest.raises(ValueError, match="data_config"):
        data.train_dataloader()
