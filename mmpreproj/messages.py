"""What errors say: names that were nearly given, lists and values of any length, the file that is
meant, packages that are missing, settings that a parser refuses."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = ["about", "did_you_mean", "explain", "listed", "nearest", "need", "short"]


def nearest(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Up to `most` of the known names that `name` may have meant, the likeliest first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What goes behind a message: "; did you mean 'depth'?", or nothing where no name is near."""
    near = nearest(name, known, most=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: Iterable[object], most: int = 10) -> str:
    """Names for a message, the first of them where there are many: "a, b, … (12 in all)"."""
    names = [_cut(str(name), 200) for name in names]
    shown = ", ".join(names[:most])
    return f"{shown}, … ({len(names)} in all)" if len(names) > most else shown


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def short(value: object) -> str:
    """`repr` of a value that a file holds, with its middle left out where it is long."""
    return _SHORT.repr(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


@contextlib.contextmanager
def about(place: str | os.PathLike[str], what: str = "cannot be read") -> Iterator[None]:
    """Errors inside name the file: "PLACE cannot be read: …", where they do not do so already.

    For files that may hold anything, and readers that then raise anything: what is no ValueError
    becomes one, with its type in front.
    """
    try:
        yield
    except (ImportError, MemoryError):  # they say something about this machine, not about the file
        raise
    except Exception as error:
        said = str(error)
        if os.fspath(place) in said and isinstance(error, (ValueError, OSError)):
            raise
        plain = isinstance(error, (ValueError, OSError)) and said
        reason = said if plain else f"{type(error).__name__}: {said}"
        raise ValueError(f"{place} {what}: {_cut(reason, 2000)}") from error


def need(module: str, what: str, extra: str) -> ModuleType:
    """The module of that name, imported.

    Args:
        what: what needs it, to start the message.
        extra: of setup.cfg, which brings it.

    Raises:
        ImportError: saying how it is installed. A module that is there, but fails on something
            else that is missing, is told with that name.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise ImportError(
            f"{what} needs {missing}: in a checkout of mmpreproj, pip install -e '.[{extra}]'",
            name=error.name,
        ) from error


def explain(error: Exception, parser: ArgumentParser) -> str:
    """What an error of a jsonargparse parser comes to, in a line: jsonargparse takes a dozen.

    It wraps the reason into an exception for each key and class on the way: the reason is the last
    of the chain, and the last class has the key. What that takes, its parser knows.
    """
    chain = [error]
    while chain[-1].__cause__ is not None and _raised_in(chain[-1]).startswith("jsonargparse."):
        chain.append(chain[-1].__cause__)
    said = list(dict.fromkeys(map(str, chain)))
    keys = _starts(r'Parser key "([\w.]+)"', said)
    for path in _starts(r"Problem with given class_path '([\w.]+)'", said)[-1:]:
        module, _, name = path.rpartition(".")
        # what the parser did not import is not imported for a message, either
        if kind := getattr(sys.modules.get(module), name, None):
            parser = type(parser)()
            parser.add_class_arguments(kind)
    takes = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    unknown = _starts(r"unrecognized arguments: --([\w.]+)", said[-1:])
    if isinstance(chain[-1], KeyError):  # Group 'trainer' does not accept option 'max_epoch'
        unknown = re.findall(r"'([\w.]+)'", said[-1])
    if unknown:
        *above, _ = ".".join(unknown).split(".")
        inside = ".".join([*keys, ""])
        beside = [name for name in takes if name.split(".")[:-1] == above and name != "help"]
        near = nearest(".".join(unknown), takes, most=1)
        hint = f"did you mean --{inside}{near[0]}?" if near else f"there are {', '.join(beside)}"
        return f"there is no --{inside}{'.'.join(unknown)}; {hint}"
    if found := re.search(r"argument after \*\* must be a mapping, not (\w+)$", said[-1]):
        return (
            f"a setting that holds others, such as optimizer or schedule, is of type {found[1]}; "
            "leave it out for its defaults"
        )
    _, wrong, value = said[-1].rpartition(". Got value: ")
    if keys and wrong and takes.get(keys[-1]):
        return f"{'.'.join(keys)}: expected {_spelled(takes[keys[-1]])}, found {short(value)}"
    return ": ".join(filter(None, [".".join(keys), _cut(said[-1], 2000)]))


def _starts(pattern: str, texts: Iterable[str]) -> list[str]:
    return [found[1] for text in texts if (found := re.match(pattern, text))]


def _raised_in(error: BaseException) -> str:
    """The module that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_globals["__name__"]


def _spelled(kind: Any) -> str:
    """A type as YAML has it: "int or null"."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_spelled, get_args(kind)))
    name = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return "null" if name == "NoneType" else name
