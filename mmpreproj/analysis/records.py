"""One JSON record a run: where it ran, and the intervals and spreads that its figures carry.

A figure that is missing is null or absent, never 0: NaN and infinity, which JSON cannot hold, are
written as null.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import mmpreproj
from mmpreproj.files import parse_json, write_whole
from mmpreproj.messages import about, short

__all__ = ["environment", "mean_spread", "peak_memory", "plain", "proportion", "read_record"]
__all__ += ["read_yaml", "wilson_interval", "write_json"]

PACKAGES = ("timm", "lightning", "torchmetrics", "numpy")
Z_95 = 1.959963984540054  # standard normal quantile at 0.975


def wilson_interval(correct: int, n: int, z: float = Z_95) -> tuple[float, float] | None:
    """Wilson's score interval of a proportion (95 % by default).

    Unlike the normal approximation it stays inside [0, 1] and does not collapse at 0 or 1.

    Args:
        correct: successes, 0 <= correct <= n.
        n: trials; with none there is no interval, and None is returned.
        z: quantile of the standard normal distribution.

    Raises:
        ValueError: if correct is outside [0, n].
    """
    if not 0 <= correct <= n:
        raise ValueError(f"correct must be between 0 and n={n}, found {correct}")
    if n == 0:
        return None
    p = correct / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At p = 0 and p = 1 one bound is exact; rounding must not move it past the estimate.
    low = 0.0 if correct == 0 else max(0.0, middle - half)
    high = 1.0 if correct == n else min(1.0, middle + half)
    return low, high


def proportion(correct: int, n: int) -> dict[str, Any]:
    """A proportion as records hold it: value, n, number correct and its 95 % interval."""
    interval = wilson_interval(correct, n)
    return {
        "value": correct / n if n else None,
        "correct": correct,
        "n": n,
        "interval95": None if interval is None else list(interval),
    }


def mean_spread(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean and spread over runs, such as seeds. Missing values are left out and counted.

    Returns: mean, std (sample, n - 1; None below two values), min, max, n, missing.
    """
    values = list(values)
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "min": min(known, default=None),
        "max": max(known, default=None),
        "n": len(known),
        "missing": len(values) - len(known),
    }


MOST_VALUES = 100_000  # of a YAML file, whose aliases can multiply a few lines without end


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ValueError: naming the file, if it is not valid, holds no mapping, or more than MOST_VALUES.
    """
    with about(path, "is not valid YAML"):
        # as jsonargparse reads it, where libyaml is there
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        found = yaml.load(Path(path).read_bytes().decode(), loader)
        if not isinstance(found, dict):
            raise ValueError(f"it holds {short(found)}, where keys and their values are expected")
        values, n = [found], 0
        while values:
            value, n = values.pop(), n + 1
            if n > MOST_VALUES:
                raise ValueError(f"it holds more than {MOST_VALUES:,} values, aliases resolved")
            if isinstance(value, dict | list):
                values.extend(value.values() if isinstance(value, dict) else value)
        return found


def plain(value: Any) -> Any:
    """`value` as JSON holds it: tensors and numpy values to numbers, paths to text, NaN to null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # tensors and numpy values
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> Path:
    """Write `content` as indented JSON; a reader never sees half a file. Returns the path."""
    text = json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False)
    return write_whole(path, text + "\n")


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a run: `path` is a run folder or the JSON file itself.

    Raises:
        FileNotFoundError: naming the path, if there is none.
        ValueError: if the file is no JSON object.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "record.json"
    if not path.is_file():
        raise FileNotFoundError(f"no record at {path}: the run has not finished, or is no run")
    record = parse_json(path.read_bytes(), path)
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(record).__name__}")
    return record


def environment(seed: int | None, device: str) -> dict[str, Any]:
    """Versions, seed, device, git revision (None outside a checkout) and the command line."""
    versions = {"python": platform.python_version(), "mmpreproj": mmpreproj.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__  # with its build, which the package's version leaves out
    return {
        "versions": versions,
        "platform": platform.platform(),
        "seed": seed,
        "device": device,
        "threads": torch.get_num_threads(),
        "git": git_revision(),
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def git_revision() -> dict[str, Any] | None:
    """Revision of the checkout that the package runs from, and whether it has changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(mmpreproj.__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # Installed into an environment that lies in someone's checkout, it is not that checkout.
        if not git("ls-files", "--error-unmatch", "__init__.py"):
            return None
        return {"revision": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory() -> dict[str, int | None]:
    """Peak bytes of this process, and of its GPU where it has one."""
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    status = Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss starts at the peak of the process that started this one
        if kib := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE):
            return {"rss": int(kib[1]) * 1024, "gpu": gpu}
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rss": peak if sys.platform == "darwin" else peak * 1024, "gpu": gpu}  # macOS: bytes
