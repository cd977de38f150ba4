"""What the expressions of a function's source give, with values that are not known."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["BINARY", "Expressions", "Frame", "Local", "MOST_STEPS", "MOST_TURNS", "Raises"]
__all__ += ["Super", "Unknown", "Unreadable"]

MOST_STEPS = 60_000  # statements and expressions that one reading takes
MOST_TURNS = 16  # of a loop over something that is known


class Unreadable(Exception):
    """A source that is missing, too long, or does what cannot be followed."""


class Raises(Unreadable):
    """A way that ends in an error: it is not taken where there is another."""


class Unknown:
    """What is computed from an input."""


@dataclasses.dataclass
class Frame:
    """One call of a function: its names, what it may have returned, and where it stands."""

    names: dict[str, Any]
    function: Any
    owner: type | None
    returned: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Local:
    """A function that is defined within a function."""

    node: ast.FunctionDef | ast.Lambda
    frame: Frame


@dataclasses.dataclass
class Super:
    """What super() gives within a method."""

    of: Any
    owner: type | None


BINARY: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
    **{ast.Pow: operator.pow, ast.MatMult: operator.matmul, ast.BitAnd: operator.and_},
    **{ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift},
    ast.RShift: operator.rshift,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
    **{ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_},
    ast.Invert: operator.invert,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_},
    **{ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b},
    ast.NotIn: lambda a, b: a not in b,
}
# What is called for real where all that it is given is known
_PURE = {
    *(len, int, float, bool, str, abs, min, max, sum, range, list, tuple, dict, set, zip, sorted),
    *(enumerate, reversed, hasattr, getattr, isinstance, issubclass, callable, type, round, any),
    *(all, divmod, pow, slice),
}


class Expressions:
    """Evaluates expressions. What unknown values, calls and attributes are, says a subclass."""

    def evaluate(self, node: ast.expr | None, frame: Frame) -> Any:
        self.step()
        method = getattr(self, f"of_{type(node).__name__}", None)
        if node is None or method is None:
            return None if node is None else self.unknown()
        return method(node, frame)

    def truth(self, node: ast.expr, frame: Frame) -> bool | None:
        """Whether it holds, or None where that is not known."""
        return self.truth_of(self.evaluate(node, frame))

    def truth_of(self, found: Any) -> bool | None:
        try:
            return None if self.has_unknown((found,)) else bool(found)
        except Exception:
            return None

    def of_Constant(self, node: ast.Constant, frame: Frame) -> Any:
        return node.value

    def of_JoinedStr(self, node: ast.JoinedStr, frame: Frame) -> Any:
        return ""

    def of_Name(self, node: ast.Name, frame: Frame) -> Any:
        if node.id in frame.names:
            return frame.names[node.id]
        function = frame.function
        if node.id in getattr(function, "__globals__", {}):
            return function.__globals__[node.id]
        for name, cell in zip(
            getattr(getattr(function, "__code__", None), "co_freevars", ()),
            getattr(function, "__closure__", None) or (),
            strict=False,
        ):
            if name == node.id:
                return cell.cell_contents
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        return self.unknown()

    def of_Tuple(self, node: ast.Tuple | ast.List, frame: Frame) -> Any:
        held: list[Any] = []
        for each in node.elts:
            if isinstance(each, ast.Starred):
                more = self.evaluate(each.value, frame)
                held.extend(more if isinstance(more, (tuple, list)) else [self.unknown(more)])
            else:
                held.append(self.evaluate(each, frame))
        self.made[id(held)] = held
        return tuple(held) if isinstance(node, ast.Tuple) else held

    of_List = of_Tuple

    def of_Dict(self, node: ast.Dict, frame: Frame) -> Any:
        held: dict[Any, Any] = {}
        for key, each in zip(node.keys, node.values, strict=True):
            given = self.evaluate(each, frame)
            if key is not None:
                name = self.evaluate(key, frame)
                held[name if isinstance(name, (str, int)) else id(key)] = given
            elif isinstance(given, dict):
                held.update(given)
        return held

    def of_Attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        return self.attribute(self.evaluate(node.value, frame), node.attr)

    def of_Subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        return self.item(self.evaluate(node.value, frame), self.evaluate(node.slice, frame))

    def of_Slice(self, node: ast.Slice, frame: Frame) -> Any:
        parts = [self.evaluate(p, frame) for p in (node.lower, node.upper, node.step)]
        return self.unknown(*parts) if self.has_unknown(parts) else slice(*parts)

    def of_BinOp(self, node: ast.BinOp, frame: Frame) -> Any:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        self.text = ast.unparse(node.left if isinstance(right, Unknown) else node.right)
        return self.binary(BINARY[type(node.op)], left, right)

    def of_UnaryOp(self, node: ast.UnaryOp, frame: Frame) -> Any:
        held = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.USub) and isinstance(held, Unknown):
            return self.binary(operator.mul, held, -1)
        return self.unknown(held) if self.has_unknown((held,)) else _UNARY[type(node.op)](held)

    def of_BoolOp(self, node: ast.BoolOp, frame: Frame) -> Any:
        held: list[Any] = []
        for each in node.values:
            found = self.evaluate(each, frame)
            if not self.has_unknown((found,)):
                if bool(found) is isinstance(node.op, ast.Or):  # it decides, unless one before did
                    truths = all(self.is_truth(each) for each in held)
                    return found if truths else functools.reduce(self.either, [*held, found])
                if each is not node.values[-1]:
                    continue
            held.append(found)
        if isinstance(node.op, ast.And) and len(held) > 1:
            return self.all_hold(held)
        return functools.reduce(self.either, held)

    def of_Compare(self, node: ast.Compare, frame: Frame) -> Any:
        sides = [self.evaluate(side, frame) for side in (node.left, *node.comparators)]
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            known = self.is_none(sides[0]) if sides[1] is None else None
            if known is not None:
                return known == isinstance(node.ops[0], ast.Is)
            if sides[1] is None and isinstance(node.ops[0], ast.IsNot):
                return self.is_there(sides[0])
        if self.has_unknown(sides):
            return self.unknown(*sides)
        try:
            pairs = zip(sides, node.ops, sides[1:], strict=False)
            return all(_COMPARE[type(op)](a, b) for a, op, b in pairs)
        except Exception:
            return self.unknown()

    def is_none(self, held: Any) -> bool | None:
        return None if isinstance(held, Unknown) else held is None

    def of_IfExp(self, node: ast.IfExp, frame: Frame) -> Any:
        truth = self.truth(node.test, frame)
        if truth is not None:
            return self.evaluate(node.body if truth else node.orelse, frame)
        return self.either(self.evaluate(node.body, frame), self.evaluate(node.orelse, frame))

    def of_NamedExpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        held = frame.names[node.target.id] = self.evaluate(node.value, frame)
        return held

    def of_Lambda(self, node: ast.Lambda, frame: Frame) -> Any:
        return Local(node, frame)

    def of_ListComp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Any:
        over = self.evaluate(node.generators[0].iter, frame)
        if len(node.generators) > 1 or node.generators[0].ifs:
            return self.unknown(over)
        known = not isinstance(over, Unknown) and isinstance(over, Iterable)
        held, inner = [], dataclasses.replace(frame, names=dict(frame.names))
        if not known:
            self.assign(node.generators[0].target, self.unknown(over), inner)
            return self.unknown(self.evaluate(node.elt, inner))
        self.made[id(held)] = held
        for turn in list(over)[:MOST_TURNS]:
            self.assign(node.generators[0].target, turn, inner)
            held.append(self.evaluate(node.elt, inner))
        return held

    of_GeneratorExp = of_ListComp

    def of_Call(self, node: ast.Call, frame: Frame) -> Any:
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        if name == "super" and not node.args:
            return Super(next(iter(frame.names.values())), frame.owner)
        function = self.evaluate(node.func, frame)
        args = list(self.of_Tuple(ast.Tuple(node.args, ast.Load()), frame))
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            given = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = given
            elif isinstance(given, dict):
                kwargs.update(given)
        if isinstance(function, Local):
            return self.call_local(function, args, kwargs)
        pure = function.__hash__ is not None and not isinstance(function, Unknown)
        pure = pure and (function in _PURE or getattr(function, "__module__", None) == "math")
        if pure and not self.has_unknown((args, kwargs)):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                raise Raises(f"{name} fails at {self.line}: {error}") from error
        return self.call(function, args, kwargs, name)
