"""Optimiser, schedule, mixing and loss: timm's own, chosen by small dataclasses.

The fields carry timm's words and defaults where timm has them, so that a published recipe can be
copied into a YAML file as it stands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from timm.data.mixup import Mixup, mixup_target
from timm.loss import BinaryCrossEntropy
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

__all__ = ["MixConfig", "Mixer", "OptimizerConfig", "ScheduleConfig", "as_config", "make_loss"]
__all__ += ["make_optimizer", "make_schedule"]

Config = TypeVar("Config")

# Of the method, by the names of its layers
PARTS = {"up": ("up",), "down": ("down",), "skip": ("skip", "reduce")}
SCHEDULES = ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant", "none")


def as_config(kind: type[Config], value: Config | Mapping[str, Any]) -> Config:
    """The dataclass itself; a mapping (from a checkpoint, say) is turned into it."""
    if not isinstance(value, Mapping):
        return value
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}; it has {known}")
    try:
        return kind(**value)
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"{kind.__name__}: {error}") from error


def _check(config: Any, where: str, at_least_0: tuple[str, ...]) -> None:
    """Raises ValueError for a null in a field that takes none (YAML's gets past the parser), and
    for what is below 0 and must not be."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None and "None" not in str(field.type):
            raise ValueError(f"{where}.{field.name} must be of type {field.type}, found null")
        if field.name in at_least_0 and value < 0:
            raise ValueError(f"{where}.{field.name} must be 0 or above, found {value}")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Keywords of `timm.optim.create_optimizer_v2`.

    Args:
        opt: timm's name of the optimiser (timm.optim.list_optimizers()).
        lr: peak learning rate, as it is: not scaled with the batch size.
        weight_decay: not applied to biases, norms and what the model's no_weight_decay() names.
        momentum: for the optimisers that have one.
        betas: for the optimisers that have them; None is the optimiser's default.
        eps: None is the optimiser's default.
        layer_decay: factor on the learning rate from each layer to the one below; None is off.
        layer_decay_min_scale: floor of that factor.
        opt_args: any further keywords of the optimiser.
        parts: of the method's "up", "down" and "skip": "lr" as a ratio to `lr`, and "weight_decay"
            in its own right, such as {"skip": {"lr": 0.1}}. W_down at 4 lr is LoRA+'s rule for B
            (Hayou et al. 2024, arXiv 2402.12354).
    """

    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    momentum: float = 0.9
    betas: list[float] | None = None
    eps: float | None = None
    layer_decay: float | None = None
    layer_decay_min_scale: float = 0.0
    opt_args: dict[str, Any] | None = None
    parts: dict[str, dict[str, float]] | None = None

    def __post_init__(self) -> None:
        _check(self, "optimizer", ("weight_decay",))
        for part, given in (self.parts or {}).items():
            if part not in PARTS or not given or set(given) - {"lr", "weight_decay"}:
                raise ValueError(
                    f"optimizer.parts gives {', '.join(PARTS)} an lr (a ratio), a weight_decay or "
                    f"both, found {part}: {given}"
                )
            for name, value in given.items():
                if not 0 <= value < math.inf:
                    raise ValueError(f"optimizer.parts.{part}.{name} must be 0 or above: {value}")
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ValueError(f"optimizer.lr must be above 0, found {self.lr}")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"optimizer.layer_decay must be in (0, 1], found {self.layer_decay}")


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Keywords of `timm.scheduler.create_scheduler_v2`; lengths in epochs, stepped every update.

    The schedule's length is the trainer's max_epochs or max_steps, counted in optimiser updates:
    gradient accumulation changes the number of updates, never the curve over epochs.

    Args:
        sched: cosine, tanh, step, multistep, poly, wsd, rsqrt, constant or none.
        warmup_epochs: linear warm-up, part of the total unless warmup_prefix is on.
        warmup_lr: where the warm-up starts.
        min_lr: where the decay ends.
        cooldown_epochs: at min_lr, at the end of the total.
        warmup_prefix: run the whole decay after the warm-up, instead of joining it midway.
        decay_epochs: step: interval; wsd and rsqrt: length of the decay (a value below 1 is a
            fraction).
        decay_milestones: multistep: epochs to decay at.
        decay_rate: step and multistep: factor; poly: power.
        k_decay: cosine and poly.
    """

    sched: str = "cosine"
    warmup_epochs: float = 0.0
    warmup_lr: float = 1e-6
    min_lr: float = 0.0
    cooldown_epochs: float = 0.0
    warmup_prefix: bool = False
    decay_epochs: float | None = None
    decay_milestones: list[float] = dataclasses.field(default_factory=lambda: [90, 180, 270])
    decay_rate: float = 0.1
    k_decay: float = 1.0

    def __post_init__(self) -> None:
        lengths = ("warmup_epochs", "warmup_lr", "min_lr", "cooldown_epochs")
        _check(self, "schedule", lengths)
        if self.sched not in SCHEDULES:
            hint = " (it follows a metric, not the updates)" if self.sched == "plateau" else ""
            raise ValueError(
                f"schedule.sched must be one of {', '.join(SCHEDULES)}, found {self.sched!r}{hint}"
            )


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Mixup and CutMix by `timm.data.Mixup`; both alphas at 0 is off.

    Args:
        mixup: alpha of mixup.
        cutmix: alpha of CutMix.
        cutmix_minmax: range of the box's side instead of alpha, as [low, high].
        prob: share of batches (or elements) that are mixed.
        switch_prob: share of CutMix where both are on.
        mode: one mix per batch, pair or element.
        off_epoch: no mixing from this epoch on; None is never.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    cutmix_minmax: list[float] | None = None
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"
    off_epoch: int | None = None

    def __post_init__(self) -> None:
        _check(self, "mix", ("mixup", "cutmix"))
        if self.cutmix_minmax is not None and len(self.cutmix_minmax) != 2:
            raise ValueError(f"mix.cutmix_minmax must be [low, high], found {self.cutmix_minmax}")

    @property
    def enabled(self) -> bool:
        """Whether anything is mixed."""
        some = self.mixup > 0 or self.cutmix > 0 or self.cutmix_minmax is not None
        return some and self.prob > 0


class Mixer:
    """timm's Mixup for batches of any size: in an odd batch, the last image stays unmixed.

    Shape: images [B, C, H, W], targets int64 [B] -> images, soft targets [B, num_classes].
    """

    def __init__(self, config: MixConfig, num_classes: int, label_smoothing: float) -> None:
        self.mixup = Mixup(
            mixup_alpha=config.mixup,
            cutmix_alpha=config.cutmix,
            cutmix_minmax=config.cutmix_minmax,
            prob=config.prob,
            switch_prob=config.switch_prob,
            mode=config.mode,
            label_smoothing=label_smoothing,
            num_classes=num_classes,
        )
        self.off_epoch = config.off_epoch

    def set_epoch(self, epoch: int) -> None:
        """Switch mixing off from `off_epoch` on; targets stay soft, so that the loss fits."""
        self.mixup.mixup_enabled = self.off_epoch is None or epoch < self.off_epoch

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        even = len(images) - len(images) % 2
        if even == len(images):
            return self.mixup(images, targets)
        rest = mixup_target(targets[even:], self.mixup.num_classes, 1.0, self.mixup.label_smoothing)
        if even == 0:
            return images, rest
        mixed, soft = self.mixup(images[:even].clone(), targets[:even])
        return torch.cat([mixed, images[even:]]), torch.cat([soft, rest.to(soft.dtype)])


def make_loss(
    mixed: bool, label_smoothing: float, bce: bool, bce_threshold: float | None
) -> nn.Module:
    """The training loss that timm's train.py takes with the same settings.

    Args:
        mixed: targets arrive soft, and smoothed, from the mixer.
        label_smoothing: for class-index targets.
        bce: one binary cross-entropy a class instead of a softmax.
        bce_threshold: with bce, soft targets above it become 1, others 0.
    """
    smoothing = 0.0 if mixed else label_smoothing
    if bce:
        return BinaryCrossEntropy(smoothing=smoothing, target_threshold=bce_threshold)
    return nn.CrossEntropyLoss(label_smoothing=smoothing)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """timm's optimiser over the trainable parameters of `model`, in timm's parameter groups.

    Raises:
        ValueError: if timm does not know the optimiser or it does not take a keyword.
    """
    given = {**vars(config), **(config.opt_args or {})}
    given = {k: v for k, v in given.items() if v is not None and k not in ("opt_args", "parts")}
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    try:
        optimizer = create_optimizer_v2(model, **given)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        known = config.opt.lower() in list_optimizers()
        hint = "" if known else f"; timm knows {', '.join(list_optimizers())}"
        raise ValueError(f"optimizer.opt={config.opt!r}: {error}{hint}") from error
    for part, own in (config.parts or {}).items():
        _split(optimizer, model, part, own)
    return optimizer


def _split(
    optimizer: torch.optim.Optimizer, model: nn.Module, part: str, own: Mapping[str, float]
) -> None:
    """Give a part of the method, in whatever groups it is, groups of its own."""
    ends = tuple(f".preproj.{name}.weight" for name in PARTS[part])
    ids = {id(p) for name, p in model.named_parameters() if name.endswith(ends)}
    groups = []
    for group in optimizer.param_groups:
        inside = [p for p in group["params"] if id(p) in ids]
        group["params"] = [p for p in group["params"] if id(p) not in ids]
        groups += [group] if group["params"] else []
        if inside:
            decay = own.get("weight_decay", group["weight_decay"])
            rate = group["lr"] * own.get("lr", 1.0)
            groups.append({**group, "params": inside, "lr": rate, "weight_decay": decay})
    if not any(id(p) in ids for group in groups for p in group["params"]):
        raise ValueError(f"optimizer.parts names {part}, of which the model trains nothing")
    optimizer.param_groups[:] = groups


def make_schedule(
    optimizer: torch.optim.Optimizer,
    config: ScheduleConfig,
    total_updates: float,
    updates_per_epoch: int,
) -> Scheduler | None:
    """timm's schedule over optimiser updates; None where sched is none.

    Args:
        total_updates: all updates of the run, partial accumulation windows included.
        updates_per_epoch: ceil(batches / accumulation).

    Raises:
        ValueError: if the total is unknown, or the cool-down leaves no room in it. A warm-up that
            does not fit is shortened, with a warning.
    """
    if config.sched == "none":
        return None
    if not math.isfinite(total_updates):
        raise ValueError(
            f"schedule.sched={config.sched!r} needs an end: set trainer.max_epochs or "
            "trainer.max_steps, or schedule.sched=none"
        )

    def updates(epochs: float) -> int:
        return round(epochs * updates_per_epoch)

    warmup, cooldown = updates(config.warmup_epochs), updates(config.cooldown_epochs)
    room = int(total_updates) - cooldown
    epochs = f"{total_updates / updates_per_epoch:g} epochs ({int(total_updates)} updates)"
    if room <= 0:
        raise ValueError(
            f"schedule.cooldown_epochs={config.cooldown_epochs:g} leaves nothing of a run of "
            f"{epochs}; shorten it (--model.schedule.cooldown_epochs), or raise trainer.max_epochs"
        )
    if warmup >= room:  # a short try of a long recipe: still warm up, and then decay
        warmup = min(room - 1, max(1, room // 10))
        rank_zero_warn(
            f"schedule.warmup_epochs={config.warmup_epochs:g} does not fit a run of {epochs}: the "
            f"warm-up is shortened to {warmup} updates"
        )
    length = room - (warmup if config.warmup_prefix else 0)
    decay = config.decay_epochs
    fraction = decay is not None and decay < 1 and config.sched in ("wsd", "rsqrt")
    # An "epoch" of timm's factory is one update here, so that every length is a whole number.
    lengths = {
        "num_epochs": length,
        "decay_epochs": decay if decay is None or fraction else max(1, updates(decay)),
        "decay_milestones": [updates(epoch) for epoch in config.decay_milestones],
        "cooldown_epochs": cooldown,
        "warmup_epochs": warmup,
    }
    given = {**vars(config), **lengths, "step_on_epochs": False, "updates_per_epoch": 1}
    return create_scheduler_v2(optimizer, **given)[0]
