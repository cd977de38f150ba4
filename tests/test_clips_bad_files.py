"""Videos that cannot be read or are not there: training goes on, evaluation counts them."""

import warnings

import pytest
import torch
from clip_files import video_folder, write_audio_only, write_clip
from test_clips_module import all_of, epochs, module

from mmpreproj.data.video import UnreadableVideo, read_frames


@pytest.fixture
def damaged(tmp_path):
    """Four good and four bad training videos, three good and three bad to test on."""
    video_folder(tmp_path, (("train", 4), ("val", 3)))
    for part in ("train", "val"):
        folder = tmp_path / part / "jump"
        (folder / "x empty.mp4").touch()
        (folder / "x text.mp4").write_text("hello " * 100)
        write_audio_only(tmp_path / part / "shake hands" / "x sound.mp4")
    (tmp_path / "train" / "jump" / "x list.mp4").write_text("#EXTM3U\nhttp://localhost/a.ts\n")
    return tmp_path


def test_training_goes_on_without_unreadable_videos_and_names_them(damaged, monkeypatch):
    data = module(damaged, val_fraction=0.0, drop_last=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = data.train_dataloader()
        clips, targets = all_of(loader)
        all_of(loader)
    assert len(clips) == 8 and (targets >= 0).all() and clips.flatten(1).any(1).all()
    messages = [str(w.message) for w in caught if "cannot read" in str(w.message)]
    assert len(messages) == 4  # once each, though met in two epochs
    assert data.describe()["n_unreadable"]["train"] == 4
    assert sorted(name.rsplit("/", 1)[1] for name in data.describe()["unreadable"]["train"]) == [
        "x empty.mp4",
        "x list.mp4",
        "x sound.mp4",
        "x text.mp4",
    ]


@pytest.mark.filterwarnings("ignore:cannot read")
def test_replacements_follow_the_seed_with_any_number_of_workers(damaged, monkeypatch):
    keywords = {"val_fraction": 0.0}
    expected = epochs(damaged, 3, monkeypatch, **keywords)
    again = epochs(damaged, 3, monkeypatch, workers=2, **keywords)
    for one, other in zip(expected, again, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.filterwarnings("ignore:cannot read")
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_counts_unreadable_videos_in_their_place(damaged, workers):
    data = module(damaged, views=2, num_workers=workers)
    clips, targets = all_of(data.test_dataloader())
    # jump: 0, 2, empty, text; shake hands: 1, sound
    assert targets[:, 0].tolist() == [0, 0, -2, -2, 1, -3]
    assert [bool(clip.any()) for clip in clips] == [True, True, False, False, True, False]
    finished = data.finish(clips, targets)
    assert not finished[2].any() and finished[0].any()
    assert data.describe()["n_unreadable"]["test"] == 3


def test_an_unreadable_video_can_be_an_error(damaged):
    data = module(damaged, bad_videos="error")
    with pytest.raises(UnreadableVideo, match="x empty.mp4"):
        all_of(data.test_dataloader())


@pytest.mark.filterwarnings("ignore:cannot read")
def test_a_disk_that_is_gone_ends_training(tmp_path):
    for k in range(4):
        path = tmp_path / "train" / "a" / f"{k}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    video_folder(tmp_path, (("val", 1),), classes=("a",))
    with pytest.raises(ValueError, match="50 training videos in a row .*mp4"):
        next(iter(module(tmp_path, val_fraction=0.0).train_dataloader()))


def listed_tree(root, n_missing=1):
    """train.csv and val.csv, each with videos that are not there."""
    for part in ("train", "val"):
        rows = []
        for k in range(6):
            path = f"{part} clips/{k}.mp4"
            rows.append(f"{path},{'ab'[k % 2]}\n")
            if k >= n_missing:
                write_clip(root / path, 8)
        (root / f"{part}.csv").write_text("path,label\n" + "".join(rows))
    return root


@pytest.mark.parametrize("part", ["train", "val"])
def test_missing_files_are_told_before_training_in_every_part(tmp_path, monkeypatch, part):
    listed_tree(tmp_path)
    if part == "val":  # its own are missing, training's are there
        write_clip(tmp_path / "train clips" / "0.mp4", 8)
    monkeypatch.chdir("/")
    with pytest.raises(FileNotFoundError, match=f"1 of 6 videos of .*{part}.csv.*{part} clips/0"):
        module(tmp_path)


def test_missing_files_can_be_left_out_or_kept(tmp_path):
    listed_tree(tmp_path, n_missing=2)
    with pytest.warns(UserWarning, match="2 of 6 videos .* left out"):
        data = module(tmp_path, missing="skip", val_fraction=0.0)
    assert data.split_size("train") == data.split_size("test") == 4
    assert data.describe()["n_missing"] == {"train": 2, "test": 2}
    with pytest.warns(UserWarning, match="2 of 6 videos .* kept"):
        data = module(tmp_path, missing="keep", val_fraction=0.0)
    with pytest.warns(UserWarning, match="No such file"):
        _, targets = all_of(data.test_dataloader())
    assert targets[:, 0].tolist() == [-2, -3, 0, 1, 0, 1]


def test_a_list_of_missing_files_alone_is_always_an_error(tmp_path):
    listed_tree(tmp_path, n_missing=6)
    with pytest.raises(FileNotFoundError, match="6 of 6"):
        module(tmp_path, missing="skip")


def test_an_absurd_size_in_a_header_is_the_files_fault(tmp_path, monkeypatch):
    import av

    path = tmp_path / "a.mp4"
    write_clip(path, 4)

    def refuse(*args, **keywords):
        raise av.error.MemoryError(12, "Cannot allocate memory")  # what FFmpeg answers

    monkeypatch.setattr(av, "open", refuse)
    with pytest.raises(UnreadableVideo, match="Cannot allocate memory"):
        read_frames(path, [0])
    monkeypatch.setattr(av, "open", lambda *args, **keywords: bytearray(1 << 62))
    with pytest.raises(MemoryError):  # this machine's
        read_frames(path, [0])
