"""Walking through the source of a function as Python would run it, with values that are not known.

Names, attributes and calls are looked up for real, so that a condition which flags or configs
decide is decided. One that only an input decides is taken both ways, and a name that then holds
two things holds either. What an unknown value is, and what calls do to it, says a subclass.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from mmpreproj.expressions import (
    BINARY,
    MOST_STEPS,
    MOST_TURNS,
    Expressions,
    Frame,
    Local,
    Raises,
    Unknown,
    Unreadable,
)

__all__ = ["Walker", "methods_of", "source_of"]

DEEPEST = 24  # calls within calls


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


class Walker(Expressions):
    """Runs functions by their source. A subclass says what becomes of unknown values."""

    def __init__(self) -> None:
        self.steps = self.depth = 0
        self.line = self.text = ""
        self.made: dict[int, list] = {}  # lists that the forward makes, which it may add to
        self.there: frozenset[Any] = frozenset()  # inputs that are not None in this branch

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
        self.assign(node.target, self.binary(BINARY[type(node.op)], held, given), frame)
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
            raise Raises(f"a loop over {type(over).__name__}: {error}") from error
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


@functools.cache
def source_of(cls: type) -> str:
    """The source of a class, or nothing."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


@functools.cache
def methods_of(cls: type) -> list[ast.FunctionDef]:
    """The methods that the source of a class defines."""
    try:
        tree = ast.parse(textwrap.dedent(source_of(cls)))
    except SyntaxError:
        return []
    return [n for c in tree.body for n in getattr(c, "body", ()) if isinstance(n, ast.FunctionDef)]
