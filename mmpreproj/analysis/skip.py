"""How much each layer uses the content skip.

Two measures, one row a self-attention site in order of execution:

- `weight`: ||W_skip||_F / sqrt(D), the root mean square of W_skip's singular values (1 for the
  identity, 0 at the start of training); needs no data.
- `activation`: ||W_skip x̃|| / ||a||, Frobenius norms over a batch, where a is the attention branch
  as it reaches the residual add (behind LayerScale, where there is one); needs one batch.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.attach import preproj_modules
from mmpreproj.backbones.modes import evaluating

__all__ = ["skip_strength", "write_csv"]


def skip_strength(model: nn.Module, images: Tensor | None = None) -> list[dict[str, Any]]:
    """Skip strength of every site; sites without a skip are left out.

    The model is run in eval mode without gradient; its modes are put back, and no hook stays.

    Args:
        model: carries the method (attached, or a preproj backbone). Without it: an empty list.
        images: [B, C, H, W] for the activation measure; None leaves `activation` None.

    Returns:
        Rows {"layer", "name", "dim", "weight", "activation"}; `layer` counts sites from 0.
    """
    modules = preproj_modules(model)
    sites = {name: m for name, m in modules.items() if m.skip is not None}
    ratios = _activation_ratios(model, sites, images) if images is not None and sites else {}
    rows = []
    for layer, name in enumerate(modules):
        if name not in sites:
            continue
        matrix = sites[name].skip_matrix().detach().float()
        strength = float(torch.linalg.vector_norm(matrix)) / math.sqrt(matrix.shape[0])
        rows.append(
            {
                "layer": layer,
                "name": name,
                "dim": matrix.shape[0],
                "weight": strength,
                "activation": ratios.get(name),
            }
        )
    return rows


@torch.no_grad()
def _activation_ratios(
    model: nn.Module, sites: Mapping[str, nn.Module], images: Tensor
) -> dict[str, float | None]:
    """||W_skip x̃|| / ||a|| of each site, from one forward pass of `images`."""
    skips: dict[str, Tensor] = {}
    branches: dict[str, Tensor] = {}

    def see_skip(name: str, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        skips[name] = out.float()

    def see_output(name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        # Without a scale the skip is part of what the attention returns: take it off again.
        branches[name] = (out[0] if isinstance(out, tuple) else out).float() - skips[name]

    def see_input(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        branches[name] = args[0].float()

    joins = {
        id(m.preproj_handoff): m
        for m in model.modules()
        if hasattr(m, "preproj_handoff") and not hasattr(m, "preproj")
    }
    with evaluating(model), ExitStack() as hooks:  # taken off whatever happens
        for name, preproj in sites.items():
            attention = model.get_submodule(name.rpartition(".")[0])
            join = joins.get(id(getattr(attention, "preproj_handoff", None)))
            hooks.enter_context(preproj.skip.register_forward_hook(partial(see_skip, name)))
            hooks.enter_context(
                attention.register_forward_hook(partial(see_output, name))
                if join is None
                else join.register_forward_pre_hook(partial(see_input, name))
            )
        model.forward(images)  # .forward: a compiled model would not see hooks added later
    ratios: dict[str, float | None] = {}
    for name in skips:
        branch = float(torch.linalg.vector_norm(branches[name]))
        ratio = float(torch.linalg.vector_norm(skips[name])) / branch if branch > 0 else math.nan
        ratios[name] = ratio if math.isfinite(ratio) else None
    return ratios


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> Path:
    """The rows of `skip_strength` as CSV; a missing activation measure is an empty cell."""
    path = Path(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["layer", "name", "dim", "weight", "activation"])
        writer.writeheader()
        writer.writerows(rows)
    return path
