"""Rotary positions in three axes, against the float64 tables of `reference_video.py`."""

import copy
import pickle

import numpy as np
import pytest
import timm
import torch
from reference import rotate
from reference_video import angles, time_angles
from timm.layers import apply_rot_embed_cat

from mmpreproj.backbones.video.rope3d import KEPT_TABLES, RotaryTables, rotary_table

GRID = (3, 4, 5)


def table64(grid, head_dim, axes="tyx"):
    return rotary_table(grid, head_dim, axes, dtype=torch.float64)


@pytest.mark.parametrize("head_dim", [6, 8, 18, 32, 64, 80])
def test_rotation_is_that_of_the_reference(head_dim):
    x = np.random.default_rng(0).normal(size=(60, head_dim))
    for axes, grid, expected in (
        ("tyx", GRID, angles(GRID, head_dim)),
        ("yx", (12, 5), angles((1, 12, 5), head_dim, time=False)),
        ("t", (60,), time_angles(60, head_dim)),
    ):
        expected = rotate(x, np.sin(expected), np.cos(expected))
        found = apply_rot_embed_cat(torch.from_numpy(x), table64(grid, head_dim, axes)).numpy()
        assert np.abs(found - expected).max() < 1e-12, axes
        low = rotary_table(grid, head_dim, axes)
        found = apply_rot_embed_cat(torch.from_numpy(x), low).numpy()
        assert np.abs(found - expected).max() < 4e-5, axes  # 60 radians in float32, |x| < 4


def test_split_of_a_head_of_64_is_the_stated_one():
    pairs = np.arange(32)
    sin = table64((2, 2, 2), 64)[:, :64:2].numpy()
    moved = {
        axis: pairs[sin[token] != 0].tolist() for axis, token in (("x", 1), ("y", 2), ("t", 4))
    }
    assert moved == {
        "x": list(range(0, 10)),
        "y": list(range(16, 26)),
        "t": [*range(10, 16), *range(26, 30)],
    }


def test_space_table_is_the_image_models_bit_for_bit():
    image = timm.create_model("vit_small_patch16_rope_224", depth=1, img_size=(48, 80))
    space = rotary_table((3, 5), 64, "yx")
    assert torch.equal(space, image.rope.get_embed())


@pytest.mark.parametrize("axes", ["tyx", "yx", "t"])
def test_logits_depend_on_relative_position_alone(axes):
    grid = (17, 15, 16)[: len(axes)]
    query, key = torch.randn(2, 64, dtype=torch.float64)
    table = table64(grid, 64, axes).unflatten(0, grid)
    q, k = apply_rot_embed_cat(query, table), apply_rot_embed_cat(key, table)
    rng = np.random.default_rng(1)
    first, second = (np.array([rng.integers(s // 2, size=50) for s in grid]) for _ in range(2))
    shift = np.array([rng.integers(s // 2, size=50) for s in grid])

    def logits(a, b):
        return (q[tuple(a)] * k[tuple(b)]).sum(-1)

    before, after = logits(first, second), logits(first + shift, second + shift)
    assert (before - after).abs().max() < 1e-12
    # and it does depend on each axis
    for axis in range(len(axes)):
        other = first.copy()
        other[axis] += 1
        assert (logits(other, second) - before).abs().min() > 1e-6


def test_heads_too_small_for_three_axes_are_refused():
    for head_dim in (4, 7):
        with pytest.raises(ValueError, match=f"a head of {head_dim} cannot be rotated"):
            RotaryTables(head_dim, 100.0)


def test_tables_are_kept_by_grid_and_precision_and_serve_training_after_inference():
    tables = RotaryTables(32, 100.0)
    like = torch.zeros(1)
    with torch.inference_mode():
        first = tables.get(GRID, "tyx", like)
    assert not first.is_inference() and tables.get(GRID, "tyx", like) is first
    low = tables.get(GRID, "tyx", like.bfloat16())  # rotated in float32, then rounded
    assert low is first
    assert tables.get(GRID, "tyx", like.double()).dtype == torch.float64
    for frames in range(1, 3 * KEPT_TABLES):
        tables.get((frames, 2, 2), "tyx", like)
    assert len(tables.kept) == KEPT_TABLES
    for copied in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert not copied.kept and torch.equal(copied.get(GRID, "tyx", like), first)
