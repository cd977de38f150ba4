"""What each part of the method does in a model that was trained: four measurements.

- `loss_rises`: how much worse the loss is when a layer's skip, pre-projection or attention is off.
- `activations` and `linear_probe`: how well position can be read from x̂, x̃, W_skip · x̃ and what
  attention gives, by a linear map.
- `permutation_error`: how far f(Px) is from P f(x), for a function f of tokens.
- `effective_ranks`: how many directions W_skip and W_down · W_up use.

They take images, clips and text alike: a model is called as the function that is given calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.attach import preproj_modules
from mmpreproj.backbones.modes import evaluating

__all__ = ["activations", "effective_rank", "effective_ranks", "linear_probe", "loss_rises"]
__all__ += ["permutation_error"]


@torch.no_grad()
def loss_rises(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: Iterable[Any]
) -> list[dict[str, Any]]:
    """The rise of the mean loss with one part of one site off, the rest as it is.

    Off is: W_skip · x̃ = 0; x̃ = x̂; an attention branch of zeros, whose skip stays.

    Args:
        loss: of the model on a batch, a mean over it.

    Returns:
        Rows {"name", "skip", "pre_projection", "attention"} in order of execution, of `PreProj`s;
        None where there is no such part, or the attention's module adds the residual itself.
    """
    batches = list(batches)

    def mean() -> float:
        return sum(float(loss(model, batch)) for batch in batches) / len(batches)

    def rise(module: nn.Module | None, hook: Callable[..., Any]) -> float | None:
        if module is None:
            return None
        handle = module.register_forward_hook(hook)
        try:
            return mean() - whole
        finally:
            handle.remove()

    rows = []
    with evaluating(model):
        whole = mean()
        for name, preproj in preproj_modules(model).items():
            site = model.get_submodule(name.rpartition(".preproj")[0])
            silent = _Silent(site, preproj)
            with silent:
                attention = None if silent.unknown else rise(site, silent)
            row = {"name": name, "skip": rise(preproj.skip, _zeros)}
            row |= {"pre_projection": rise(preproj.down, _zeros), "attention": attention}
            rows.append(row)
    return rows


class _Silent:
    """A hook that leaves of what an attention or MLP gives only the skip that was added to it."""

    def __init__(self, site: nn.Module, preproj: nn.Module) -> None:
        self.site, self.preproj, self.skip = site, preproj, None
        self.unknown = site.preproj_readers is not None

    def __enter__(self) -> None:
        added = self.preproj.skip is not None and self.site.preproj_handoff is None
        self.handle = self.preproj.skip.register_forward_hook(self._keep) if added else None

    def __exit__(self, *error: object) -> None:
        if self.handle is not None:
            self.handle.remove()

    def _keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.skip = out / self.site.preproj_divisor

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, (tuple, list)):
            return type(out)((self(module, args, out[0]), *out[1:]))
        silent = torch.zeros_like(out)
        return silent if self.skip is None else silent + self.skip.reshape(out.shape)


def _zeros(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return torch.zeros_like(out)


@torch.no_grad()
def activations(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, dict[str, Tensor]]:
    """Of every site x̂, x̃, W_skip · x̃ and what its module gives, in one call of `run(model)`.

    Returns:
        `{name of the PreProj: {"x_hat", "x_tilde", "skip", "branch"}}`, each [B, T, D] or as the
        module has it; without "skip" where there is none. The branch is without the skip.
    """
    found: dict[str, dict[str, Tensor]] = {}
    with evaluating(model), ExitStack() as hooks:
        for name, preproj in preproj_modules(model).items():
            site, held = model.get_submodule(name.rpartition(".preproj")[0]), {}
            found[name] = held

            def see(module: nn.Module, args: Any, out: Tensor, held: dict = held) -> None:
                held.update(x_hat=args[0], x_tilde=out)

            def see_skip(module: nn.Module, args: Any, out: Tensor, held: dict = held) -> None:
                held["skip"] = out

            def see_branch(module: nn.Module, args: Any, out: Any, held: dict = held) -> None:
                branch = out[0] if isinstance(out, (tuple, list)) else out
                if "skip" in held and module.preproj_handoff is None:
                    branch = branch - held["skip"].reshape(branch.shape) / module.preproj_divisor
                held["branch"] = branch

            hooks.enter_context(preproj.register_forward_hook(see))
            hooks.enter_context(site.register_forward_hook(see_branch))
            if preproj.skip is not None:
                hooks.enter_context(preproj.skip.register_forward_hook(see_skip))
        run(model)
    return found


@torch.no_grad()
def linear_probe(
    features: Tensor, labels: Tensor, ridge: float = 1e-3, seed: int = 0
) -> dict[str, float | int]:
    """How well a linear map reads a label off each token, on sequences it was not fitted on.

    The map is the ridge regression of one-hot labels, with a bias, fitted on the first half of the
    sequences and scored on the others. Features are standardised by the first half.

    Args:
        features: [B, T, D], B at least 2.
        labels: [T], such as the index, the row or the frame of each token; or [B, T].
        ridge: the penalty, as a share of the mean eigenvalue of the features' covariance.
        seed: of the shuffling of labels.

    Returns:
        `accuracy`; `chance`, of the most frequent label; `shuffled`, the accuracy of a map that was
        fitted on labels shuffled among tokens; and `n`, the tokens that were scored.
    """
    if features.ndim != 3 or len(features) < 2:
        raise ValueError(f"features must be [B, T, D] with B from 2 on: {tuple(features.shape)}")
    half, width = len(features) // 2, features.shape[-1]
    labels = labels.expand(features.shape[:2])
    classes = int(labels.max()) + 1
    x, tests = (part.reshape(-1, width).double() for part in (features[:half], features[half:]))
    mean, std = x.mean(0), x.std(0).clamp_min(1e-12)
    x, tests = (torch.cat([(t - mean) / std, torch.ones(len(t), 1)], 1) for t in (x, tests))
    y, expected = labels[:half].reshape(-1), labels[half:].reshape(-1)
    penalty = ridge * len(x) * torch.eye(width + 1, dtype=x.dtype)

    def accuracy(given: Tensor) -> float:
        hot = nn.functional.one_hot(given, classes).double()
        weights = torch.linalg.solve(x.T @ x + penalty, x.T @ hot)
        return float(((tests @ weights).argmax(1) == expected).double().mean())

    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return {
        "accuracy": accuracy(y),
        "chance": float(expected.bincount().max() / len(expected)),
        "shuffled": accuracy(y[order]),
        "n": len(expected),
    }


@torch.no_grad()
def permutation_error(function: Callable[[Tensor], Tensor], x: Tensor, seed: int = 0) -> float:
    """The largest |f(Px) - P f(x)|, over the largest |f(x)|, for a random order P of the tokens.

    Shape: x [B, T, D]; f gives [B, T, any].
    """
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
    expected = function(x)[:, order]
    return float((function(x[:, order]) - expected).abs().max() / expected.abs().max())


def effective_rank(matrix: Tensor) -> float:
    """exp of the entropy of the singular values as shares (Roy and Vetterli 2007); 0 of zeros."""
    values = torch.linalg.svdvals(matrix.detach().double())
    if not values.any():
        return 0.0
    return float(torch.special.entr(values / values.sum()).sum().exp())


def effective_ranks(model: nn.Module) -> list[dict[str, Any]]:
    """Rows {"name", "skip", "pre_projection"}: of W_skip and W_down · W_up; None where absent."""
    return [
        {
            "name": name,
            "skip": None if m.skip is None else effective_rank(m.skip_matrix()),
            "pre_projection": None if m.up is None else effective_rank(m.down.weight @ m.up.weight),
        }
        for name, m in preproj_modules(model).items()
    ]
