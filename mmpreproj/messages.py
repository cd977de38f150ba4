"""What errors say: names that were nearly given, lists of any length, packages that are missing."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


def nearest(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Up to `most` of the known names that `name` may have meant, the likeliest first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What goes behind a message: "; did you mean 'depth'?", or nothing where no name is near."""
    near = nearest(name, known, most=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def listed(names: Iterable[object], most: int = 10) -> str:
    """Names for a message, the first of them where there are many: "a, b, … (12 in all)"."""
    names = [str(name) for name in names]
    shown = ", ".join(names[:most])
    return f"{shown}, … ({len(names)} in all)" if len(names) > most else shown


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
