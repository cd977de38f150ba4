"""Moving digits: what the videos show, that one frame does not tell the direction, the files."""

import collections
import csv
import itertools
import json
import multiprocessing

import numpy as np
import pytest
import torch

av = pytest.importorskip("av")


from mmpreproj.data import DigitsDataModule  # noqa: E402
from mmpreproj.data.video import MovingDigitsDataModule, moving_digits  # noqa: E402
from mmpreproj.data.video.clips import VideoAugment  # noqa: E402
from mmpreproj.data.video.moving_digits import (  # noqa: E402
    DIRECTIONS,
    MovingDigits,
    encode,
    opposite,
    places,
    plan,
    render,
    write_moving_digits,
)

pytestmark = pytest.mark.slow

N_FRAMES = 6
SMALL = MovingDigits(n_frames=N_FRAMES, size=16, digit_size=8, speed=4, clips_per_image=(1, 1, 1))


def targets():
    from sklearn.datasets import load_digits

    return load_digits().target


def some_digit(side, seed=0):
    return np.random.RandomState(seed).randint(256, size=(side, side)).astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_moving_digits(tmp_path_factory.mktemp("videos") / "digits", SMALL)


def rows(folder, part):
    with open(folder / f"{part}.csv", newline="") as file:
        return list(csv.DictReader(file))


def file_of(folder, row):
    times = f"{int(row['time_start']):06d}_{int(row['time_end']):06d}"
    return folder / row["split"] / f"{row['youtube_id']}_{times}.mp4"


def decoded(path):
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


# Motion


def test_opposite_undoes_every_direction():
    pairs = {("east", "west"), ("north", "south"), ("north-east", "south-west")}
    assert all(opposite(a) == b and opposite(b) == a for a, b in pairs)
    for direction in DIRECTIONS:
        both = np.array(moving_digits.STEPS[direction]) + moving_digits.STEPS[opposite(direction)]
        assert not both.any()
    with pytest.raises(ValueError, match="up.*north-east"):
        opposite("up")


@pytest.mark.parametrize(
    "direction, row, column", [("east", 5, 13), ("north", 29, 7), ("south-west", 13, 31)]
)
def test_directions_are_those_on_the_screen(direction, row, column):
    # From row 5, column 7 of 32, by 2 pixels a frame, worked out by hand
    frames = {"east": 3, "north": 4, "south-west": 4}[direction]
    moved = places((5, 7), direction, MovingDigits(n_frames=frames + 1, speed=2))[frames]
    assert moved.tolist() == [row, column]


def test_a_digit_moves_by_whole_pixels_and_comes_back_on_the_other_side():
    settings = MovingDigits(n_frames=4, size=32, digit_size=16, speed=4)
    digit = some_digit(16)
    frames = render(digit, (10, 24), "east", settings)
    expected = np.zeros((4, 32, 32), np.uint8)
    for t, row, column in itertools.product(range(4), range(16), range(16)):
        expected[t, 10 + row, (24 + 4 * t + column) % 32] = digit[row, column]
    assert np.array_equal(frames, expected)


@pytest.mark.parametrize(
    "settings", [MovingDigits(), MovingDigits(n_frames=7, size=18, digit_size=9, speed=1)]
)
def test_at_every_time_the_place_is_distributed_alike_for_all_directions(settings):
    # All starts are equally likely, so it is enough that they lead to every place exactly once
    multiples = range(0, settings.size, settings.speed)
    starts = list(itertools.product(multiples, multiples))
    for direction in DIRECTIONS:
        by_start = np.stack([places(start, direction, settings) for start in starts])
        for t in range(settings.n_frames):
            assert sorted(map(tuple, by_start[:, t].tolist())) == starts


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_video_played_backwards_is_one_of_the_opposite_direction(direction):
    settings = MovingDigits()
    digit = some_digit(settings.digit_size)
    last = places((3, 30), direction, settings)[-1]
    forwards = render(digit, (3, 30), direction, settings)
    backwards = render(digit, tuple(last), opposite(direction), settings)
    assert np.array_equal(forwards[::-1], backwards)
    assert not np.array_equal(forwards, render(digit, (3, 30), opposite(direction), settings))


# Parts and labels


def test_no_image_is_in_two_parts_and_the_parts_are_those_of_the_image_data():
    clips = plan(targets(), MovingDigits())
    images = {part: {clip.image for clip in clips[part]} for part in clips}
    assert [len(images[part]) for part in ("train", "val", "test")] == [1131, 126, 540]
    assert len(set.union(*images.values())) == 1797
    data = DigitsDataModule()
    data.setup()
    for part in images:
        source, chosen, _ = data._parts[part]
        assert images[part] == set(source.numbers[chosen].tolist())


