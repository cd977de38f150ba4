"""The method: a nonlinear pre-projection before Q, K and V, and a skip around attention.

Source: "Position-Agnostic Pre-Projection for Transformer Attention: Nonlinear Feature Construction
and Content Skip Before Q/K/V", arXiv 2604.10791 (https://arxiv.org/abs/2604.10791).

For one transformer block with input x and x̂ = norm(x):

    x̃   = x̂ + W_down · SiLU(W_up · x̂)      pre-projection
    a    = Attention(x̃)                      Q, K and V all read x̃; positions act only in here
    out  = x + a + W_skip · x̃                content skip

Both additions act on each token alone and never see a position, so they commute with any order of
the tokens: text, image patches or space-time tubelets. They cost 3.5 d² multiply-adds a token and
layer at the default expansion (a plain block has 12 d²) and leave the K/V cache as it was.

Beyond the paper, `PreProjConfig.sites` says where the pre-projection stands, each with weights of
its own, and `activation` what σ is in x̃ = x̂ + W_down · σ(W_up · x̂). With y = norm₂(out):

    "attention"   as above, then               out₂ = out + MLP(y)
    "mlp"         out = x + Attention(x̂) + W_skip · x̂,   out₂ = out + MLP(ỹ)
    "both"        out = x + Attention(x̃) + W_skip · x̃,   out₂ = out + MLP(ỹ)

There is one skip, around attention alone. In a parallel block y is what its MLP reads there, and
the two branches have a pre-projection each: x + Attention(x̃) + W_skip · x̃ + MLP(ỹ).

Start: W_up truncated normal (std 0.02), W_down and W_skip zero. The model then equals its base bit
for bit, and gradients still flow: W_down and W_skip move first, then W_up.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmpreproj.messages import did_you_mean, short

__all__ = ["PreProj", "PreProjConfig"]

UP_INIT_STD = 0.02
SITES = ("attention", "mlp", "both")
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "identity": lambda hidden: hidden}


@dataclasses.dataclass(frozen=True)
class PreProjConfig:
    """What is added to a model, and where.

    Args:
        expansion: width of the pre-projection's hidden layer, as a multiple of the model's width.
        pre_projection, content_skip: which of the two parts are added.
        layers: blocks that get the method, counted from 0 within each stack of blocks; negative
            numbers count from the end. None means all. A mapping gives them by the stack's path,
            such as ``{"encoder.layers": [-1]}``; stacks that it does not name get none.
        init_std: standard deviation (truncated normal) that W_down and W_skip start with; at 0 the
            model starts bit-identical to its base.
        skip_rank: rank of W_skip; None means full rank.
        sites: what reads x̃: "attention" (the paper's), the block's "mlp", or "both"; formulas are
            at the top of `mmpreproj.preproj`. Refused are mixtures of experts, whose router reads
            x̂ too, MLPs that read no norm (OLMo 2), and blocks whose MLP cannot be found.
        activation: σ between W_up and W_down: "silu" (the paper's), "gelu", or "identity", which
            leaves x̂ + W_down · W_up · x̂, the linear control.
        dtype: dtype of the new parameters, such as "float32" on a bfloat16 base; None means that of
            the attention's own weights.
        attention: for what cannot be read off a model: the path of the attention modules, with
            ``*`` for each number in it, such as ``"encoder.layers.*.attn"`` or
            ``"stages.*.blocks.*.attn"``; or several such paths.
        join: goes with `attention`, one for each: the path of the module behind everything that
            scales or norms the attention branch, whose input the skip is added to, such as
            ``"encoder.layers.*.drop_path"``. None: it is added to the attention's own output.
        within: the path of a part of the model, such as ``"model.vision_tower"``: only that part
            gets the method.

    Raises:
        ValueError: naming the field, what it holds and what it takes.
    """

    expansion: float = 1.25
    pre_projection: bool = True
    content_skip: bool = True
    layers: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    init_std: float = 0.0
    skip_rank: int | None = None
    sites: str = "attention"
    activation: str = "silu"
    dtype: str | None = None
    attention: str | Sequence[str] | None = None
    join: str | Sequence[str | None] | None = None
    within: str | None = None

    def __post_init__(self) -> None:
        rank, layers = self.skip_rank, self.layers
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        for name in ("layers", "attention", "join"):
            object.__setattr__(self, name, _tuple(getattr(self, name)))
        if isinstance(layers, Mapping):
            of_stacks = {path: _tuple(numbers) for path, numbers in layers.items()}
            object.__setattr__(self, "layers", of_stacks)
        whole = all(
            isinstance(each, tuple) and each and all(type(layer) is int for layer in each)
            for each in (self.layers.values() if isinstance(layers, Mapping) else (self.layers,))
        )
        starred = all(map(_has_star, self.attentions))
        sigmas = list(ACTIVATIONS)
        joined = all(join is None or isinstance(join, str) for join in self.joins)
        for name, holds, what in (
            ("pre_projection", isinstance(self.pre_projection, bool), "True or False"),
            ("content_skip", isinstance(self.content_skip, bool), "True or False"),
            ("expansion", _is_finite(self.expansion) and self.expansion > 0, "a number above 0"),
            ("init_std", _is_finite(self.init_std) and self.init_std >= 0, "a number from 0 on"),
            ("skip_rank", rank is None or (type(rank) is int and rank > 0), "1 or above, or None"),
            ("sites", self.sites in SITES, f"one of {', '.join(SITES)}"),
            ("activation", self.activation in sigmas, f"one of {', '.join(sigmas)}"),
            ("layers", layers is None or (self.layers and whole), "block numbers, or None"),
            ("dtype", self.dtype is None or _is_float(self.dtype), "a floating-point torch dtype"),
            ("attention", starred, "a path with a * for the block"),
            ("join", joined, "a path, or None"),
            ("within", self.within is None or isinstance(self.within, str), "a path, or None"),
        ):
            if not holds:
                raise ValueError(f"{name} must be {what}, found {short(getattr(self, name))}")
        if rank is not None and not self.content_skip:
            raise ValueError(f"skip_rank={rank} needs content_skip=True")
        if self.sites != "attention" and not self.pre_projection:
            raise ValueError(f"sites={self.sites!r} needs pre_projection=True")
        if self.join is not None and self.attention is None:
            raise ValueError(f"join={self.join!r} goes with attention=, which is None")
        if len(self.joins) != len(self.attentions):
            raise ValueError(f"join={self.join!r} must be one for each of {self.attentions}")

    @property
    def enabled(self) -> bool:
        """Whether either part is on."""
        return self.pre_projection or self.content_skip

    def at(self, mlp: bool) -> PreProjConfig:
        """What stands at an attention, or at an MLP: the skip is around attention alone."""
        return dataclasses.replace(
            self,
            sites="attention",
            pre_projection=self.pre_projection and self.sites != ("attention" if mlp else "mlp"),
            content_skip=self.content_skip and not mlp,
            skip_rank=None if mlp else self.skip_rank,
        )

    @property
    def attentions(self) -> tuple[str, ...]:
        """The paths by hand, one or several."""
        held = self.attention
        return () if held is None else held if isinstance(held, tuple) else (held,)

    @property
    def joins(self) -> tuple[str | None, ...]:
        """The join of each of `attentions`."""
        held = self.join
        return held if isinstance(held, tuple) else (held,) * len(self.attentions)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain types, for JSON and checkpoints."""
        fields = dataclasses.asdict(self)
        for name in ("layers", "attention", "join"):
            if isinstance(fields[name], tuple):
                fields[name] = list(fields[name])
        if isinstance(self.layers, dict):
            fields["layers"] = {path: list(numbers) for path, numbers in self.layers.items()}
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PreProjConfig:
        """The inverse of `to_dict`. Raises ValueError on a field that does not exist."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in set(fields) - set(known):
            hint = did_you_mean(str(name), known) or f"; it has {', '.join(known)}"
            raise ValueError(f"PreProjConfig has no field {short(name)}{hint}")
        return cls(**fields)


def _is_finite(value: Any) -> bool:
    # compared, as math.isfinite cannot take an integer above all floats
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _tuple(held: Any) -> Any:
    """A list as a tuple, and anything else as it is."""
    return tuple(held) if isinstance(held, Sequence) and not isinstance(held, str) else held


def _has_star(path: Any) -> bool:
    return isinstance(path, str) and "*" in path


def _is_float(name: Any) -> bool:
    dtype = getattr(torch, str(name), None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


class PreProj(nn.Module):
    """The parameters of one self-attention or MLP: W_up, W_down and W_skip, all without bias.

    `up` is Linear(D, int(expansion · D)), `down` its inverse shape, `skip` Linear(D, D); a part
    that is off is None and holds no parameter. With a skip rank r, W_skip = skip · reduce, where
    `reduce` is Linear(D, r) and `skip` Linear(r, D).

    Args:
        dim: D, the width of the tokens that the attention reads.
        config: which parts, their sizes, and σ; where they stand is not its matter.

    Raises:
        ValueError: if dim < 1, or the skip rank is above dim.
    """

    def __init__(
        self,
        dim: int,
        config: PreProjConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = config or PreProjConfig()
        if dim < 1:
            raise ValueError(f"dim must be 1 or above, found {dim}")
        rank = config.skip_rank
        if rank is not None and rank > dim:
            raise ValueError(f"skip_rank={rank} is above the width {dim}; use None for full rank")
        self.dim = dim
        self.init_std = config.init_std
        self.activation = config.activation
        hidden = max(1, int(config.expansion * dim))
        linear = functools.partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.up = linear(dim, hidden) if config.pre_projection else None
        self.down = linear(hidden, dim) if config.pre_projection else None
        self.reduce = linear(dim, rank) if config.content_skip and rank else None
        self.skip = linear(rank or dim, dim) if config.content_skip else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the start of every parameter; also what model-wide initialisation calls."""
        for reader in (self.up, self.reduce):
            if reader is not None:
                _truncated_normal_(reader.weight, UP_INIT_STD)
        for writer in (self.down, self.skip):
            if writer is not None:
                _truncated_normal_(writer.weight, self.init_std)

    def forward(self, x_hat: Tensor) -> Tensor:
        """x̂ -> x̃, token by token; x̂ itself is left as it is.

        Shape: x_hat [batch, tokens, D], or any [..., D] -> the same shape and dtype.
        """
        if self.up is None:
            return x_hat
        x = x_hat.to(self.up.weight.dtype)  # a no-op unless the new parameters have their own dtype
        hidden = ACTIVATIONS[self.activation](self.up(x))
        return (x + self.down(hidden)).to(x_hat.dtype)

    def content_skip(self, x_tilde: Tensor) -> Tensor:
        """W_skip · x̃. Shape: x_tilde [..., D] -> the same shape and dtype."""
        assert self.skip is not None, "content_skip() of a PreProj whose skip is off"
        x = x_tilde.to(self.skip.weight.dtype)
        return self.skip(x if self.reduce is None else self.reduce(x)).to(x_tilde.dtype)

    def skip_matrix(self) -> Tensor | None:
        """W_skip as one [D, D] matrix, whatever its rank; None where the skip is off."""
        if self.skip is None or self.reduce is None:
            return None if self.skip is None else self.skip.weight
        return self.skip.weight @ self.reduce.weight


@torch.no_grad()
def _truncated_normal_(weight: Tensor, std: float) -> None:
    """Normal with the given std, cut at two of them; exactly zero at std 0."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std) if std else weight.zero_()
