"""A mistyped key or value, told in a line, where jsonargparse takes a dozen."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterable
from typing import Any


def explain(message: str, options: Iterable[str] = ()) -> str:
    """What jsonargparse's message says, in few words; as it is where it is of no known form.

    Args:
        message: of an error of jsonargparse's parser.
        options: that the parser has, such as --trainer.max_epochs.
    """
    message = re.sub(  # two ways to say the same
        r"Group '([\w.]+)' does not accept option '([\w.]+)'",
        r"Option '\1.\2' is not accepted",
        message,
    )
    unknown = re.match(r"unrecognized arguments: --([\w.]+)", message)
    unknown = unknown or re.match(r"Option '([\w.]+)' is not accepted", message)
    if unknown:
        return f"there is no --{unknown[1]}{_nearest('--' + unknown[1], options)}"
    key = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    if not key:
        said = re.search(r"Errors:\n\s+- (.*?)\n\s+- Expected a <class 'NoneType'>", message, re.S)
        return said[1] if said else message
    path = (re.findall(r"class_path '([\w.]+)'", message) or [""])[-1]
    name = re.search(r"Option '([\w.]+)' is not accepted", message)
    name = name or re.search(r"unrecognized arguments: --([\w.]+)", message)
    if name:
        *parents, last = name[1].split(".")
        kind = _at(_imported(path), parents)
        owner = kind.__name__ if kind else ".".join([path.rpartition(".")[2], *parents])
        takes = parameters(kind) if kind else []
        listed = f"It takes {', '.join(takes)}" if takes else ""
        return f"{key}: {owner} has no {last!r}{_nearest(last, takes) or '.'} {listed}".rstrip()
    missing = re.search(r"module '[\w.]+' has no attribute '\w+'", message)
    if missing:
        return f"{key}: class_path {path}: {missing[0]}"
    inner = re.search(r"Expected a <class '([\w.]+)'>\. Got value: (.*)", message)
    if inner:
        return f"{key}: expected {inner[1]}, found {inner[2]!r}"
    problem = re.search(r"class_path '[\w.]+':\n(.*?)\n +- Expected", message, re.DOTALL)
    if problem and "Parser key" not in problem[1]:
        return f"{key}: {' '.join(problem[1].split())}"
    reasons = re.findall(r"^ +- ((?!Problem with|Does not validate).*)$", message, re.MULTILINE)
    found = re.search(r"Given value: (.*)", message)
    if not reasons or not found:
        return message
    wanted = [re.fullmatch(r"Expected a <class '([\w.]+)'>", reason) for reason in reasons]
    if all(wanted):
        names = ["null" if kind[1] == "NoneType" else kind[1] for kind in wanted]
        return f"{key}: expected {' or '.join(dict.fromkeys(names))}, found {found[1]!r}"
    told = [reason for reason in reasons if "NoneType" not in reason]
    return f"{key}: found {found[1]!r}. {'. '.join(told)}"


def parameters(kind: type, below: type = object) -> list[str]:
    """Names that a class and its parents, down to `below`, take at construction."""
    classes = kind.__mro__[: kind.__mro__.index(below)]
    return sorted(
        {
            name
            for cls in classes
            if "__init__" in vars(cls)
            for name, parameter in inspect.signature(cls.__init__).parameters.items()
            if name != "self"
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _imported(path: str) -> type | None:
    """The class of that path, if its module is imported already (the parser has done it)."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _at(kind: type | None, names: Iterable[str]) -> type | None:
    """The class of a parameter of a parameter … of a class, as the annotations say."""
    for name in names:
        if kind is None:
            return None
        hint: Any = typing.get_type_hints(kind.__init__).get(name)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next((h for h in typing.get_args(hint) if h is not type(None)), None)
        kind = hint if isinstance(hint, type) else None
    return kind
