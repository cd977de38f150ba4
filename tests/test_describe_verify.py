"""describe and verify, and paths by hand: what is told of a user's own model."""

import copy
import dataclasses

import pytest
import torch
from helpers import images, perturb
from helpers import tiny as timm_model
from torch import nn
from torch.nn import functional as F

import mmpreproj
from mmpreproj import PreProjConfig, attach, preproj_modules
from mmpreproj.architectures import Site

WIDTH = 16


class Attention(nn.Module):
    """Self- or cross-attention of two heads, called with q, k and v."""

    def __init__(self, out=WIDTH):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, out)

    def forward(self, query, key, value):
        q, k, v = (
            f(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for f, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, scaled=False, out=WIDTH):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(out)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.3)) if scaled else None

    def forward(self, x):
        x_hat = self.norm(x)
        branch = self.attn(query=x_hat, key=x_hat, value=x_hat)
        if self.gamma is not None:
            branch = self.gamma * branch
        x = x + branch
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    def __init__(self, depth, **kwargs):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**kwargs) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(Stage(depth, **kwargs) for depth in (1, 3))

    def forward(self, x):
        for stage in self.layers:
            x = stage(x)
        return x


@pytest.fixture
def x():
    return torch.randn(2, 5, WIDTH)


NAMES = ["layers.0.blocks.0.attn", *(f"layers.1.blocks.{i}.attn" for i in range(3))]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_class_that_nobody_listed_is_served_exactly(x, scaled):
    model = Model(scaled=scaled).eval()
    found = mmpreproj.describe(model)
    assert [site.attention for site in found.sites] == NAMES
    assert not any(isinstance(m, mmpreproj.PreProj) for m in model.modules())
    joins = {site.join and site.join.rpartition(".")[2] for site in found.sites}
    assert joins == ({"norm2"} if scaled else {None})
    assert mmpreproj.verify(model, x)
    # by hand, in float64: x + gamma · a(x̃) + W_skip · x̃, then the MLP of that
    block = perturb(attach(copy.deepcopy(model).double())).layers[0].blocks[0]
    base, h = model.double().layers[0].blocks[0], x.double()
    new = block.attn.preproj
    x_hat = base.norm(h)
    x_tilde = x_hat + F.silu(x_hat @ new.up.weight.T) @ new.down.weight.T
    a = base.attn(x_tilde, x_tilde, x_tilde)
    h = h + (a if base.gamma is None else base.gamma * a) + x_tilde @ new.skip.weight.T
    assert torch.allclose(block(x.double()), h + base.mlp(base.norm2(h)), atol=1e-12)


def test_describe_prints_a_table_and_says_what_is_left_out():
    told = str(mmpreproj.describe(timm_model("deit3")))
    assert "blocks.*.attn" in told and "the input of blocks.*.drop_path1" in told
    assert "blocks.*.norm1" in told


def test_verify_notices_a_skip_that_is_scaled(x, monkeypatch):
    model = timm_model("deit3")
    assert mmpreproj.verify(model, images(model))
    before = {name: p.clone() for name, p in model.named_parameters()}
    # drop_path1 stands behind LayerScale: joined at the attention itself, the skip is scaled
    plain = Site.under
    shifted = lambda *args: dataclasses.replace(plain(*args), join=None)  # noqa: E731
    monkeypatch.setattr(Site, "under", shifted)
    found = mmpreproj.verify(model, images(model))
    assert not found and not any(site.holds for site in found.sites)
    assert "FAILS" in str(found)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_paths_by_hand_take_several_stars_and_uneven_depths(x):
    model = Model().eval()
    attach(model, PreProjConfig(attention="layers.*.blocks.*.attn"))
    assert [name.removesuffix(".preproj") for name in preproj_modules(model)] == NAMES
    assert mmpreproj.verify(mmpreproj.detach(model), x)


def test_paths_by_hand_may_be_several():
    model = Model()
    paths = ("layers.0.blocks.*.attn", "layers.1.blocks.*.attn")
    config = PreProjConfig(attention=paths, layers={"layers.1.blocks": [-1]})
    assert list(preproj_modules(attach(model, config))) == ["layers.1.blocks.2.attn.preproj"]
    assert PreProjConfig.from_dict(config.to_dict()) == config


def test_a_branch_that_is_scaled_behind_the_path_by_hand_is_noticed():
    with pytest.raises(ValueError, match="is scaled or normed"):
        attach(timm_model("deit3"), PreProjConfig(attention="blocks.*.attn"))


def test_an_attention_that_changes_the_width_is_refused_by_hand_and_otherwise():
    class Wider(Block):
        def forward(self, x):
            x_hat = self.norm(x)
            return F.pad(x, (0, WIDTH)) + self.attn(x_hat, x_hat, x_hat)

    model = nn.Sequential(Wider(out=2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
    for config in (None, PreProjConfig(attention="*.attn")):
        with pytest.raises(ValueError, match="reads 16 channels and returns 32"):
            attach(model, config)


def test_within_takes_a_part_of_the_model():
    model = Model()
    config = PreProjConfig(within="layers.1", layers=[0])
    assert list(preproj_modules(attach(model, config))) == ["layers.1.blocks.0.attn.preproj"]
    with pytest.raises(ValueError, match="within='layer.1' is no module; the nearest are"):
        attach(Model(), PreProjConfig(within="layer.1"))


def test_a_cross_attention_of_the_same_class_is_left_alone():
    class Crossing(Block):
        def __init__(self):
            super().__init__()
            self.cross = Attention()

        def forward(self, x, memory):
            x_hat = self.norm(x)
            x = x + self.attn(x_hat, x_hat, x_hat)
            return x + self.cross(self.norm2(x), memory, memory)

    found = mmpreproj.describe(Crossing())
    assert [site.attention for site in found.sites] == ["attn"]
    assert [(each.attention, each.why) for each in found.left] == [
        ("cross", "it is a cross-attention")
    ]
