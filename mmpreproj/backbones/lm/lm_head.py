"""A language model in two parts: the base model, up to the last hidden states, and the head behind.

Logits are wide (a vocabulary has 50,000 rows and more), so whoever scores or trains wants the head
apart: on some of the rows only, or a piece at a time. What a head does beyond its matrix (bias,
scaling, soft cap) is read off the model, and checked against the model's own logits once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmpreproj.attach import refuse_compiled
from mmpreproj.backbones.modes import evaluating

__all__ = ["LMHead", "check_packing", "hidden_states", "lm_head_of"]

# What transformers' models do to the logits behind the matrix, by the name in their configuration:
# multiply them by this power of it (Cohere; Falcon-H1; Granite divides), or cap them (Gemma 2 on).
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
_SOFT_CAP = "final_logit_softcapping"

# The check amplifies the head's input until its logits reach this, so that a soft cap (30 in
# Gemma 2) shows whatever the weights are.
_CHECK_LOGIT = 100.0
_CHECK_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class LMHead:
    """u = multiplier · (W · hidden + b); logits = cap · tanh(u / cap), or u where there is no cap.

    `projection` is the model's own output layer, not a copy of it: `weight` and `bias` are what it
    holds at the time.
    """

    projection: nn.Module
    multiplier: float = 1.0
    soft_cap: float | None = None

    @property
    def weight(self) -> Tensor:
        """[V, D], the model's own parameter."""
        return _linear(self.projection).weight

    @property
    def bias(self) -> Tensor | None:
        """[V], or None."""
        return _linear(self.projection).bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Shape: hidden [..., D] -> [..., V], in the model's dtype (autocast's under autocast)."""
        logits = F.linear(hidden, self.weight, self.bias)
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits


def lm_head_of(model: nn.Module) -> LMHead:
    """The output head of a decoder-only language model; of a PeftModel, that of its base.

    The first call for a model compares the head of its hidden states with its own logits on a few
    random ids: an architecture whose final arithmetic is not known here does not pass.

    Raises:
        ValueError: naming the architecture and what was found, if it has no output layer, one that
            is not a plain matrix, or logits that come about in another way.
    """
    refuse_compiled(model)
    inner = _inner(model)
    projection = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    name = type(inner).__name__
    encoder_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    if projection is None or encoder_decoder or inner.base_model is inner:
        raise ValueError(
            f"{name} is not a decoder-only language model with an output layer (an …ForCausalLM of "
            "transformers, or a PeftModel of one)"
        )
    given = {key: getattr(inner.config, key, None) for key in (*_SCALES, _SOFT_CAP)}
    given = {key: float(value) for key, value in given.items() if value is not None}
    soft_cap = given.pop(_SOFT_CAP, None)
    multiplier = math.prod((value ** _SCALES[key] for key, value in given.items()), start=1.0)
    head = LMHead(projection, multiplier, soft_cap)
    _check_weight(head, name)
    if model not in _checked:
        _check_arithmetic(model, head, name)
        _checked.add(model)
    return head


def hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool = False,
    position_ids: Tensor | None = None,
) -> Tensor | tuple[Tensor, Any]:
    """The hidden states that the head reads: `lm_head_of(model).logits(...)` makes logits of them.

    Args:
        attention_mask: 1 at real tokens, [B, past + T], or whatever else the model takes. Positions
            count the real tokens, as in `generate`, so that left padding shifts nothing.
        past_key_values: a cache of transformers, which grows in place.
        use_cache: also return the cache.
        position_ids: [B, T]; where they start at 0 again, transformers takes another text to begin,
            which does not see what is before (with neither a mask nor a cache; `check_packing`).

    Returns:
        Hidden states [B, T, D]; with `use_cache`, these and the cache.
    """
    inner = _inner(model)
    base = inner.base_model
    parameters = _parameters(type(base))
    keywords: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    masked = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
    if masked and "position_ids" in parameters:  # ALiBi reads the mask
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        keywords["position_ids"] = positions[:, -input_ids.shape[1] :]
    if past_key_values is not None:  # transformers 5.24 renamed it
        keywords["cache" if "cache" in parameters else "past_key_values"] = past_key_values
    out = base(
        input_ids=input_ids,
        attention_mask=attention_mask,
        use_cache=use_cache,
        return_dict=True,
        **keywords,
    )
    if not use_cache:
        return out.last_hidden_state
    cache = getattr(out, "cache", None)
    return out.last_hidden_state, out.past_key_values if cache is None else cache


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Raises ValueError unless texts side by side in a row are read as each alone."""
    refusal = (
        f"{type(_inner(model)).__name__} does not keep the documents of a block apart by their "
        "positions, so packing_strategy='bfd' would let them see each other: use 'wrapped'"
    )
    embeddings = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(embeddings), (1, 9), generator=generator).to(embeddings.device)
    if "position_ids" not in _parameters(type(_inner(model).base_model)):
        raise ValueError(refusal)
    positions = torch.tensor([[*range(4), *range(5)]], device=ids.device)
    with evaluating(model), torch.autocast(embeddings.device.type, enabled=False):
        found = hidden_states(model, ids, position_ids=positions)
        alone = [hidden_states(model, part) for part in ids.split([4, 5], 1)]
    # another order of sums through all layers; what another document changes shows far above it
    bound = torch.finfo(found.dtype).eps ** 0.5 * found.abs().max()
    if (found - torch.cat(alone, 1)).abs().max() > bound:
        raise ValueError(refusal)


