"""What the forward of a module computes, read from its source without running it.

`mmpreproj.source` walks; here stands what modules, tensors and torch's functions mean. The result
is a graph: every `Value` that the forward may compute, and of which others. `mmpreproj.blocks`
finds attention in it. No input is needed, so a model on the meta device is read as any other.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mmpreproj.expressions import MOST_STEPS, Raises, Super, Unreadable
from mmpreproj.source import Walker
from mmpreproj.values import Entry, Value, class_of, forward_of, values_in

__all__ = ["Reader"]


_words = str.split
# What functions of torch and methods of tensors do, by name
_OPS = {
    "shape": _words(
        "reshape view view_as flatten unflatten squeeze unsqueeze to float half bfloat16 double "
        "type type_as contiguous clone expand expand_as requires_grad_ detach squeeze unfold_shape"
    ),
    "move": _words(
        "permute transpose movedim swapaxes t roll pad flip cat concat concatenate stack hstack "
        "repeat repeat_interleave chunk split unbind narrow select index_select gather tile "
        "rearrange tensor_split split_with_sizes"
    ),
    "fact": _words("size dim numel is_floating_point element_size get_device stride"),
    "drop": _words("dropout dropout1d dropout2d alpha_dropout feature_dropout drop_path"),
    "matmul": _words("matmul bmm baddbmm einsum mm"),
    "softmax": _words("softmax stable_softmax softmax_fp32 logsumexp"),
}
_FACTS = _words("shape dtype device ndim requires_grad training is_cuda")
_ATTENDS = re.compile(
    r"scaled_dot_product_attention|\w*attention_(interface|function|fn|forward)|flash_attn\w*|"
    r"\w*flex_attention\w*|memory_efficient_attention|mra2_attention|YosoCumulation"
)
_NORMAL = ("torch.nn.modules.linear", "torch.nn.modules.conv", "torch.nn.modules.normalization")
_DROPS = re.compile("Drop(out|Path)|StochasticDepth")


class Reader(Walker):
    """What the forward of `root` may compute: `values`, in order, and `entries` of submodules.

    Args:
        paths: the path of each submodule of root by its id.
        into: says of a path whether that submodule is read into where it is given one value; given
            several it always is.

    Raises:
        Unreadable: if the forward cannot be read. A submodule's that cannot is one "call".
    """

    def __init__(self, root: nn.Module, paths: dict[int, str], into: Callable[[str], bool]) -> None:
        super().__init__()
        self.paths, self.into = paths, into
        self.values: list[Value] = []
        self.entries: list[Entry] = []
        self.scope: list[str] = []
        self.written: dict[tuple[int, str], Any] = {}
        self.taken: list[tuple[str, tuple[str, ...]]] = []  # modules of which tensors are read
        forward = forward_of(root)
        self.optional: set[Value] = set()  # inputs that are None unless they are given
        (own, _), *parameters = inspect.signature(forward).parameters.items()
        names: dict[str, Any] = {own: root}
        for name, parameter in parameters:
            rest = {parameter.VAR_POSITIONAL: (), parameter.VAR_KEYWORD: {}}
            names[name] = rest.get(parameter.kind)
            if parameter.kind not in rest:
                names[name] = self.value("input", key=name)
                if parameter.default is not parameter.empty:
                    self.optional.add(names[name])
        self.first = next(iter(self.values), None)
        self.output = self.run(forward, names, _owner(class_of(root), forward))

    def value(self, op: str, *of: Any, **fields: Any) -> Value:
        inputs = tuple(dict.fromkeys(values_in(of)))
        made = Value(op, inputs, len(self.values), tuple(self.scope), self.line, **fields)
        self.values.append(made)
        return made

    # Unknown values

    def unknown(self, *of: Any) -> Value:
        kinds = {v.op for v in values_in(of)}
        return self.value("fact" if kinds == {"fact"} else "other", of)

    def are_parts(self, turns: list) -> bool:
        return len(turns) < 200 and any(isinstance(each, nn.Module) for each in turns)

    def has_unknown(self, given: Any) -> bool:
        if isinstance(given, (tuple, list, dict)):
            return any(map(self.has_unknown, given.values() if isinstance(given, dict) else given))
        return isinstance(given, (Value, Tensor))

    def two(self, a: Any, b: Any) -> Any:
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and a and b:
            first = self.either(a[0], b[0])  # tuples of other lengths, or a tuple and a list
            return (first, self.unknown(a[1:], b[1:]))
        if isinstance(a, dict) and isinstance(b, dict):
            return {name: self.either(a.get(name), b.get(name)) for name in {**a, **b}}
        return self.value("either", a, b)

    def is_none(self, held: Any) -> bool | None:
        if not isinstance(held, Value):
            return held is None
        if held in self.there or held is self.first:
            return False
        if held.op == "enter":
            return self.is_none(held.inputs[0])
        return None if held.op in ("input", "either", "item", "other") else False

    def is_truth(self, held: Any) -> bool:
        return isinstance(held, Value) and held.op == "fact"

    def is_there(self, held: Value) -> Value:
        return self.value("fact", held, key=frozenset({held}))

    def there_if(self, test: Any) -> frozenset[Value]:
        known = isinstance(test, Value) and isinstance(test.key, frozenset)
        return test.key if known else frozenset()

    def all_hold(self, tests: list[Any]) -> Any:
        there = frozenset().union(*map(self.there_if, tests))
        return self.value("fact", tests, key=there) if there else self.unknown(tests)

    def binary(self, op: Callable, a: Any, b: Any) -> Any:
        if not self.has_unknown((a, b)):
            try:
                return op(a, b)
            except Exception as error:
                raise Raises(f"{op.__name__} fails at {self.line}: {error}") from error
        values = list(values_in((a, b)))
        if values and all(v.op == "fact" for v in values):
            return self.value("fact", a, b)
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return (*a, *b)
        if isinstance(a, tuple) and op is operator.add:  # outputs + what a call gave beside
            return (*a, b)
        if op is operator.add:
            return self.value("add", a, b)
        if op is operator.sub:
            return self.value("add", a, self.binary(operator.mul, b, -1))
        if op is operator.matmul:
            return self.value("matmul", a, b)
        fixed = [not isinstance(v, Value) or v.fixed for v in (a, b)]
        if op in (operator.mul, operator.truediv) and any(fixed) and not all(fixed):
            known = b if fixed[1] else a
            if isinstance(known, (int, float)) and (isinstance(a, Value) or op is operator.mul):
                number = float(known) if op is operator.mul else 1 / known if known else 0.0
                return self.value("scale", a, b, number=number, key=self.text)
            if isinstance(known, (Tensor, Value)) and op is operator.mul:
                return self.value("weigh", a, b)
        return self.value("other", a, b, key="product")

    def attribute(self, of: Any, name: str) -> Any:
        if isinstance(of, nn.Module):
            if name == "training" or (id(of), name) in self.written:
                return self.value("fact")  # it may be another in the next call
        elif isinstance(of, Value):
            if name in _FACTS or of.op == "fact":
                return self.value("fact", of)
            return self.value("move" if name in ("T", "mT") else "item", of, key=name)
        if isinstance(of, Super):
            return self._of_super(of, name)
        try:
            found = getattr(of, name)
            if isinstance(of, nn.Module) and isinstance(found, Tensor):
                self.taken.append((self.paths.get(id(of), ""), tuple(self.scope)))
            return found
        except AttributeError as error:
            raise Raises(f"{type(of).__name__} has no {name!r}, {self.line}") from error

    def _of_super(self, of: Super, name: str) -> Any:
        mro = class_of(of.of).__mro__ if isinstance(of.of, nn.Module) else ()
        for cls in mro[mro.index(of.owner) + 1 :] if of.owner in mro else ():
            if name in vars(cls):
                return _Method(inspect.unwrap(vars(cls)[name]), cls, of.of)
        raise Unreadable(f"super().{name} is not found, {self.line}")

    def set_attribute(self, of: Any, name: str, given: Any) -> None:
        if isinstance(of, nn.Module):  # the instance itself is left alone
            self.written[id(of), name] = given

    def item(self, of: Any, key: Any) -> Any:
        if isinstance(of, Value):
            if of.op == "fact":
                return self.value("fact", of)
            # of what a call returns it may be an element; of a tensor it is some of the tokens
            whole = of.op in ("call", "attend", "other", "input", "enter", "out")
            simple = isinstance(key, (int, str))
            if whole and simple:
                return self.value("item", of, key=key)
            return self.value("move", of, key, key=None if self.has_unknown((key,)) else "part")
        if isinstance(of, Tensor) or self.has_unknown((key,)):
            return self.unknown(of, key)
        if isinstance(of, dict) and key not in of:
            return self.unknown(of)
        try:
            return of[key]
        except Exception as error:
            raise Raises(f"{type(of).__name__}[{key!r}] fails, {self.line}") from error

    def unpacked(self, given: Any, number: int) -> list[Any]:
        if isinstance(given, (tuple, list)) and len(given) == number:
            return list(given)
        if isinstance(given, (tuple, list)):
            more = [self.unknown(given) for _ in range(number)]
            return [*given, *more][:number]
        if isinstance(given, Value) and given.op in ("fact", "move"):
            return [self.value(given.op, given) for _ in range(number)]
        return [self.value("item", given, key=i) for i in range(number)]

    # Calls

    def call(self, function: Any, args: list, kwargs: dict, name: str) -> Any:
        given, of = (args, kwargs), getattr(function, "__self__", None)
        if name == "get_interface":  # of transformers: which attention runs does not matter here
            return _attention_interface
        if isinstance(function, nn.Module):
            return self.call_module(function, args, kwargs)
        kernel = isinstance(of, type) and _ATTENDS.fullmatch(of.__name__)  # of autograd: its apply
        if kernel or any(map(_ATTENDS.fullmatch, (getattr(function, "__name__", name), name))):
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Value)]
            if len(tensors) > 2:  # masks stand behind q, k and v, or before them
                return self.value("attend", *(tensors[-3:] if kernel else tensors[:3]))
        if isinstance(of, list) and name in ("append", "extend", "insert") and id(of) in self.made:
            whole = name == "extend" and isinstance(args[0], Value)
            return of.append(args[0]) if whole else function(*args)
        if function is nn.Softmax:
            return function()
        if isinstance(function, type) and hasattr(function, "_fields"):  # a named tuple
            return function(*args, **kwargs)
        if isinstance(function, Value):
            method = function.op == "item" and isinstance(function.key, str)
            of = function.inputs if method else (function,)
            return self.operation(name, [*of, *args], kwargs)
        if function in (len, isinstance, int, float, bool, range, hasattr, getattr, type, max, min):
            return self.value("fact", given)
        if isinstance(function, functools.partial):
            return self.call(
                function.func, [*function.args, *args], {**function.keywords, **kwargs}, name
            )
        if isinstance(function, _Method):
            return self.call_function(
                function.function, [function.of, *args], kwargs, function.owner
            )
        if function in (list, tuple) and args and isinstance(args[0], (tuple, list)):
            return function(args[0])
        if function in (zip, enumerate, reversed) and not any(isinstance(a, Value) for a in args):
            return list(function(*args))
        if inspect.ismethod(function) and isinstance(of, nn.Module):
            plain = inspect.unwrap(function.__func__)
            owner = _owner(class_of(of), plain)
            return self.call_function(plain, [of, *args], kwargs, owner)
        if isinstance(of, Tensor):
            return self.operation(name, [of, *args], kwargs)
        if inspect.ismethod(function) and isinstance(of, type) and issubclass(of, nn.Module):
            return self.call_function(inspect.unwrap(function.__func__), [of, *args], kwargs, of)
        made_by = getattr(function, "__module__", None) or ""
        plain = inspect.unwrap(function) if inspect.isfunction(function) else None
        if plain is not None and not made_by.startswith("torch.") and name not in _OPS["drop"]:
            held = len(self.values), list(self.scope), self.depth
            try:
                return self.call_function(plain, args, kwargs)
            except Unreadable:
                if self.steps > MOST_STEPS:
                    raise
                del self.values[held[0] :]
                self.scope, self.depth = held[1], held[2]
        return self.operation(name, args, kwargs)

    def call_function(self, function: Any, args: list, kwargs: dict, owner: Any = None) -> Any:
        return self.run(function, self.bound(function, args, kwargs), owner)

    def bound(self, function: Any, args: list, kwargs: dict) -> dict[str, Any]:
        """Arguments by name. One that is missing comes with the *args or **kwargs that are read."""
        try:
            signature = inspect.signature(function)
            found = signature.bind_partial(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise Unreadable(f"it is called otherwise than it is defined: {error}") from error
        found.apply_defaults()
        for name in signature.parameters:
            if name not in found.arguments:
                found.arguments[name] = self.value("input", key=name)
                self.first = self.first or found.arguments[name]
        return {name: found.arguments[name] for name in signature.parameters}

    def operation(self, name: str, args: list, kwargs: dict) -> Any:
        """A function of torch, or a method of a tensor."""
        plain = name.rstrip("_")
        arithmetic = {"multiply": "mul", "div": "truediv", "true_divide": "truediv"}.get(
            plain, plain
        )
        if arithmetic in ("add", "mul", "sub", "truediv") and len(args) == 2 and not kwargs:
            return self.binary(getattr(operator, arithmetic), *args)
        if plain in ("baddbmm", "addmm"):  # a sum with a product, which is what counts
            args, plain = args[1:], "bmm"
        op = next((op for op, names in _OPS.items() if plain in names), None)
        values = list(values_in((args, kwargs)))
        if values and all(v.op == "fact" for v in values):
            op = "fact"
        named = plain if op in (None, "shape") else None
        return self.value(op or "other", args, kwargs, key=named)

    def call_module(self, module: nn.Module, args: list, kwargs: dict) -> Any:
        path, cls = self.paths.get(id(module)), class_of(module)
        if isinstance(module, nn.Softmax) or cls.__name__.endswith("Softmax"):
            return self.value("softmax", args, module=path)
        if path is None:
            return self.value("other", args, kwargs)
        if isinstance(module, nn.Identity) or (
            _DROPS.search(cls.__name__) and next(module.parameters(), None) is None
        ):
            return self.value("drop", args[:1] or kwargs, module=path)
        if isinstance(module, nn.MultiheadAttention):
            return self.enter(path, module, args, kwargs, self._multihead)
        if cls.forward is nn.Sequential.forward:
            return functools.reduce(lambda x, m: self.call_module(m, [x], {}), module, args[0])
        several = len({v for v in values_in((args, kwargs)) if v.op != "fact"}) > 1
        if cls.__module__.startswith(_NORMAL) or not (several or self.into(path)):
            return self.value("call", args, kwargs, module=path)
        forward = forward_of(module)
        body = functools.partial(self.run, forward, owner=_owner(cls, forward))
        return self.enter(path, module, args, kwargs, lambda names: body(names))

    def enter(self, path: str, module: nn.Module, args: list, kwargs: dict, body: Callable) -> Any:
        """Read into a module: what enters it and what leaves it is marked."""
        kept = len(self.values), len(self.entries), list(self.scope), self.depth
        try:
            (own, _), *given = self.bound(forward_of(module), [module, *args], kwargs).items()
            self.scope.append(path)
            entry = Entry(path, {}, [name for name, _ in given])
            entry.arguments = {name: self._marked(v, "enter", path, name) for name, v in given}
            self.entries.append(entry)
            output = body({own: module, **entry.arguments})
        except (Unreadable, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            if self.steps > MOST_STEPS:
                raise
            del self.values[kept[0] :], self.entries[kept[1] :]
            self.scope, self.depth = kept[2:]
            return self.value("call", args, kwargs, module=path, key=str(error))
        self.scope.pop()
        entry.output = self._marked(output, "out", path, None)
        return entry.output

    def _marked(self, given: Any, op: str, path: str, key: Any) -> Any:
        if isinstance(given, Value):
            return self.value(op, given, module=path, key=key)
        if hasattr(given, "_fields"):
            marked = [self._marked(v, op, path, i) for i, v in enumerate(given)]
            return type(given)(*marked)
        if type(given) in (tuple, list):
            keys = range(len(given)) if op == "out" else [key] * len(given)
            return type(given)(
                self._marked(v, op, path, k) for v, k in zip(given, keys, strict=True)
            )
        if type(given) is dict:
            return {name: self._marked(v, op, path, name) for name, v in given.items()}
        return given

    def _multihead(self, names: dict[str, Any]) -> Any:
        q_k_v = [names[name] for name in ("query", "key", "value")]
        return (self.value("attend", *q_k_v), None)


@dataclasses.dataclass(frozen=True)
class _Method:
    """A function of a class, with that class."""

    function: Any
    owner: type
    of: nn.Module


def _attention_interface() -> None:
    """Stands for whatever computes attention of q, k and v; never run."""


def _owner(cls: type, function: Any) -> type | None:
    """The class of an MRO that defines a function."""
    for each in cls.__mro__:
        held = vars(each).get(getattr(function, "__name__", ""))
        if held is not None and inspect.unwrap(getattr(held, "__func__", held)) is function:
            return each
    return None
