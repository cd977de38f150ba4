"""The mechanism of attaching: modules whose class is swapped for a subclass that runs the method.

A self-attention's subclass feeds x̃ to the attention's own forward and adds W_skip · x̃ to what comes
back. Where the branch is scaled on its way to the residual add, W_skip · x̃ is handed to a second
module behind the scale instead, within one call of their block.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from torch import Tensor, nn

from mmpreproj.preproj import PreProj

__all__ = ["AttentionSwap", "BlockSwap", "CarrySwap", "Handoff", "JoinOutputSwap", "JoinSwap"]
__all__ += ["ModelSwap", "NormSwap", "PretrainedSwap", "ReaderSwap", "Swapped", "swap", "swap_back"]


class Handoff(threading.local):
    """W_skip · x̃ on its way from an attention to the module where it joins, one per thread.

    It holds tensors only within one call of the block, and never when copied or pickled. `x_hat` is
    x̂ in the order of the residual stream, where the attention gets its tokens in another; `x_tilde`
    and `attention` are for projections that read x̃ within the attention's module.
    """

    running = False
    x_hat: Tensor | None = None
    x_tilde: Tensor | None = None
    attention: AttentionSwap | None = None
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
    preproj_divisor: float  # a constant by which the block multiplies what the skip joins
    preproj_reads: tuple[tuple[int, str], ...]  # the arguments that are x̂, by place and name
    preproj_readers: Handoff | None  # of x̃ to projections within, where the norm or the sum is, too
    preproj_channels_first: bool  # x̂ is a map [B, D, ...]
    preproj_place: tuple[int, int]  # levels below its block, rank within it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.preproj_readers is not None:
            return self._through_readers(*args, **kwargs)
        args = list(args)
        given = [*enumerate(args), *kwargs.items()]
        first = next(((key, v) for key, v in given if isinstance(v, Tensor)), (0, None))
        reads = [name if name in kwargs else place for place, name in self.preproj_reads]
        reads = [key for key, _ in given if key in reads] or [first[0]]
        x_hat = dict(given)[reads[0]]
        x_tilde = self._pre_projected(x_hat)
        for key, value in given:
            if key in reads or value is x_hat:  # q, k and v may be given one by one
                (kwargs if isinstance(key, str) else args)[key] = x_tilde
        branch = super().forward(*args, **kwargs)
        handoff = self.preproj_handoff
        if handoff is not None and handoff.x_hat is not None and self.preproj.skip is not None:
            x_tilde = self._pre_projected(handoff.x_hat)
        return self._hand_on(branch, x_tilde)

    def _through_readers(self, *args: Any, **kwargs: Any) -> Any:
        """Run a module in which projections read x̃: they say what x̂ is, and get x̃ from here."""
        readers = self.preproj_readers
        readers.attention = self
        try:
            branch = super().forward(*args, **kwargs)
            if self.preproj_handoff is None:
                branch = self._hand_on(branch, readers.x_tilde)
            return branch
        finally:
            readers.attention = readers.x_tilde = None

    def _read(self, x_hat: Tensor) -> Tensor:
        """x̃ for a projection; for the first of them the skip goes on its way, too."""
        readers = self.preproj_readers
        if readers.x_tilde is None:
            readers.x_tilde = self._pre_projected(x_hat)
            if self.preproj_handoff is not None:
                self._hand_on(None, readers.x_tilde)
        return readers.x_tilde.reshape(x_hat.shape)

    def _hand_on(self, branch: Any, x_tilde: Tensor) -> Any:
        """The branch with the skip in it, or as it is where the skip joins elsewhere."""
        if self.preproj.skip is None:
            return branch
        handoff, skip = self.preproj_handoff, self._skip(x_tilde)
        if handoff is None:
            return _added(branch, skip)
        if handoff.running:  # an attention called on its own has no residual stream to join
            handoff.skip = skip
        return branch

    def _pre_projected(self, x_hat: Tensor) -> Tensor:
        if self.preproj_channels_first:
            return self.preproj(x_hat.movedim(1, -1)).movedim(-1, 1)
        return self.preproj(x_hat)

    def _skip(self, x_tilde: Tensor) -> Tensor:
        if self.preproj_channels_first:
            skip = self.preproj.content_skip(x_tilde.movedim(1, -1)).movedim(-1, 1)
        else:
            skip = self.preproj.content_skip(x_tilde)
        return skip if self.preproj_divisor == 1 else skip / self.preproj_divisor


class ReaderSwap(Swapped):
    """A projection that reads x̃ in the place of x̂."""

    preproj_readers: Handoff

    def forward(self, x_hat: Tensor, *args: Any, **kwargs: Any) -> Any:
        attention = self.preproj_readers.attention
        x_tilde = x_hat if attention is None else attention._read(x_hat)
        return super().forward(x_tilde, *args, **kwargs)


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


class CarrySwap(Swapped):
    """A module that reads the residual stream, which has the skip in it from here on."""

    preproj_handoff: Handoff

    def forward(self, stream: Tensor, *args: Any, **kwargs: Any) -> Any:
        skip = self.preproj_handoff.skip
        stream = stream if skip is None else stream + skip.reshape(stream.shape)
        return super().forward(stream, *args, **kwargs)


class NormSwap(Swapped):
    """The norm that makes x̂, where the attention gets its tokens in another order."""

    preproj_handoff: Handoff

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x_hat = super().forward(*args, **kwargs)
        if self.preproj_handoff.running:
            self.preproj_handoff.x_hat = x_hat
        return x_hat


class BlockSwap(Swapped):
    """A block within which skips are handed on.

    `preproj_reads_block` are those whose x̂ is the block's own first argument, and
    `preproj_carries` those that join what the block returns as well.
    """

    preproj_handoffs: tuple[Handoff, ...]
    preproj_reads_block: tuple[bool, ...]
    preproj_carries: tuple[bool, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        handoffs = zip(
            self.preproj_handoffs, self.preproj_reads_block, self.preproj_carries, strict=True
        )
        handoffs = list(handoffs)
        for handoff, reads_block, _ in handoffs:
            handoff.running = True
            if reads_block:
                handoff.x_hat = args[0] if args else next(iter(kwargs.values()))
        try:
            out = super().forward(*args, **kwargs)
            for handoff, _, carries in handoffs:
                if carries and handoff.skip is not None:
                    out, handoff.skip = _added(out, handoff.skip), None
            lost = any(handoff.skip is not None for handoff in self.preproj_handoffs)
        finally:
            for handoff in self.preproj_handoffs:
                handoff.running = False
                handoff.skip = handoff.x_hat = None
        if lost:
            raise RuntimeError(
                "the skip of a block was not added: the module where it joins was replaced after "
                "attach (drop_path1, say). Call detach before changing the block, then attach again"
            )
        return out


class ModelSwap(Swapped):
    """A whole model, which notices when PEFT gives it adapters of another method."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "peft_config":
            from mmpreproj.peft_method.beside import keep_apart

            keep_apart(self, value)


