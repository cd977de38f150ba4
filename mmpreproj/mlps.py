"""Finding the MLP of a block, and the x̂ that it reads, in what was read of the block's forward.

It is the one module beside attention that reads a norm of the residual stream, and whose output is
added to the stream. In a block whose norms stand behind the sums (BERT), that norm is the stream.
"""

from __future__ import annotations

import re

from torch import nn

from mmpreproj.architectures import Site
from mmpreproj.blocks import mentions_attention
from mmpreproj.branches import PASSES, Branches, NoSite, branch_of, is_norm
from mmpreproj.reading import Reader
from mmpreproj.values import Entry, Value, class_of

__all__ = ["read_mlp"]

_ROUTER = re.compile("router|experts|sparsemoe|topkgate", re.IGNORECASE)
_STREAM = PASSES | {"move", "add", "scale", "weigh"}


def read_mlp(block: nn.Module) -> Site:
    """The MLP of a block, with paths relative to it.

    Raises:
        NoSite: if there is none that can take a pre-projection, saying why.
    """
    paths: dict[int, str] = {}
    for path, module in block.named_modules():
        paths.setdefault(id(module), path)

    def into(path: str) -> bool:
        module = block.get_submodule(path)
        return any(module.children()) and not is_norm(module)

    try:
        reader = Reader(block, paths, into)
    except Exception as error:  # of a source that does what nobody thought of
        raise NoSite(f"its forward cannot be read: {error}") from error
    return _Mlp(block, reader).site()


class _Mlp(Branches):
    """The MLP of a block."""

    def site(self) -> Site:
        modules = [(path, module) for path, module in self.block.named_modules() if path]
        attentions = [p for p, m in modules if mentions_attention(m) and not _routes(m)]
        found: dict[str, tuple[Value, Value]] = {}
        for x_hat in self.reader.values:
            norm = x_hat.module if x_hat.op == "call" else None
            if norm is None or not is_norm(self.block.get_submodule(norm)):
                continue
            if not self.is_stream(x_hat.inputs[0]):
                continue
            for path, use in self.readers_of(x_hat).items():
                beside = not any(_related(path, attention) for attention in attentions)
                inner = any(path.startswith(f"{outer}.") for outer in found)
                if beside and not inner and self.is_added(use, x_hat):
                    found.setdefault(path, (use, x_hat))
        if not found:
            raise NoSite(
                "its MLP cannot be found: no module beside attention reads a norm of the residual "
                "stream and is added to it"
            )
        for path in found:
            if _routes(self.block.get_submodule(path)):
                raise NoSite(f"{path!r} is a mixture of experts, whose router reads x̂ too")
        if len(found) > 1:
            raise NoSite(f"its MLP is not one module: {', '.join(found)} read norms of the stream")
        ((path, (use, x_hat)),) = found.items()
        entry = self.entry_of(use)
        reader, reads = (path, False), ()
        if entry is not None:
            reader = self.first_reader(use, path)
            names = [name for name, v in entry.arguments.items() if v is use]
            reads = tuple((entry.names.index(name), name) for name in names)
        return Site(
            path,
            norm=x_hat.module,
            channels_first=reader[1],
            reads=reads,
            reader=reader[0] or path,
            mlp=True,
        )

    def is_stream(self, value: Value) -> bool:
        """Whether a value is the block's input with more added, or a norm of that."""
        seen, line = {value}, [value]
        for each in line:
            if each is self.reader.first:
                return True
            normed = each.op == "call" and is_norm(self.block.get_submodule(each.module))
            if each.op in _STREAM or normed:
                line.extend(v for v in each.inputs if v not in seen)
                seen.update(each.inputs)
        return False

    def readers_of(self, x_hat: Value) -> dict[str, Value]:
        """The outermost modules that read x̂ itself, by path, with the value that they get."""
        readers: dict[str, Value] = {}
        seen, line = {x_hat}, [x_hat]
        for value in line:
            for use in self.users[value]:
                if use.op in ("call", "enter"):
                    readers.setdefault(use.module, use)
                elif use.op in PASSES | {"move"} and use not in seen:
                    seen.add(use)
                    line.append(use)
        return readers

    def entry_of(self, use: Value) -> Entry | None:
        """The call of a module that was read into and gets this value."""
        calls = (e for e in self.reader.entries if any(v is use for v in e.arguments.values()))
        return next(calls, None)

    def is_added(self, use: Value, x_hat: Value) -> bool:
        """Whether what a module makes of x̂ is added to the residual stream, by it or behind it.

        The stream may come in beside x̂ (BLOOM), but not as x̂, which would then be changed too.
        """
        entry = self.entry_of(use)
        if entry is not None and self.carries(branch_of(entry), {use}):
            return False
        behind, stream = self.behind(use), self.stream(x_hat)
        sums = [v for v in behind if v.op == "add"]
        others = [v for total in sums for v in total.inputs if v not in behind]
        return any(self.carries(v, stream) for v in others)


def _routes(module: nn.Module) -> bool:
    """Whether a module is a mixture of experts, or the router of one."""
    inner = module.named_modules()
    return any(_ROUTER.search(f"{name} {class_of(each).__name__}") for name, each in inner)


def _related(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
