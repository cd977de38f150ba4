"""Run folders: names that never collide, what is in them, and models loaded back from them."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule

import mmpreproj
from mmpreproj.messages import explain
from mmpreproj.training.module import TrainedModule

CHECKPOINTS = "checkpoints"
PACKAGES = ("timm", "lightning", "torchmetrics", "numpy")
Which = Literal["best", "last"]


def new_run_folder(root: str | os.PathLike[str], name: str, seed: int | None) -> Path:
    """Make `<root>/<name>/<YYYYmmdd-HHMMSS>-seed<seed>`; a taken name gets a number behind it."""
    stamp = time.strftime("%Y%m%d-%H%M%S") + ("" if seed is None else f"-seed{seed}")
    parent = Path(root) / name
    parent.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir()  # fails where another run, perhaps at this very moment, made it
            return folder
        except FileExistsError:
            attempt += 1


def newest_run(root: str | os.PathLike[str], name: str) -> Path:
    """The newest run folder of a config.

    Raises:
        FileNotFoundError: naming where it looked, if there is none, or the newest has no last
            checkpoint: an older run is not taken in its place.
    """
    parent = Path(root) / name
    runs = [path.parent for path in parent.glob("*/config.yaml")]
    if not runs:
        raise FileNotFoundError(f"no run to resume in {parent}")
    newest = max(runs, key=lambda folder: (folder / "config.yaml").stat().st_mtime_ns)
    if not checkpoint_path(newest, "last").is_file():
        older = sorted(f.name for f in runs if checkpoint_path(f, "last").is_file())
        told = f"; to go on with an older one: --resume {parent / older[-1]}" if older else ""
        raise FileNotFoundError(
            f"the newest run, {newest}, ended before its first checkpoint: start it again{told}"
        )
    return newest


def checkpoint_path(folder: Path, which: Which) -> Path:
    """Where the best or the last checkpoint of a run is."""
    return folder / CHECKPOINTS / f"{which}.ckpt"


def find_checkpoint(path: str | os.PathLike[str], which: Which = "best") -> tuple[Path, Path]:
    """(checkpoint, folder that results go to) of a run folder or a .ckpt file.

    A run without a best checkpoint (it had no validation) gives its last, which then is its best.

    Raises:
        FileNotFoundError: naming what is missing.
        ValueError: if `which` is neither.
    """
    path = Path(path)
    if which not in ("best", "last"):
        raise ValueError(f"which must be best or last, found {which!r}")
    if path.is_dir():
        for name in (which, "last") if which == "best" else (which,):
            if checkpoint_path(path, name).is_file():
                return checkpoint_path(path, name), path
        raise FileNotFoundError(
            f"{path} is no run folder, or has not finished an epoch: it has no "
            f"{CHECKPOINTS}/{which}.ckpt"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such run folder or checkpoint")
    return path, path.parent.parent if path.parent.name == CHECKPOINTS else path.parent


def load_run(
    path: str | os.PathLike[str],
    which: Which = "best",
    overrides: Mapping[str, Any] | None = None,
) -> tuple[TrainedModule, LightningDataModule | None]:
    """The trained model of a run, in eval mode on the CPU, and its data module, not set up yet.

    Nothing but the checkpoint is read, and no code in it is run. `module.loaded` says which file,
    epoch, step and weights (EMA or not) it is.

    Args:
        path: a run folder, or a .ckpt file wherever it lies.
        which: which checkpoint of a folder.
        overrides: init arguments of the data module to replace, such as {"root": "my/images"}.

    Returns:
        (module, data module); the latter None if the checkpoint does not say what it was.

    Raises:
        FileNotFoundError: if there is no such run.
        ValueError: if the file is no checkpoint of ours, or an override does not fit.
    """
    file, _ = find_checkpoint(path, which)
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        own, hyper = checkpoint["mmpreproj"], checkpoint["hyper_parameters"]
        own["model"]["class_path"]
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{file} is not a checkpoint of mmpreproj.training ({type(error).__name__}: {error})"
        ) from error
    kind = _trusted_class(own["model"]["class_path"], TrainedModule)
    module = kind(**{**hyper, "compile": False})
    module.on_load_checkpoint(checkpoint)
    module.configure_model()
    module.load_weights(checkpoint["state_dict"])
    module.eval()
    module.loaded = {
        "file": str(file),
        "which": which if Path(path).is_dir() else None,
        "weights": module.evaluated_weights,
        # The last epoch that was finished; a checkpoint's own number counts a begun one too.
        "epoch": module.history[-1]["epoch"] if module.history else None,
        "step": checkpoint["global_step"],
        "precision": own.get("precision"),
    }
    spec = own.get("data")
    if spec is None:
        if overrides:
            raise ValueError(f"{file} does not say which data module it was trained with")
        return module, None
    return module, make_data(spec, module, overrides or {})


def make_data(
    spec: Mapping[str, Any], module: TrainedModule, overrides: Mapping[str, Any]
) -> LightningDataModule:
    """A data module from {"class_path", "init_args"}, with the model's classes and input."""
    from jsonargparse import ArgumentError, ArgumentParser

    kind = _trusted_class(spec["class_path"], LightningDataModule)
    path = f"{kind.__module__}.{kind.__qualname__}"
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    init = module.data_spec(dict(spec.get("init_args") or {}))
    arguments = [f"--data.{key}={value}" for key, value in overrides.items()]
    try:
        parser.set_defaults({"data": {"class_path": path, "init_args": init}})
        config = parser.parse_args(arguments)
        data = parser.instantiate(config).data
    except (ArgumentError, ValueError, TypeError) as error:
        raise ValueError(f"data of the run: {explain(error, parser)}") from error
    module.adopt(data)
    return data


def _trusted_class(path: str, base: type) -> type:
    """The class of that name, if it is of this package or imported already: a checkpoint must not
    be able to make Python import code.

    Older checkpoints name the file that a class of this package was in (mmpreproj.training.image):
    such a class is looked for in its room, whatever files that has now.
    """
    module, _, name = path.rpartition(".")
    owner = sys.modules.get(module)
    if module.split(".")[0] == "mmpreproj":
        owner = importlib.import_module(".".join(module.split(".")[:2]))
        owner = owner if hasattr(owner, name) else importlib.import_module(module)
    found = getattr(owner, name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(
            f"the checkpoint names {path}, which is no {base.__name__} that is imported already; "
            f"import {module} first if you trust it"
        )
    return found


def environment(seed: int | None, device: str, command: list[str] | None = None) -> dict[str, Any]:
    """Versions, seed, device, git revision (None outside a checkout) and the command line."""
    versions = {"python": platform.python_version(), "mmpreproj": mmpreproj.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__  # with its build, which the package's version leaves out
    return {
        "versions": versions,
        "platform": platform.platform(),
        "seed": seed,
        "device": device,
        "threads": torch.get_num_threads(),
        "git": git_revision(),
        "command": shlex.join(command if command is not None else sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def git_revision() -> dict[str, Any] | None:
    """Revision of the checkout that the package runs from, and whether it has changes."""

    def git(*arguments: str) -> str:
        folder = Path(mmpreproj.__file__).parent
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # Installed into an environment that lies in someone's checkout, it is not that checkout.
        if not git("ls-files", "--error-unmatch", "__init__.py"):
            return None
        return {"revision": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
