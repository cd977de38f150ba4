"""LoRA by PEFT (Hu et al. 2021, arXiv 2106.09685): the baseline, also at the size of the method."""

from __future__ import annotations

import bisect
import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import mmpreproj
from mmpreproj.messages import need
from mmpreproj.preproj import PreProjConfig
from mmpreproj.training.recipe import as_config

__all__ = ["LoraConfig", "attach_lora", "count_new", "solve_rank"]

ALL = "all-linear"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Where LoRA goes, and how large it is.

    Args:
        rank: r of every matrix; None: solved, so that LoRA has as many new parameters as the method
            with the config `equal_to`.
        scale: lora_alpha / r, the factor on BA.
        targets: names of the layers (their ends), or "all-linear": all but the output layer.
        dropout: on the input of A.
        equal_to: the method's config whose number of parameters is to be met.
    """

    rank: int | None = 16
    scale: float = 2.0
    targets: list[str] | str = ALL
    dropout: float = 0.0
    equal_to: PreProjConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "equal_to", as_config(PreProjConfig, self.equal_to))
        if (self.rank is None) == (self.equal_to is None):
            raise ValueError(
                f"lora takes either rank or equal_to (the other null), found rank={self.rank} and "
                f"equal_to={self.equal_to}"
            )
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"lora.rank must be 1 or more, found {self.rank}")
        if not self.scale > 0:
            raise ValueError(f"lora.scale must be above 0, found {self.scale}")


def count_new(model: nn.Module, config: PreProjConfig) -> int:
    """How many parameters the method would add to `model`, which is left as it is."""
    mmpreproj.attach(model, config)
    try:
        modules = mmpreproj.preproj_modules(model).values()
        return sum(p.numel() for module in modules for p in module.parameters())
    finally:
        mmpreproj.detach(model)


def solve_rank(shapes: Iterable[tuple[int, int]], parameters: int) -> int:
    """The rank at which LoRA on matrices of these shapes comes nearest to that many parameters.

    A rank never exceeds the smaller side of a matrix: there it stays at that side, and B A can be
    any matrix already.

    Args:
        shapes: (out, in) of each matrix; rank r costs r (out + in).

    Raises:
        ValueError: if there is no matrix, or even full ranks do not reach the number.
    """
    shapes = list(shapes)
    if not shapes:
        raise ValueError("lora: no layer to adapt")

    def cost(rank: int) -> int:
        return sum(min(rank, out, width) * (out + width) for out, width in shapes)

    largest = max(min(shape) for shape in shapes)
    if cost(largest) < parameters:
        raise ValueError(
            f"lora.equal_to asks for {parameters:,} parameters, but these {len(shapes)} matrices "
            f"take {cost(largest):,} at full rank; name more layers in lora.targets"
        )
    reaching = 1 + bisect.bisect_left(range(1, largest), parameters, key=cost)
    below = max(1, reaching - 1)
    return reaching if cost(reaching) - parameters < parameters - cost(below) else below


def attach_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """`model` as a PeftModel with LoRA; the base is frozen.

    Raises:
        ImportError: without PEFT.
        ValueError: if the targets match nothing, or a rank cannot be had.
    """
    peft = need("peft", "LoRA", "text")
    shapes = _target_shapes(model, config)
    rank = config.rank
    if rank is None:
        assert config.equal_to is not None
        rank = solve_rank(shapes.values(), count_new(model, config.equal_to))
    narrow = {name: min(shape) for name, shape in shapes.items() if min(shape) < rank}
    return peft.get_peft_model(model, _peft_config(config, rank, narrow))


def _peft_config(config: LoraConfig, rank: int, narrow: dict[str, int]) -> Any:
    import peft

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=config.scale * rank,
        lora_dropout=config.dropout,
        target_modules=config.targets if config.targets == ALL else _names(config),
        rank_pattern=narrow,
        alpha_pattern={name: config.scale * r for name, r in narrow.items()},
    )


def _names(config: LoraConfig) -> list[str]:
    return [config.targets] if isinstance(config.targets, str) else list(config.targets)


def _target_shapes(model: nn.Module, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of every layer that PEFT would adapt, found on a copy without weights.

    Raises:
        ValueError: if a name matches no layer: another one that does must not hide it.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    with torch.device("meta"):
        own = hasattr(model, "config")
        skeleton = type(model)(model.config) if own else copy.deepcopy(model)
    adapted = peft.get_peft_model(skeleton, _peft_config(config, 1, {}))
    shapes = {
        name.removeprefix("base_model.model."): (layer.out_features, layer.in_features)
        for name, layer in adapted.named_modules()
        if isinstance(layer, LoraLayer)
    }
    for target in _names(config):
        if target != ALL and not any(f".{name}".endswith(f".{target}") for name in shapes):
            known = sorted({name.rpartition(".")[2] for name in shapes})
            raise ValueError(
                f"lora.targets names {target!r}, which is the end of no linear layer's name; of "
                f"those adapted: {', '.join(known)}"
            )
    return shapes