@pytest.mark.parametrize("counts", [(4, 2, 1), (3, 8, 5)])
def test_directions_are_balanced_within_parts_and_within_classes(counts):
    known = targets()
    clips = plan(known, MovingDigits(clips_per_image=counts))
    for part, count in zip(moving_digits.SPLITS, counts, strict=True):
        assert all(clip.digit == known[clip.image] for clip in clips[part])
        table = np.zeros((10, 8), int)
        for clip in clips[part]:
            table[clip.digit, DIRECTIONS.index(clip.direction)] += 1
        assert (np.ptp(table, axis=1) <= 1).all() and np.ptp(table.sum(0)) <= 1
        of_image = collections.Counter((clip.image, clip.direction) for clip in clips[part])
        assert set(of_image.values()) == {1}
        assert len(clips[part]) == count * len({clip.image for clip in clips[part]})


def test_starts_are_spread_over_all_places_alike_for_all_directions():
    counts = collections.Counter()
    for clip in plan(targets(), MovingDigits(clips_per_image=(8, 1, 1)))["train"]:
        counts[clip.direction, clip.start] += 1
    # 16 places times 8 directions. Chi-squared with 120 degrees of freedom, since each direction
    # has its 1131 videos: below 170 in 99.8 % of draws
    assert sum(counts.values()) == 8 * 1131 and len(counts) == 16 * 8
    expected = 1131 / 16
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 170


def test_the_plan_follows_the_seed_but_the_test_images_do_not():
    first, again = (plan(targets(), MovingDigits(seed=3)) for _ in range(2))
    other = plan(targets(), MovingDigits(seed=4))
    assert first == again and first != other
    images = [sorted({clip.image for clip in of["test"]}) for of in (first, other)]
    assert images[0] == images[1]
    more = plan(targets(), MovingDigits(seed=3, clips_per_image=(5, 2, 1)))
    assert more["test"] == first["test"]  # whatever there is to train on


# Files


def test_files_are_in_kinetics_layout(folder):
    assert (
        (folder / "train.csv")
        .read_bytes()
        .startswith(b"digit,direction,youtube_id,time_start,time_end,split\n")
    )
    for part, count in (("train", 1131), ("val", 126), ("test", 540)):
        table = rows(folder, part)
        assert len(table) == count and {row["split"] for row in table} == {part}
        there = {path.name for path in (folder / part).iterdir()}
        assert there == {file_of(folder, row).name for row in table}
        assert all(len(row["youtube_id"]) == 11 for row in table)


def test_files_show_what_their_row_says(folder):
    from sklearn.datasets import load_digits

    images = load_digits().images
    row = rows(folder, "test")[7]
    frames = decoded(file_of(folder, row))
    assert frames.shape == (N_FRAMES, 16, 16, 3)
    original = images[int(row["youtube_id"][5:9])] / 16 * 255
    assert load_digits().target[int(row["youtube_id"][5:9])] == int(row["digit"])
    row_step, column_step = moving_digits.STEPS[row["direction"]]
    grey = frames.mean(-1)
    # Where the digit starts is found by trying all places; the codec changes grey levels a little
    canvas = np.zeros((16, 16))
    canvas[:8, :8] = original
    best = min(
        itertools.product(range(16), repeat=2),
        key=lambda start: np.abs(np.roll(canvas, start, (0, 1)) - grey[0]).mean(),
    )
    for t, frame in enumerate(grey):
        move = (best[0] + 4 * t * row_step, best[1] + 4 * t * column_step)
        assert np.abs(np.roll(canvas, move, (0, 1)) - frame).mean() < 2


def test_files_are_h264_with_b_frames(folder):
    kinds = set()
    for row in rows(folder, "train")[:5]:
        with av.open(str(file_of(folder, row))) as container:
            stream = container.streams.video[0]
            assert stream.codec_context.name == "h264" and stream.average_rate == 8
            kinds |= {frame.pict_type for frame in container.decode(stream)}
    picture = av.video.frame.PictureType
    assert {picture.I, picture.B} <= kinds


def test_equal_settings_give_equal_bytes(tmp_path):
    for name in ("one.mp4", "two.mp4"):
        encode(tmp_path / name, render(some_digit(16), (1, 2), "north", MovingDigits()))
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "two.mp4").read_bytes()


