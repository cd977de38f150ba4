"""What a PEFT model has in place of the `PreProj` of a self-attention."""

from __future__ import annotations

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from mmpreproj.preproj import PreProj

__all__ = ["PreProjLayer"]

NO_MERGE = (
    "the pre-projection is nonlinear and cannot be merged into the base's weights; keep the "
    "adapter, or call unload() for the base without it"
)


class PreProjLayer(nn.Module, BaseTunerLayer):
    """The `PreProj`s of all adapters, by name; in the attention's eyes it is the active one.

    It does nothing where the active adapter leaves this attention out, or all are disabled.

    Args:
        like: a parameter of the attention, for its device.
    """

    adapter_layer_names = ("by_name",)
    weight = bias = None  # BaseTunerLayer would ask a wrapped layer, and there is none

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict()
        # Empty, but it moves with the base, so that adapters loaded later know where to go
        self.register_buffer("like", like.new_empty(0), persistent=False)

    @property
    def active(self) -> PreProj | None:
        if self.disable_adapters:
            return None
        return next((self.by_name[n] for n in self.active_adapters if n in self.by_name), None)

    @property
    def skip(self) -> nn.Linear | None:
        return None if self.active is None else self.active.skip

    def forward(self, x_hat: Tensor) -> Tensor:
        """x̂ -> x̃. Shape: [..., D] -> the same."""
        return x_hat if self.active is None else self.active(x_hat)

    def content_skip(self, x_tilde: Tensor) -> Tensor:
        """W_skip · x̃. Shape: [..., D] -> the same."""
        assert self.active is not None, "content_skip() without an active adapter"
        return self.active.content_skip(x_tilde)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Raises ValueError for more than one: the method says nothing of two together."""
        if not isinstance(adapter_names, str) and len(adapter_names) > 1:
            raise ValueError(f"one adapter can be active at a time, found {adapter_names}")
        super().set_adapter(adapter_names, inference_mode=inference_mode)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(NO_MERGE)

    def unmerge(self) -> None:
        """Nothing to do: nothing is ever merged. A LoRA beside it calls this."""

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, None]:
        return self.like.device, None  # loaded adapters keep the dtype they were saved with
