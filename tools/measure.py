"""What each part of the method does in a trained run: a table of its layers.

    python tools/measure.py RUN [--items 100] [--which best] [--out measured.json]

On the run's test items (pictures, or blocks of text): the rise of the loss with a part of one layer
off; how well a linear map reads a token's position (a patch's row and column; a token's place)
from x̂, x̃, W_skip · x̃ and what attention gives; the effective rank of W_skip and W_down · W_up.
`mmpreproj.analysis.parts` says how.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmpreproj.analysis.parts import activations, effective_ranks, linear_probe, loss_rises
from mmpreproj.files import write_whole
from mmpreproj.training import ImageClassifier, LanguageModel, load_run
from mmpreproj.training.console import print_table, quieten, run_tool


def main(args: Sequence[str] | None = None) -> None:
    """`measure.py` with these arguments."""
    parser = argparse.ArgumentParser("measure.py", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run folder or a .ckpt file")
    parser.add_argument("--items", type=int, default=100, help="test items (100)")
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    known = parser.parse_args(args)
    quieten()
    module, data = load_run(known.run, known.which)
    if not isinstance(module, (ImageClassifier, LanguageModel)):
        raise ValueError(
            f"{known.run} is a {type(module).__name__}: pictures and text are measured"
        )
    data.setup("test")
    batches = list(_batches(module, data, known.items))
    model = module.evaluated
    found = {
        "run": str(known.run),
        "n": sum(len(inputs) for inputs, _ in batches),
        "effective_ranks": effective_ranks(model),
        "probes": _probes(module, model, [inputs for inputs, _ in batches]),
        "loss_rises": loss_rises(model, _loss(module, batches), batches),
    }
    if known.out:
        write_whole(known.out, json.dumps(found, indent=1) + "\n")
    print_table(f"{known.run}, {found['n']} test items", *_table(found))


def _batches(module: nn.Module, data: Any, items: int) -> Any:
    """Inputs and targets, at most `items` of them."""
    for batch in data.test_dataloader():
        if isinstance(module, LanguageModel):
            inputs, targets = batch["input_ids"], batch["targets"]
        else:
            inputs, targets = data.finish(*batch), batch[1]
        yield inputs[:items], targets[:items]
        items -= len(inputs)
        if items <= 0:
            return


def _loss(module: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """The share of a batch, so that their mean is the mean over items, whatever is in the last."""
    each = sum(targets.numel() for _, targets in batches) / len(batches)
    text = isinstance(module, LanguageModel)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0], use_cache=False).logits if text else model(batch[0])
        logits, targets = logits.flatten(0, -2).float(), batch[1].flatten()
        return F.cross_entropy(logits, targets, reduction="sum") / each

    return loss


def _probes(module: nn.Module, model: nn.Module, inputs: list[Tensor]) -> list[dict[str, Any]]:
    """Of every layer, how well position is read from what runs through it."""
    keywords = {"use_cache": False} if isinstance(module, LanguageModel) else {}
    parts = [activations(model, lambda m, x=x: m(x, **keywords)) for x in inputs]
    rows = []
    for name in parts[0]:
        row: dict[str, Any] = {"name": name}
        for part in parts[0][name]:
            features = torch.cat([each[name][part] for each in parts])
            if features.ndim != 3:
                raise ValueError(f"{name} reads a map, not tokens: its position is not measured")
            side = math.isqrt(features.shape[1])
            places = {"place": torch.arange(features.shape[1])}
            if not keywords:  # behind class and register tokens
                features = features[:, features.shape[1] - side**2 :]
                grid = torch.arange(side**2)
                places = {"row": grid // side, "column": grid % side}
            row |= {f"{part} {n}": linear_probe(features, place) for n, place in places.items()}
        rows.append(row)
    return rows


def _table(found: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
    """A row for each layer."""
    parts = {"x_hat": "x̂", "x_tilde": "x̃", "skip": "W_skip x̃", "branch": "attention's"}
    columns = ["layer", "skip off", "pre-projection off", "attention off"]
    columns += [f"place in {name}" for name in parts.values()] + ["rank W_skip", "rank W_down W_up"]
    rows = []
    for rise, probe, rank in zip(
        found["loss_rises"], found["probes"], found["effective_ranks"], strict=True
    ):
        cells = [rise["name"].removesuffix(".preproj")]
        cells += [_shown(rise[key], "+.3f") for key in ("skip", "pre_projection", "attention")]
        for part in parts:
            read = [v["accuracy"] for key, v in probe.items() if key.startswith(f"{part} ")]
            cells.append(_shown(sum(read) / len(read) if read else None, ".2f"))
        rows.append(cells + [_shown(rank[key], ".0f") for key in ("skip", "pre_projection")])
    return rows, columns


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(run_tool(main))