class PretrainedSwap(ModelSwap):
    """A model of transformers, whose folders say that they hold the method."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As ever, and the folder of `mmpreproj.save` in the same place, for `from_pretrained`."""
        from mmpreproj import hf

        given = {"is_main_process": is_main_process, "state_dict": state_dict, **kwargs}
        if "preproj_attachment" not in vars(self):  # a new model of this class
            return super().save_pretrained(save_directory, **given)
        sharded = state_dict is None and any(hasattr(p, "full_tensor") for p in self.parameters())
        if is_main_process or sharded:
            hf.add_method(self, save_directory, state_dict, is_main_process)
        done = super().save_pretrained(save_directory, **given)
        if is_main_process:
            hf.mark(save_directory)
        return done

    def _upload_modified_files(self, working_dir: str, *args: Any, **kwargs: Any) -> Any:
        """What pushing to the hub ends in: transformers has written a card of its own by now."""
        from mmpreproj import hf

        if "preproj_attachment" in vars(self):
            hf.mark(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)


def _joined(branch: Any, handoff: Handoff) -> Any:
    """The branch with the skip that waits, if one does, in the layout the branch has by now."""
    skip, handoff.skip = handoff.skip, None
    return branch if skip is None else _added(branch, skip)


def _added(out: Any, skip: Tensor) -> Any:
    """What a module returns with the skip in it: in a tuple or a list, in its first element."""
    if isinstance(out, (tuple, list)):
        parts = (_added(out[0], skip), *out[1:])
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    return out + skip.reshape(out.shape)


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
    for name in [*vars(module), *module._modules]:
        if name == "preproj" or (name.startswith("preproj_") and name != "preproj_attachment"):
            delattr(module, name)
