"""Which frames make a clip: numbers worked out by hand."""

import pytest
import torch

from mmpreproj.data.video import clips as s


def test_dense_clips_step_by_the_stride():
    assert s.dense(100, 4, 5, start=10) == [10, 15, 20, 25]
    assert s.span(16, 4) == 61


@pytest.mark.parametrize(
    "n, padding, expected",
    [
        (1, "repeat", [0, 0, 0, 0]),
        (5, "repeat", [0, 3, 4, 4]),
        (5, "loop", [0, 3, 1, 4]),  # 6 and 9 modulo 5
        (9, "repeat", [0, 3, 6, 8]),
        (10, "repeat", [0, 3, 6, 9]),
    ],
)
def test_a_short_video_is_padded_by_the_rule(n, padding, expected):
    assert s.dense_views(n, 4, 3, padding=padding) == [expected]
    assert s.dense_train(n, 4, 3, padding) == expected


@pytest.mark.parametrize("n", [1, 5, 60, 61, 62, 64, 65, 300])
@pytest.mark.parametrize("kind", ["dense", "uniform"])
def test_a_clip_always_has_its_frames_inside_the_video(n, kind):
    for views in (1, 3, 5):
        if kind == "dense":
            clips = [s.dense_train(n, 16, 4), *s.dense_views(n, 16, 4, views)]
        else:
            clips = [s.uniform_train(n, 16), *s.uniform_views(n, 16, views)]
        assert len(clips) == 1 + views
        assert all(len(clip) == 16 and 0 <= min(clip) and max(clip) < n for clip in clips)
        assert all(clip == sorted(clip) for clip in clips)


def test_every_start_is_drawn_and_no_other():
    generator = torch.Generator().manual_seed(0)
    starts = {s.dense_train(12, 3, 4, generator=generator)[0] for _ in range(200)}
    assert starts == {0, 1, 2, 3}  # a clip reaches over 9 of 12 frames


def test_views_are_spread_from_the_first_to_the_last_frame():
    views = s.dense_views(300, 16, 4, views=3)  # 239 frames to spare
    assert [view[0] for view in views] == [0, 119, 239]
    assert views[-1][-1] == 299
    assert s.dense_views(300, 16, 4)[0][0] == 119


def test_views_of_a_short_video_coincide():
    assert len({tuple(view) for view in s.dense_views(5, 4, 4, views=3)}) == 1
    assert len({tuple(view) for view in s.dense_views(14, 4, 4, views=5)}) == 2  # one to spare


def test_uniform_clips_take_the_middle_of_each_segment():
    assert s.segments(10, 4) == [(0, 2), (2, 3), (5, 2), (7, 3)]
    assert s.uniform_views(10, 4) == [[1, 3, 6, 8]]
    # two views: at a quarter and at three quarters of each
    assert s.uniform_views(16, 4, 2) == [[1, 5, 9, 13], [3, 7, 11, 15]]


def test_uniform_training_draws_each_frame_of_each_segment():
    generator = torch.Generator().manual_seed(0)
    drawn = [s.uniform_train(10, 4, generator) for _ in range(200)]
    columns = [set(column) for column in zip(*drawn, strict=True)]
    assert columns == [{0, 1}, {2, 3, 4}, {5, 6}, {7, 8, 9}]


def test_uniform_clips_of_few_frames_repeat_them_evenly():
    assert s.uniform_views(2, 4) == [[0, 0, 1, 1]]
    assert s.uniform_train(1, 4) == [0, 0, 0, 0]


def test_the_generator_decides():
    draw = lambda seed: s.dense_train(  # noqa: E731
        1000, 4, 4, generator=torch.Generator().manual_seed(seed)
    )
    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("n, frames, stride, views", [(0, 4, 1, 1), (9, 0, 1, 1), (9, 4, 0, 1)])
def test_nonsense_is_refused(n, frames, stride, views):
    with pytest.raises(ValueError, match="1 or more|1 frame or more"):
        s.dense_views(n, frames, stride, views)
    with pytest.raises(ValueError, match="padding"):
        s.dense(9, 4, 1, 0, padding="mirror")
