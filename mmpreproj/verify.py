"""Checking on a user's own model and batch that the method is attached exactly."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.architectures import Site
from mmpreproj.attach import attach, attachment_of, detach, preproj_modules
from mmpreproj.describe import table
from mmpreproj.preproj import PreProjConfig
from mmpreproj.sites import find_sites

__all__ = ["Checked", "Verification", "verify"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # relative; 0.05 of the shorter formats


@dataclasses.dataclass(frozen=True)
class Checked:
    """One site: how many of the projections that read x̂ read x̃, and the skip's relative error.

    A figure is None where the batch did not run the attention.
    """

    attention: str
    readers: int | None
    reading: int | None
    skip_error: float | None
    holds: bool


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. Printed, it is a table; as a truth, whether everything holds."""

    identical: bool
    restored: bool
    sites: tuple[Checked, ...]

    def __bool__(self) -> bool:
        return self.identical and self.restored and all(site.holds for site in self.sites)

    def __str__(self) -> str:
        def shown(site: Checked) -> tuple[str, ...]:
            if site.reading is None:
                return (site.attention, "not run", "not run", "not run")
            error = "none found" if site.skip_error is None else f"{site.skip_error:.1e}"
            verdict = "holds" if site.holds else "FAILS"
            return (site.attention, f"{site.reading} of {site.readers}", error, verdict)

        head = ("self-attention", "read x̃", "error of the skip", "")
        return "\n".join(
            [
                f"identical at the start: {self.identical}; restored by detach: {self.restored}",
                *table(head, map(shown, self.sites)),
            ]
        )


def verify(model: nn.Module, inputs: Any, config: PreProjConfig | None = None) -> Verification:
    """Attach to a copy of `model` and prove it on a batch; the model itself is left as it is.

    For each site: every projection in the attention that reads x̂ reads x̃ (with a random
    pre-projection), and W_skip · x̃ arrives in the residual stream as it is (with a random W_skip):
    it is the whole difference in what a later module of the block reads, or the block returns,
    where that holds the stream.

    Args:
        inputs: what the model is called with: a tensor, a tuple of arguments or a dict of keywords.
        config: None is the config that the model carries, or else the default.

    Raises:
        ValueError: as `attach`.
    """
    base = copy.deepcopy(model).eval()
    held = attachment_of(model).config
    config = config or held or PreProjConfig()
    if held is not None:
        detach(base)
    plain = dataclasses.replace(config, init_std=0.0)
    before = _called(base, inputs)
    sites = find_sites(base, config)
    attach(base, plain)
    identical = _equal(before, _called(base, inputs))
    checked = [_check(base, inputs, site) for site in sites]
    restored = _equal(before, _called(detach(base), inputs))
    return Verification(identical, restored, tuple(checked))


def _check(model: nn.Module, inputs: Any, site: Site) -> Checked:
    new = preproj_modules(model)[f"{site.attention}.preproj"]
    base = _recorded(model, inputs, site)
    if site.attention not in base:
        return Checked(site.attention, None, None, None, holds=False)
    x_hat = base[site.attention][0]
    limit = TOLERANCE.get(x_hat.dtype, 0.05)
    readers = [
        path
        for path in base
        if path.startswith(f"{site.attention}.") and ".preproj" not in path
        if base[path]
        and _error(base[path][0], x_hat) == 0
        and not any(model.get_submodule(path).children())
    ]
    whole = model.get_submodule(site.attention)
    single = f"{site.attention} returns" in base  # an MLP's first layer alone: it reads x̃ unseen
    reading, skip_error = len(readers), None
    if new.up is not None:
        with _random(new.up, new.down):
            x_tilde, changed = new(x_hat), _recorded(model, inputs, site)
        reading = sum(_error(changed[path][0], x_tilde) <= limit for path in readers)
        if single:
            with torch.no_grad():
                expected = whole.preproj_base_class.forward(whole, x_tilde)
            readers = [site.attention]
            reading = int(_error(changed[f"{site.attention} returns"][0], expected) <= limit)
    if new.skip is not None:
        with _random(new.skip):
            skip, changed = new.content_skip(x_hat), _recorded(model, inputs, site)
        # where attention gives nothing, the stream is what its norm reads
        handle = model.get_submodule(site.attention).register_forward_hook(_nothing)
        quiet = _recorded(model, inputs, site)
        handle.remove()
        stream = base.get(site.norm or site.block, [x_hat])[0]
        later = list(base)[list(base).index(site.attention) + 1 :]
        later = [p for p in later if not p.startswith(f"{site.attention}.") and p in quiet]
        pairs = [
            (before, after, silent)
            for path in later
            for before, after, silent in zip(base[path], changed[path], quiet[path], strict=False)
            if after.shape == before.shape
        ]
        # an attention that adds the residual itself gives nothing of the stream when it is silent
        held = [p for p in pairs if _holds(p[2], stream)] or [
            p for p in pairs if _holds(p[0], stream)
        ]
        skip_error = min((_error(after - before, skip) for before, after, _ in held), default=None)
        at = site.join if site.join is not None and not site.join_output else None
        if at is not None and skip_error != 0 and any(_holds(t, stream) for t in quiet[at]):
            # what reads the stream next adds the skip itself, out of the hooks' sight
            reads = model.get_submodule(at)
            with torch.no_grad():
                total = base[at][0] + skip.reshape(base[at][0].shape)
                expected = reads.preproj_base_class.forward(reads, total)
            skip_error = _error(changed[f"{at} returns"][0], expected)
    arrives = new.skip is None or (skip_error is not None and skip_error <= 10 * limit)
    holds = bool(readers) and reading == len(readers) and arrives
    return Checked(site.attention, len(readers), reading, skip_error, holds)


