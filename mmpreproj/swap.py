"""The mechanism of attaching: modules whose class is swapped for a subclass that runs the method.

A self-attention's subclass feeds x̃ to the attention's own forward and adds W_skip · x̃ to what comes
back. Where the branch is scaled on its way to the residual add, W_skip · x̃ is handed to a second
module behind the scale instead, within one call of their block.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from torch import Tensor, nn

from mmpreproj.preproj import PreProj


class Handoff(threading.local):
    """W_skip · x̃ on its way from an attention to the module where it joins, one per thread.

    It holds a tensor only within one call of the block, and never when copied or pickled.
    """

    running = False
    skip: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Handoff, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Handoff:
        return Handoff()


class Swapped:
    """A module whose class was swapped; `preproj_base_class` is the class it had."""

    preproj_base_class: type

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The subclass is made at run time, so pickle and deepcopy are told how to make it again.
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return (_rebuild, type(self).__bases__, *state)


class AttentionSwap(Swapped):
    """A self-attention that reads x̃ and passes W_skip · x̃ on."""

    preproj: PreProj
    preproj_handoff: Handoff | None
    preproj_divisor: float  # a constant by which the block multiplies what the attention returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            x_tilde = self.preproj(args[0])
            branch = super().forward(x_tilde, *args[1:], **kwargs)
        else:
            x_tilde = self.preproj(kwargs["hidden_states"])
            branch = super().forward(**{**kwargs, "hidden_states": x_tilde})
        if self.preproj.skip is None:
            return branch
        skip = self.preproj.content_skip(x_tilde)
        handoff = self.preproj_handoff
        if handoff is None:
            divisor = self.preproj_divisor
            return _add_to_branch(branch, skip if divisor == 1 else skip / divisor)
        if handoff.running:  # an attention called on its own has no residual stream to join
            handoff.skip = skip
        return branch


class JoinSwap(Swapped):
    """The module behind the branch's scale: adds the skip to its input, once a call."""

    preproj_handoff: Handoff

    def forward(self, branch: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(_joined(branch, self.preproj_handoff), *args, **kwargs)


class JoinOutputSwap(Swapped):
    """The module that scales the branch: adds the skip to its output, once a call."""

    preproj_handoff: Handoff

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _joined(super().forward(*args, **kwargs), self.preproj_handoff)


class BlockSwap(Swapped):
    """A block within which a skip is handed on."""

    preproj_handoffs: tuple[Handoff, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for handoff in self.preproj_handoffs:
            handoff.running = True
        try:
            out = super().forward(*args, **kwargs)
            lost = any(handoff.skip is not None for handoff in self.preproj_handoffs)
        finally:
            for handoff in self.preproj_handoffs:
                handoff.running = False
                handoff.skip = None
        if lost:
            raise RuntimeError(
                "the skip of a block was not added: the module where it joins was replaced after "
                "attach (drop_path1, say). Call detach before changing the block, then attach again"
            )
        return out


def _joined(branch: Tensor, handoff: Handoff) -> Tensor:
    """The branch with the skip that waits, if one does, in the layout the branch has by now."""
    skip, handoff.skip = handoff.skip, None
    return branch if skip is None else branch + skip.reshape(branch.shape)


def _add_to_branch(branch: Any, skip: Tensor) -> Any:
    if isinstance(branch, tuple):
        return (branch[0] + skip, *branch[1:])
    return branch + skip


@functools.cache
def _swapped_class(mixin: type, base: type) -> type:
    # The base's own name, so that whatever finds modules by class name (FSDP policies) still does.
    body = {"preproj_base_class": base, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (mixin, base), body)


def _rebuild(mixin: type, base: type) -> nn.Module:
    cls = _swapped_class(mixin, base)
    return cls.__new__(cls)


def swap(module: nn.Module, mixin: type, attributes: dict[str, Any]) -> None:
    """Make `module` run `mixin`, in place, with the attributes that the mixin needs."""
    for name, value in attributes.items():
        setattr(module, name, value)
    module.__class__ = _swapped_class(mixin, type(module))


def swap_back(module: nn.Module) -> None:
    """Undo `swap`: the module has its own class again, and none of the attributes."""
    module.__class__ = type(module).preproj_base_class
    for name in ("preproj", "preproj_handoff", "preproj_handoffs", "preproj_divisor"):
        if name in vars(module) or name in module._modules:
            delattr(module, name)
