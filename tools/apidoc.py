"""Make the API reference of what every file's `__all__` names, from the docstrings.

    python tools/apidoc.py        # then open build/api/index.html

A warning is an error; so is a file without `__all__`, and a public class or function undescribed.
"""

import importlib
import inspect
import pkgutil
import shutil
import warnings
from pathlib import Path

import pdoc

import mmpreproj

API = Path(__file__).parents[1] / "build" / "api"


def main() -> None:
    found = pkgutil.walk_packages(mmpreproj.__path__, "mmpreproj.")
    modules = {"mmpreproj": mmpreproj} | {m.name: importlib.import_module(m.name) for m in found}
    for name, module in modules.items():
        for public in module.__all__:
            value = getattr(module, public)
            vars(module)[public] = value  # pdoc does not see what a package imports on demand
            if (inspect.isclass(value) or inspect.isfunction(value)) and not value.__doc__:
                raise ValueError(f"{name}.{public} has no docstring")
    for name in list(modules)[1:]:  # pdoc descends into the modules that `__all__` names
        package, _, file = name.rpartition(".")
        modules[package].__all__ = [*dict.fromkeys([*modules[package].__all__, file])]
    warnings.simplefilter("error")
    # What a class inherits is annotated with names that the parent's module has.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    pdoc.render.configure(docformat="google", show_source=False)
    shutil.rmtree(API, ignore_errors=True)
    pdoc.pdoc("mmpreproj", output_directory=API)


if __name__ == "__main__":
    main()
