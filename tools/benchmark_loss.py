"""The loss of a language model in pieces, against the loss of all logits: time and peak memory.

python tools/benchmark.py loss
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from measuring import alternate, report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    """The part "loss" of tools/benchmark.py. The default sizes are SmolLM2-135M's."""
    parser = subparsers.add_parser("loss", help=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="in a batch")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--classes", type=int, default=49152)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--soft-cap", type=float, help="as in Gemma 2")
    parser.add_argument("--repeats", type=int, default=5)


def main(options: argparse.Namespace) -> list[dict[str, object]]:
    """Forward and backward from hidden states, behind a head that is frozen, as in a probe."""
    from mmpreproj.backbones.lm_head import LMHead
    from mmpreproj.training.lm_loss import head_loss

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    layer = nn.Linear(options.width, options.classes, bias=False).to(dtype).requires_grad_(False)
    hidden = torch.randn(options.tokens, options.width, dtype=dtype, requires_grad=True)
    targets = torch.randint(options.classes, (options.tokens,))
    head, cap = LMHead(layer, soft_cap=options.soft_cap), options.soft_cap

    def whole() -> Tensor:
        logits = F.linear(hidden, layer.weight).float()
        return F.cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), targets)

    losses: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: head_loss(head, hidden, targets)[0] / options.tokens,
        "all logits": whole,
    }
    if cap is None and hasattr(F, "linear_cross_entropy"):
        losses["linear_cross_entropy"] = lambda: F.linear_cross_entropy(
            hidden, layer.weight, targets
        )
        chosen = getattr(torch.nn, "LinearCrossEntropyOptions", None)
        if chosen is not None:
            losses["the same, its options"] = lambda: F.linear_cross_entropy(
                hidden, layer.weight, targets, options=chosen()
            )

    def timed(loss: Callable[[], Tensor]) -> float:
        start = time.perf_counter()
        loss().backward()
        hidden.grad = None
        return time.perf_counter() - start

    logits = options.tokens * options.classes * 4
    size = f"{options.tokens:,} tokens, {options.classes:,} classes, width {options.width}"
    print(f"{size}, {options.dtype}: all logits in float32 are {logits / 2**20:,.0f} MiB")
    peaks = {}
    for name, loss in losses.items():
        peaks[name] = peak_bytes(lambda loss=loss: timed(loss))
        print(
            f"  {name:28} peak {peaks[name] / 2**20:9,.0f} MiB, {peaks[name] / logits:5.2f} of them"
        )
    runs = {name: lambda loss=loss: timed(loss) for name, loss in losses.items()}
    found = report("forward and backward", alternate(runs, options.repeats), "seconds")
    return [found | {"title": f"{size}, {options.dtype}", "peak_bytes": peaks}]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that `run` holds beyond what was there, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        run()
    events = told.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(max(np.cumsum([0] + [change for _, change in changes])))