@functools.cache
def _parameters(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters)


def _inner(model: nn.Module) -> nn.Module:
    """The transformers model: that of a PeftModel has the active adapters within it."""
    if not hasattr(model, "get_base_model"):
        return model
    config = model.active_peft_config
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"{config.peft_type} puts tokens of its own before the text, so its hidden states do "
            "not line up with it; use an adapter that changes layers (LoRA, this method)"
        )
    return model.get_base_model()


def _linear(projection: nn.Module) -> nn.Module:
    """The layer in use: PEFT's modules_to_save keeps several, one for each adapter."""
    saved = getattr(projection, "modules_to_save", None)
    if saved is None:
        return projection
    if projection.disable_adapters or not projection.active_adapters:
        return projection.original_module
    name = projection.active_adapters[0]
    return saved[name] if name in saved else projection.original_module


def _check_weight(head: LMHead, name: str) -> None:
    linear = _linear(head.projection)
    weight = getattr(linear, "weight", None)
    if isinstance(weight, Tensor) and weight.is_meta:
        raise ValueError(f"the output layer of {name} is offloaded; load the model without that")
    if hasattr(linear, "base_layer"):
        raise ValueError(
            f"the output layer of {name} carries an adapter of its own ({type(linear).__name__}): "
            "take it out of target_modules, or name it in modules_to_save to train all of it"
        )
    plain = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    if not plain or weight.element_size() < 2:
        found = f"{type(linear).__name__} with weight {getattr(weight, 'dtype', None)}"
        raise ValueError(f"the output layer of {name} must be a plain matrix, found {found}")


_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@torch.no_grad()
def _check_arithmetic(model: nn.Module, head: LMHead, name: str) -> None:
    weight = head.weight
    rows = _inner(model).get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(rows, (1, _CHECK_TOKENS), generator=generator).to(weight.device)
    seen: list[Tensor] = []

    def amplify(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(args[0])
        largest = (F.linear(args[0], weight) * head.multiplier).abs().max().float()
        factor = _CHECK_LOGIT / largest if largest > 0 else torch.ones_like(largest)
        seen.append(args[0] * factor.to(args[0].dtype))
        return (seen[1],)

    with evaluating(model), torch.autocast(weight.device.type, enabled=False):
        hidden = hidden_states(model, ids)
        handle = head.projection.register_forward_pre_hook(amplify)
        try:
            expected = model(input_ids=ids, use_cache=False).logits
        finally:
            handle.remove()
        read, amplified = seen if len(seen) == 2 else (hidden.new_empty(0), hidden)
        found = head.logits(amplified)
    if not bool(hidden.isfinite().all()):
        raise ValueError(
            f"the hidden states of {name} are not finite (NaN or infinity): its weights have "
            f"diverged, or its activations overflow in {weight.dtype}: use an earlier checkpoint, "
            "or float32"
        )
    for what, ours, own in (("hidden states", hidden, read), ("logits", found, expected)):
        if not _close(ours, own, torch.finfo(weight.dtype).eps):
            raise ValueError(
                f"{name} (model_type {_inner(model).config.model_type!r}) makes its logits in a "
                f"way that is not known here: its {what} differ from what a matrix, a bias, a "
                f"scale ({head.multiplier:g}) and a soft cap ({head.soft_cap}) give behind its "
                f"{type(_inner(model).base_model).__name__}"
            )


def _close(found: Tensor, expected: Tensor, eps: float) -> bool:
    """Equal but for a few roundings of the largest value."""
    if found.shape != expected.shape:
        return False
    found, expected = found.double(), expected.double()
    return torch.allclose(found, expected, rtol=0.0, atol=8 * eps * expected.abs().max().item())