def test_what_is_written_is_not_written_again(folder, monkeypatch):
    monkeypatch.setattr(moving_digits, "encode", None)  # calling it would fail
    assert write_moving_digits(folder, SMALL) == folder


def test_another_folder_is_refused_and_left_as_it_is(folder, tmp_path):
    with pytest.raises(ValueError, match="'speed': 4.*'speed': 2"):
        write_moving_digits(folder, MovingDigits(**{**vars(SMALL), "speed": 2}))
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else"):
        write_moving_digits(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    done = []

    def interrupted(path, *_):
        done.append(path)
        if len(done) == 3:
            raise KeyboardInterrupt
        path.touch()

    monkeypatch.setattr(moving_digits, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_moving_digits(tmp_path / "digits", SMALL)
    assert list(tmp_path.iterdir()) == []


def _write_at_once(root, barrier, results):
    moving_digits.encode = lambda path, *_: path.touch()
    barrier.wait()
    results.put(str(write_moving_digits(root, SMALL)))


def test_two_processes_at_once_give_one_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    root = tmp_path / "digits"
    writers = [context.Process(target=_write_at_once, args=(root, barrier, results)) for _ in "12"]
    for writer in writers:
        writer.start()
    assert [results.get(timeout=60) for _ in writers] == [str(root)] * 2
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_the_cache_folder_tells_settings_and_versions_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = {MovingDigits().root(), MovingDigits(speed=1).root(), MovingDigits(seed=1).root()}
    monkeypatch.setattr(moving_digits, "VERSION", moving_digits.VERSION + 1)
    names.add(MovingDigits().root())
    assert len(names) == 4 and {name.parent for name in names} == {tmp_path / "mmpreproj"}
    assert MovingDigits(clips_per_image=[4, 2, 1]).root() in names  # as YAML gives it


def test_settings_are_recorded(folder):
    facts = json.loads((folder / "moving_digits.json").read_text())
    assert facts["n_frames"] == N_FRAMES and facts["version"] == moving_digits.VERSION


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"n_frames": 0}, "n_frames"),
        ({"size": 33}, "even"),
        ({"digit_size": 40}, "size=32"),
        ({"speed": 16}, "size=32 three times"),
        ({"speed": 5}, "without a rest"),
        ({"clips_per_image": (9, 1, 1)}, "1 to 8"),
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"crf": 52}, "crf"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        MovingDigits(**wrong)


# The data module


def module(folder, **keywords):
    data = MovingDigitsDataModule(root=str(folder), videos=SMALL, stride=1, **keywords)
    data.prepare_data()
    data.setup()
    data.data_config = {"input_size": (1, 4, 16, 16), "mean": (0.5,), "std": (0.5,)}
    return data


def test_the_data_module_has_two_label_sets_and_the_written_parts(folder):
    data = module(folder)
    assert data.label_sets == {
        "digit": list("0123456789"),
        "direction": sorted(DIRECTIONS),
    }
    facts = data.describe()
    assert (facts["n_train"], facts["n_val"], facts["n_test"]) == (1131, 126, 540)
    assert facts["videos"]["speed"] == 4
    json.dumps(facts)


def test_evaluation_clips_are_the_frames_of_the_file_with_its_labels(folder):
    data = module(folder, batch_size=4)
    clips, labels = next(iter(data.test_dataloader()))
    assert clips.shape == (4, 1, 1, 4, 16, 16) and labels.shape == (4, 2)
    for clip, label, row in zip(clips, labels, rows(folder, "test"), strict=False):
        assert data.label_sets["digit"][label[0]] == row["digit"]
        assert data.label_sets["direction"][label[1]] == row["direction"]
        frames = torch.from_numpy(decoded(file_of(folder, row))[..., 0].astype(int))
        # one view: the middle 4 of the 6 frames; luma of equal channels differs by rounding alone
        assert (clip[0, 0].int() - frames[1:5]).abs().max() <= 1


def test_training_clips_are_not_mirrored(folder):
    clips, labels = next(iter(module(folder, batch_size=8).train_dataloader()))
    assert clips.shape == (8, 1, 4, 16, 16) and clips.dtype == torch.uint8
    with pytest.raises(ValueError, match="hflip"):
        MovingDigitsDataModule(augment=VideoAugment())
    MovingDigitsDataModule(augment=VideoAugment(hflip=0.0))


def test_the_folder_is_the_caches_unless_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert MovingDigitsDataModule().root == str(MovingDigits().root())
    assert not any(tmp_path.iterdir())  # nothing is written before training starts
