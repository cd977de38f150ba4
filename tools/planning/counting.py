"""Running a model without memory: what its tensors would hold, and what its operations are."""

import gc
import importlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FORMULAS = {
    FLASH: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
if hasattr(F, "linear_cross_entropy"):  # the loss of a language model, and its gradients
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    HEAD_LOSS = torch.ops.torch_nn._linear_cross_entropy_batch_chunked
    FORMULAS[HEAD_LOSS] = lambda x, weight, *how, **_: (
        2 * x[0] * weight[0] * weight[1] * (1 + sum(how[-3:-1]))
    )


class Memory(TorchDispatchMode):
    """The bytes of the tensors that live, at their highest.

    Args:
        model: its parameters and buffers count from the start.
        share: what a gradient counts, 1 / N where N processes split it.
    """

    def __init__(self, model: nn.Module, share: float = 1.0) -> None:
        super().__init__()
        self.live = self.peak = self.split = self.split_peak = 0
        self.backward = False
        self.seen: dict[int, tuple[int, float]] = {}
        held = {id(t.untyped_storage()): t for t in (*model.parameters(), *model.buffers())}
        for tensor in held.values():
            self.add(tensor, 0.0)
        self.share = share
        gc.freeze()  # what is there already, so that collecting is quick
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.add(p.grad, self.share))

    def add(self, tensor: Tensor, share: float = 1.0) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        before = self.seen.get(key)
        if before is None:
            weakref.finalize(storage, self.drop, key)
        elif before[1] <= share:
            return
        self.drop(key)
        higher = self.live + size > self.peak or self.split + size * share > self.split_peak
        if higher and self.backward:
            # Recomputing ends in an exception, whose frames hold tensors until they are collected;
            # one tensor's end may be another's.
            before = None
            while before != self.live:
                before = self.live
                gc.collect()
        self.seen[key] = (size, share)
        self.live += size
        self.split += size * share
        self.peak, self.split_peak = max(self.peak, self.live), max(self.split_peak, self.split)

    def reset(self) -> tuple[int, float]:
        """The peaks so far, of all and of what processes do not split; they start again."""
        found, self.peak, self.split_peak = (self.peak, self.split_peak), self.live, self.split
        return found

    def drop(self, key: int) -> None:
        size, share = self.seen.pop(key, (0, 0.0))
        self.live -= size
        self.split -= size * share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        share = 1.0
        if func is torch.ops.aten._to_copy.default:  # FSDP2 gathers weights in autocast's dtype
            share = (
                0.0 if self.seen.get(args[0].untyped_storage()._cdata, (0, 1.0))[1] == 0 else 1.0
            )
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor, share)
        return out


def flash(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **grouped):
    """F.scaled_dot_product_attention by the kernel that keeps no map, whatever the device."""
    if grouped.get("enable_gqa"):
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, 1) for t in (key, value))
    return FLASH(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def without_memory(model: nn.Module) -> nn.Module:
    """A model on meta with tensors that pretend to be on the CPU. Call it in a FakeTensorMode."""
    made: dict[int, Tensor] = {}  # one that two modules share stays one

    def pretend(tensor: Tensor) -> Tensor:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        return made.setdefault(id(tensor), empty)

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({k: t and None if t is None else pretend(t) for k, t in tensors.items()})
    return model
