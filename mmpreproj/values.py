"""What is known of a value that is computed from an input, and of modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from mmpreproj.expressions import Unknown

__all__ = ["Entry", "Value", "class_of", "forward_of", "values_in"]


@dataclasses.dataclass(eq=False)
class Value(Unknown):
    """Something that is computed from an input, known by what computed it.

    Args:
        op: "input" (an argument of the forward that is read); "call" (a module that is not read
            into); "enter" and "out" (an argument of a module that is read into, and what it
            returns); "drop" (dropout, DropPath, Identity); "shape" (the same numbers in the same
            order: a reshape, a cast); "move" (the same numbers in another order, or some of them);
            "item" (an element of what a call returns); "add"; "scale" (times `number`); "weigh"
            (times a parameter); "either" (one of its inputs); "matmul"; "softmax"; "attend" (fused
            attention of q, k and v); "fact" (a shape, a dtype, a truth); "other".
        inputs: the values it was computed of.
        scope: the paths of the modules within which that was, the outermost first.
        line: where the source says so.
        module: the path of the module, for "call", "drop", "enter" and "out".
        key: the name of the argument ("input", "enter"), or which element ("item", "out").
    """

    op: str
    inputs: tuple[Value, ...]
    order: int
    scope: tuple[str, ...]
    line: str
    module: str | None = None
    key: Any = None
    number: float = 1.0

    @property
    def fixed(self) -> bool:
        """Whether it comes of parameters alone."""
        return self.op in ("other", "scale", "weigh", "shape", "move", "add") and all(
            value.fixed for value in self.inputs
        )

    def __repr__(self) -> str:
        return f"<{self.order} {self.op} {self.module or ''} {self.key or ''} {self.line}>"


@dataclasses.dataclass
class Entry:
    """One call of a module that was read into: its arguments by name, and what it returned."""

    path: str
    arguments: dict[str, Any]
    names: list[str]
    output: Any = None


def class_of(module: nn.Module) -> type:
    """The class that a module was built as, whatever attach and FSDP2's fully_shard made of it."""
    cls = next(c for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))
    return getattr(cls, "preproj_base_class", cls)


def forward_of(module: nn.Module) -> Any:
    """The forward of a module's class, without its decorators."""
    return inspect.unwrap(class_of(module).forward)


def values_in(given: Any) -> Iterator[Value]:
    """The values within nested tuples, lists, dicts and slices."""
    if isinstance(given, Value):
        yield given
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from values_in(each)
    elif isinstance(given, dict):
        yield from values_in(list(given.values()))
