"""What PEFT has made of a model, known by its marks: PEFT need not be there."""

from __future__ import annotations

from torch import nn

__all__ = ["adapters_beside", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, of a PeftModel around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters_beside(model: nn.Module) -> list[str]:
    """The paths of what PEFT's other methods have put into a model, such as LoRA's matrices."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in getattr(module, "adapter_layer_names", ())
    ]
