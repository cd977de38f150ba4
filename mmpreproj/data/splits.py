"""Stratified hold-out: the part of the training images on which choices are made."""

import math

import numpy as np


def stratified_holdout(
    targets: np.ndarray, n_held: int | None = None, fraction: float | None = None, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Splits item numbers into a kept and a held-out part with the classes in proportion.

    Each class gives its share of `n_held` (or of fraction * N), rounded so that the shares add up
    (largest remainders). Then a class with one image keeps it, and every other class gives at least
    one and keeps at least one, which can move the total where there are many tiny classes. The
    result depends on `targets` and `seed` alone: it uses numpy's legacy generator, whose stream is
    frozen, and no global state.

    Shape: targets int [N] -> kept int64 [N - M], held int64 [M], both ascending.
    Raises: ValueError unless exactly one of n_held / fraction is given and lies in range.
    """
    targets = np.asarray(targets)
    if (n_held is None) == (fraction is None):
        raise ValueError(
            f"give one of n_held and fraction, got n_held={n_held}, fraction={fraction}"
        )
    if fraction is not None:
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"the held-out fraction must be 0 or more and below 1, got {fraction}")
        n_held = math.floor(fraction * len(targets) + 0.5)
        if fraction > 0:
            n_held = max(n_held, 1)
    if not 0 <= n_held <= len(targets):
        raise ValueError(f"cannot hold {n_held} out of {len(targets)} images")
    everything = np.arange(len(targets))
    if n_held == 0:
        return everything, everything[:0]
    classes, sizes = np.unique(targets, return_counts=True)
    exact = n_held * sizes / len(targets)
    shares = np.floor(exact).astype(np.int64)
    # a stable sort: equal remainders go to the lower class
    largest_remainders = np.argsort(shares - exact, kind="stable")[: n_held - shares.sum()]
    shares[largest_remainders] += 1
    shares = np.where(sizes >= 2, np.clip(shares, 1, np.maximum(sizes - 1, 1)), 0)

    generator = np.random.RandomState(seed)
    by_class = np.split(np.argsort(targets, kind="stable"), np.cumsum(sizes)[:-1])
    held_by_class = [generator.permutation(m)[:k] for m, k in zip(by_class, shares, strict=True)]
    held = np.sort(np.concatenate(held_by_class))
    assert len(classes) == len(by_class)
    kept = np.ones(len(targets), dtype=bool)
    kept[held] = False
    return everything[kept], held
