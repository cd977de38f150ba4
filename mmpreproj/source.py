"""Walking through the source of a function as Python would run it, with values that are not known.

Names, attributes and calls are looked up for real, so that a condition which flags or configs
decide is decided. One that only an input decides is taken both ways, and a name that then holds
two things holds either. What an unknown value is, and what calls do to it, says a subclass.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Local", "MOST_STEPS", "Raises", "Super", "Unknown", "Unreadable", "Walker", "source_of"]

MOST_STEPS = 60_000  # statements and expressions that one reading takes
MOST_TURNS = 16  # of a loop over something that is known
DEEPEST = 24  # calls within calls


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


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
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


@functools.cache
def parsed(function: Any) -> ast.FunctionDef:
    """The syntax tree of a function. Raises Unreadable where it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise Unreadable(f"the source of {function} cannot be had: {error}") from error
    if not isinstance(tree, ast.FunctionDef):
        raise Unreadable(f"{function} is not defined by a function")
    return tree


class Walker:
    """Runs functions by their source. A subclass says what becomes of unknown values."""

    def __init__(self) -> None:
        self.steps = self.depth = 0
        self.line = self.text = ""
        self.made: dict[int, list] = {}  # lists that the forward makes, which it may add to
        self.there: frozenset[Any] = frozenset()  # inputs that are not None in this branch

    # For the subclass

    def unknown(self, *of: Any) -> Unknown:
        raise NotImplementedError

    def are_parts(self, turns: list) -> bool:
        """Whether a loop is over what all takes part, so that each turn counts."""
        raise NotImplementedError

    def has_unknown(self, given: Any) -> bool:
        raise NotImplementedError

    def two(self, a: Any, b: Any) -> Any:
        """What may be a or b, which differ."""
        raise NotImplementedError

    def binary(self, op: Callable, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def call(self, function: Any, args: list, kwargs: dict, name: str) -> Any:
        raise NotImplementedError

    def attribute(self, of: Any, name: str) -> Any:
        raise NotImplementedError

    def set_attribute(self, of: Any, name: str, given: Any) -> None:
        raise NotImplementedError

    def item(self, of: Any, key: Any) -> Any:
        raise NotImplementedError

    def unpacked(self, given: Any, number: int) -> list[Any]:
        raise NotImplementedError

    # Functions

    def run(self, function: Any, names: dict[str, Any], owner: type | None = None) -> Any:
        """What a function may return, with `names` for its arguments. owner: its class."""
        return self._run(parsed(function).body, Frame(dict(names), function, owner))

    def _run(self, body: list[ast.stmt], frame: Frame) -> Any:
        if self.depth >= DEEPEST:
            raise Unreadable(f"calls stand more than {DEEPEST} deep at {self.line}")
        line, self.depth = self.line, self.depth + 1
        try:
            if self.block(body, frame):
                frame.returned.append(None)
        finally:
            self.line, self.depth = line, self.depth - 1
        if not frame.returned:
            raise Raises(f"{getattr(frame.function, '__name__', 'a call')} raises an error")
        return functools.reduce(self.either, frame.returned)

    def call_local(self, local: Local, args: list, kwargs: dict) -> Any:
        a = local.node.args
        names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
        held = dict(
            zip(
                names[::-1], [self.evaluate(d, local.frame) for d in a.defaults][::-1], strict=False
            )
        )
        for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
            held[arg.arg] = self.evaluate(default, local.frame)
        held.update(zip(names, args, strict=False))
        if a.vararg:
            held[a.vararg.arg] = tuple(args[len(names) :])
        if a.kwarg:
            held[a.kwarg.arg] = {}
        names = {**local.frame.names, **held, **kwargs}
        frame = Frame(names, local.frame.function, local.frame.owner)
        if isinstance(local.node, ast.Lambda):
            return self.evaluate(local.node.body, frame)
        return self._run(local.node.body, frame)

    def step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise Unreadable(f"it takes more than {MOST_STEPS} steps")

    # Statements: each says whether what stands behind it is reached

    def block(self, body: Iterable[ast.stmt], frame: Frame) -> bool:
        return all(self.statement(node, frame) for node in body)

    def statement(self, node: ast.stmt, frame: Frame) -> bool:
        self.step()
        code = getattr(frame.function, "__code__", None)
        if code is not None:
            file = code.co_filename.replace("\\", "/").rpartition("/")[2]
            self.line = f"{file}:{code.co_firstlineno + node.lineno - 1}"
        method = getattr(self, f"do_{type(node).__name__}", None)
        return True if method is None else method(node, frame)

    def do_Return(self, node: ast.Return, frame: Frame) -> bool:
        frame.returned.append(self.evaluate(node.value, frame))
        return False

    def do_Raise(self, node: ast.Raise, frame: Frame) -> bool:
        return False

    def do_Break(self, node: ast.stmt, frame: Frame) -> bool:
        return True  # as if the rest of the loop ran: it may

    def do_Expr(self, node: ast.Expr, frame: Frame) -> bool:
        found, call = self.evaluate(node.value, frame), node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            of = call.func.value
            in_place = call.func.attr.endswith("_") and not call.func.attr.endswith("__")
            if isinstance(of, ast.Name) and in_place and isinstance(found, Unknown):
                frame.names[of.id] = found
        return True

    def do_Assign(self, node: ast.Assign, frame: Frame) -> bool:
        given = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, given, frame)
        return True

    def do_AnnAssign(self, node: ast.AnnAssign, frame: Frame) -> bool:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)
        return True

    def do_AugAssign(self, node: ast.AugAssign, frame: Frame) -> bool:
        held, given = self.evaluate(node.target, frame), self.evaluate(node.value, frame)
        self.assign(node.target, self.binary(_BINARY[type(node.op)], held, given), frame)
        return True

    def do_If(self, node: ast.If, frame: Frame) -> bool:
        test = self.evaluate(node.test, frame)
        truth = self.truth_of(test)
        if truth is not None:
            return self.block(node.body if truth else node.orelse, frame)

        def then() -> bool:
            before = self.there
            self.there = before | self.there_if(test)
            try:
                return self.block(node.body, frame)
            finally:
                self.there = before

        return self.fork([then, lambda: self.block(node.orelse, frame)], frame)

    def do_For(self, node: ast.For, frame: Frame) -> bool:
        over = self.evaluate(node.iter, frame)
        try:
            turns = None if isinstance(over, Unknown) else list(over)
        except Exception as error:
            raise Unreadable(f"a loop over {type(over).__name__}: {error}") from error
        if turns is not None and (len(turns) <= MOST_TURNS or self.are_parts(turns)):
            for turn in turns:
                self.assign(node.target, turn, frame)
                if not self.block(node.body, frame):
                    return False
            return self.block(node.orelse, frame)
        turn = self.unknown(over) if turns is None else turns[0]

        def once() -> bool:
            self.assign(node.target, turn, frame)
            return self.block(node.body, frame)

        return self.fork([once, lambda: True], frame)

    def do_While(self, node: ast.While, frame: Frame) -> bool:
        return self.fork([lambda: self.block(node.body, frame), lambda: True], frame)

    def do_With(self, node: ast.With, frame: Frame) -> bool:
        for item in node.items:
            if item.optional_vars is not None:
                self.assign(item.optional_vars, self.unknown(), frame)
        return self.block(node.body, frame)

    def do_Try(self, node: ast.Try, frame: Frame) -> bool:
        return self.block([*node.body, *node.orelse, *node.finalbody], frame)

    def do_FunctionDef(self, node: ast.FunctionDef, frame: Frame) -> bool:
        frame.names[node.name] = Local(node, frame)
        return True

    def fork(self, ways: list[Callable[[], bool]], frame: Frame) -> bool:
        """Take each way from the same names; afterwards a name holds what any way left in it."""
        before, after = frame.names, []
        for way in ways:
            frame.names, depth = dict(before), self.depth
            try:
                if way():
                    after.append(frame.names)
            except Raises:
                self.depth = depth
        frame.names = before
        if after:
            every = dict.fromkeys(name for names in after for name in names)
            frame.names = {
                name: functools.reduce(self.either, [n[name] for n in after if name in n])
                for name in every
            }
        return bool(after)

    def either(self, a: Any, b: Any) -> Any:
        if a is b:
            return a
        if isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
            both = [self.either(*pair) for pair in zip(a, b, strict=True)]
            return type(a)(*both) if hasattr(a, "_fields") else type(a)(both)
        try:
            if not self.has_unknown((a, b)) and type(a) is type(b) and bool(a == b):
                return a
        except Exception:
            pass
        return self.two(a, b)

    def assign(self, target: ast.expr, given: Any, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.names[target.id] = given
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each, value in zip(
                target.elts, self.unpacked(given, len(target.elts)), strict=False
            ):
                self.assign(each.value if isinstance(each, ast.Starred) else each, value, frame)
        elif isinstance(target, ast.Attribute):
            self.set_attribute(self.evaluate(target.value, frame), target.attr, given)
        elif isinstance(target, ast.Subscript):
            held = self.evaluate(target.value, frame)
            root: ast.expr = target.value
            while isinstance(root, (ast.Subscript, ast.Attribute)):
                root = root.value
            if isinstance(held, Unknown) and isinstance(root, ast.Name):
                frame.names[root.id] = self.unknown(held, given)

    # Expressions

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
        return self.binary(_BINARY[type(node.op)], left, right)

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
                raise Unreadable(f"{name} fails at {self.line}: {error}") from error
        return self.call(function, args, kwargs, name)


@dataclasses.dataclass
class Super:
    """What super() gives within a method."""

    of: Any
    owner: type | None


@functools.cache
def source_of(cls: type) -> str:
    """The source of a class, or nothing."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
