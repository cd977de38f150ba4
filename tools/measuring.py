"""What the benchmarks share: alternating runs, medians, ratios and FLOPs."""

import statistics
from collections.abc import Callable

from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def alternate(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run each in turn, `repeats` rounds after one that does not count; gives what they return."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(repeats + 1):
        for name, run in runs.items():
            value = run()
            if round_number:
                values[name].append(value)
    return values


def report(title: str, values: dict[str, list[float]], unit: str) -> dict[str, object]:
    """Print the medians of each, and the ratio of the first to each other, round by round."""
    names = list(values)
    print(f"\n{title}  ({len(values[names[0]])} rounds, alternating)")
    print(f"  {'':28} {'median':>10} {'min':>10} {'max':>10}  {unit}")
    for name in names:
        runs = values[name]
        print(f"  {name:28} {statistics.median(runs):10.3f} {min(runs):10.3f} {max(runs):10.3f}")
    ratios = {}
    for name in names[1:]:
        pairs = [a / b for a, b in zip(values[names[0]], values[name], strict=True)]
        ratios[name] = statistics.median(pairs)
        spread = f"[{min(pairs):.3f}, {max(pairs):.3f}]"
        print(f"  {names[0]} / {name}: median ratio {ratios[name]:.3f} {spread}")
    return {"title": title, "unit": unit, "runs": values, "median_ratio": ratios}


def count_flops(run: Callable[[nn.Module], float], model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        run(model)
    return counter.get_total_flops()