class _Enough(Exception):
    """The block is done: what the model does afterwards does not matter."""


@torch.no_grad()
def _recorded(model: nn.Module, inputs: Any, site: Site) -> dict[str, list[Tensor]]:
    """What each module of the site's block reads, and behind them what the block returns."""
    seen: dict[str, list[Tensor]] = {}
    handles = []

    def note(path: str, values: Any) -> None:
        seen.setdefault(path, []).extend(t.detach().clone() for t in _tensors(values))

    def done(module: nn.Module, args: Any, out: Any) -> None:
        note("what the block returns", out)
        raise _Enough

    block = model.get_submodule(site.block)
    for name, module in block.named_modules(prefix=site.block):
        hook = lambda m, a, k, name=name: note(name, (a, k))  # noqa: E731
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    behind = site.attention if site.reader == site.attention else site.join
    if behind is not None:
        hook = lambda m, a, out: note(f"{behind} returns", out)  # noqa: E731
        handles.append(model.get_submodule(behind).register_forward_hook(hook))
    handles.append(block.register_forward_hook(done))
    try:
        _called(model, inputs)
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _nothing(module: nn.Module, args: Any, out: Any) -> Any:
    if isinstance(out, (tuple, list)):
        return type(out)((_nothing(module, args, out[0]), *out[1:]))
    return torch.zeros_like(out)


@contextlib.contextmanager
def _random(*linears: nn.Linear) -> Iterator[None]:
    """Draw weights at which x̃ and the skip are of the size of x̂; zero W_down and W_skip after."""
    held = [linear.weight.detach().clone() for linear in linears]
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for linear in linears:
            drawn = torch.randn(linear.weight.shape, generator=g) / linear.in_features**0.5
            linear.weight.copy_(drawn)
        yield
        for linear, weight in zip(linears, held, strict=True):
            linear.weight.copy_(weight)


def _holds(silent: Tensor, stream: Tensor) -> bool:
    """Whether a tensor is mostly the residual stream, in any shape."""
    if silent.numel() != stream.numel() or not stream.any():
        return False
    a, b = silent.double().flatten(), stream.double().flatten()
    return bool((a @ b) / (b @ b) > 0.5)


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; of the same tokens in any order."""
    if found.numel() != expected.numel():
        return float("inf")
    found, expected = found.double(), expected.double()
    scale = expected.abs().max().clamp_min(1e-30)
    plain = (found.reshape(expected.shape) - expected).abs().max() / scale
    width = expected.shape[-1]
    if found.shape[-1] != width or plain < 1e-3:
        return float(plain)
    rows = [t.reshape(-1, width) for t in (found, expected)]
    rows = [t[t[:, 0].argsort()] for t in rows]
    return float(min(plain, (rows[0] - rows[1]).abs().max() / scale))


@torch.no_grad()
def _called(model: nn.Module, inputs: Any) -> Any:
    torch.manual_seed(0)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
