"""The kinds of files that are read: how mutants of them are made, and who reads them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gzip
import io
import json
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import safetensors.torch
import torch
import yaml
from fuzzing import mutations as m
from fuzzing import sound

import mmpreproj
from mmpreproj.backbones.lm import load_language_model
from mmpreproj.data import TextDataModule, VideoDataModule, load_image
from mmpreproj.data.video import UnreadableVideo, probe, read_frames
from mmpreproj.evaluation import read_choices, read_lambada
from mmpreproj.training import load_run
from mmpreproj.training.cli import TrainCLI, main

Change = Callable[[bytes, Random], bytes]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        make: writes sound files into a folder, and gives their paths.
        change: a sound file's bytes -> those of a mutant of another structure.
        read: reads a mutant, as a person's call would. What it asserts is a failure, too.
        share: of the mutants asked for, where reading is slow.
        told: what an error may name in place of the file.
    """

    make: Callable[[Path], list[Path]]
    change: Change
    read: Callable[[Path], Any]
    share: float = 1.0
    told: tuple[str, ...] = ()

    def mutant(self, which: int, sound: list[bytes], rng: Random) -> bytes:
        """Of a sound file: damaged bytes, or a changed structure."""
        if rng.random() < 0.4:
            return m.mutate_bytes(sound[which], rng, rng.choice(sound))
        return self.change(sound[which], rng)


# Pictures and videos


def change_png(data: bytes, rng: Random) -> bytes:
    return m.with_checksums(m.mutate_container(data, rng))


def read_image(path: Path) -> None:
    load_image(path, 3)
    load_image(path, 1)


def read_video(path: Path) -> None:
    read_frames(path, lambda n: [0, n // 2, n - 1])
    probe(path)


def read_gif(path: Path) -> None:
    """As a video and as a picture; what an animation has wrong behind its first frame is no fault
    of the picture."""
    with contextlib.suppress(UnreadableVideo):
        read_video(path)
    read_image(path)


# Lists, text and tables

ODD_CELLS = ['"', '"a', "-1", "1.5", "20000000000000000000", "/etc/x.mp4", "../../x.mp4", "99999"]
ODD_CELLS += ["youtube_id", "path", "label", "1e400", "nan", "²", "~x/a.mp4", "a" * 5000]


def change_list(data: bytes, rng: Random) -> bytes:
    by = next((b for b in (",", "\t") if b.encode() in data.splitlines()[0]), " ")
    rows = [line.rsplit(by, 1 if by == " " else -1) for line in data.decode().splitlines()]
    found = m.mutate_tree(rows, rng, lambda rng: rng.choice(ODD_CELLS))
    found = found if isinstance(found, list) else [found]
    lines = [by.join(map(str, row)) if isinstance(row, list) else str(row) for row in found]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def read_list(path: Path) -> None:
    root = path.parent.parent / "sound"
    kinetics = b"youtube_id" in path.read_bytes().split(b"\n")[0]
    named = ["verb", "label"] if path.suffix == ".csv" and not kinetics else None
    data = VideoDataModule(str(root), str(path), missing="keep", label_columns=named)
    found = data.open("train")
    places = [os.path.abspath(found.name(k)) for k in range(len(found))]
    # other lists say themselves where their files are
    assert not kinetics or all(p.startswith(f"{root}/") for p in places), "outside of the folder"
    data.setup("fit")


def change_text(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.2:
        return data.decode().encode(rng.choice(("utf-16", "latin-1", "utf-32")), "replace")
    odd = b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\xc2", b"<|endoftext|>", b"x" * 10**6
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    kept = rng.choice(
        ((data[:a], data[a:]), (data[:a], data[b:]), (b"", b""), (b"\xef\xbb\xbf", b""))
    )
    return kept[0] + rng.choice(odd) * rng.choice((0, 1, 3)) + kept[1]


def change_packed(data: bytes, rng: Random) -> bytes:
    packer = gzip if data[:2] == b"\x1f\x8b" else lzma
    again = packer.compress(change_text(packer.decompress(data), rng))
    return rng.choice((again, again + data, again + b"\0" * 9, again + b"x", again[:-4]))


def change_lines(data: bytes, rng: Random) -> bytes:
    rows = m.mutate_tree([json.loads(line) for line in data.decode().splitlines()], rng)
    return b"\n".join(m.as_json(row, rng) for row in (rows if isinstance(rows, list) else [rows]))


def change_parquet(data: bytes, rng: Random) -> bytes:
    """Columns of other types, other names, twice, or none."""
    words = [f"{k} {sound.WORDS}" for k in range(20)]
    columns = [words, [*words[:-1], None], range(20), [w.encode() for w in words], [None] * 20, []]
    columns += [[[w] for w in words], [{"a": w} for w in words], [0.5] * 20, [""] * 20]
    columns += [pa.array(words).dictionary_encode(), pa.array(words, pa.large_string())]
    arrays = [pa.array(column) for column in rng.choices(columns, k=rng.randint(1, 3))]
    arrays = [array[: min(map(len, arrays))] for array in arrays]
    names = rng.choices(["text", "text", "id", "", "Text"], k=len(arrays))
    table = pa.Table.from_arrays(arrays, names)
    pa.parquet.write_table(table, out := io.BytesIO(), row_group_size=7)
    return out.getvalue()


def read_text(path: Path, **how: Any) -> None:
    data = TextDataModule(str(path), tokenizer="bpe:257", block_size=4, batch_size=2, **how)
    data.setup("fit")
    next(iter(data.train_dataloader()))


def read_chat(path: Path) -> None:
    (template := path.parent / "template").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    )
    only = path.read_bytes().startswith(b'{"messages"')
    how = {"chat_template_path": str(template), "assistant_only_loss": only}
    read_text(path, packing_strategy="bfd", **how)


def read_items(path: Path) -> None:
    content = path.read_bytes()
    (read_lambada if b'"text"' in content or b'"cont' in content else read_choices)(path)


# Configs, adapters, runs, models

BOMB = "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
TAG = "!!python/object/apply:os.system [touch mmpreproj_fuzz]"
ODD_LINES = [TAG, f"x: {TAG}", f"a: &a [x]\n{BOMB}", "\t", "- x", "a: b: c", "? [a]", "<<: *x"]
ODD_LINES += ["model:", "...", "x: \0", "data: {class_path: subprocess.Popen}", "---"]


def change_yaml(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.7:
        return m.as_json(m.mutate_tree(yaml.safe_load(data), rng), rng, indent=1)  # JSON is YAML
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines) + 1)
    return "\n".join([*lines[:at], rng.choice(ODD_LINES), *lines[at + rng.randrange(2) :]]).encode()


def read_config(path: Path) -> None:
    TrainCLI(["--config", str(path), "--run.root", str(path.parent / "runs")])


def change_json(data: bytes, rng: Random) -> bytes:
    return m.as_json(m.mutate_tree(json.loads(data), rng), rng)


def odd_tensor(rng: Random, like: torch.Tensor) -> torch.Tensor:
    odd = [like.int(), torch.full_like(like, torch.nan), like.flatten(), like[:0], like.bool()]
    odd += [like[0], like.double() * 1e300, like.to(torch.complex64), torch.zeros(()), like.half()]
    return rng.choice(odd).clone().contiguous()


def change_safetensors(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.5:
        tensors = safetensors.torch.load(data)
        name = rng.choice(sorted(tensors))
        return safetensors.torch.save(tensors | {name: odd_tensor(rng, tensors[name])})
    size = int.from_bytes(data[:8], "little")
    header = change_json(data[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def read_adapter(path: Path) -> None:
    """A model whose loading failed is as it was."""
    folder = path.parent / "adapter"
    which = "a" if b"head" in path.read_bytes() else "b"
    shutil.copytree(path.parent.parent / "sound" / which, folder)
    shutil.copy(path, folder / f"preproj{path.suffix}")
    model = copy.deepcopy(sound.base())
    try:
        mmpreproj.load(model, folder)
    except Exception:
        before, after = sound.base().state_dict(), model.state_dict()
        assert vars(model).keys() == vars(sound.base()).keys(), "a failed load left something"
        assert before.keys() == after.keys(), "a failed load left something"
        assert all(torch.equal(before[k], after[k]) for k in before), "a failed load changed it"
        raise


class Hostile:
    """What would run code when unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any):
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


HOSTILE = [Hostile(os.system, "touch mmpreproj_fuzz"), Hostile(exec, "import os; os.mkdir('/x')")]
HOSTILE += [Hostile(open, "mmpreproj_fuzz", "w"), Hostile(eval, "__import__('os')")]


def change_checkpoint(data: bytes, rng: Random) -> bytes:
    tensor = torch.arange(16.0).view(4, 4)
    odd = [*HOSTILE, *(odd_tensor(rng, tensor) for _ in range(4)), (1, "x"), b"x", {1: 2}, 1j]
    tree = torch.load(io.BytesIO(data), weights_only=True)
    torch.save(m.mutate_tree(tree, rng, lambda rng: rng.choice(odd)), out := io.BytesIO())
    return out.getvalue()


def change_run(data: bytes, rng: Random) -> bytes:
    return (change_checkpoint if data.startswith(b"PK") else change_yaml)(data, rng)


def read_resumed(path: Path) -> None:
    """A run whose config or last checkpoint is the mutant."""
    folder = path.parent / "vit/run"
    (there,) = (path.parent.parent / "sound/vit").iterdir()
    shutil.copytree(there, folder)
    (folder / "record.json").unlink()  # it is not complete
    shutil.copy(
        path, folder / ("checkpoints/last.ckpt" if path.suffix == ".ckpt" else "config.yaml")
    )
    main(["--resume", str(folder)])


SETTINGS = "model data trainer run seed_everything optimizer schedule devices controls key --"
SETTINGS += " label_smoothing ema_decay freeze_base lora mix prompts batch_size block_size"
KINDS = {
    "jpeg": Kind(sound.jpegs, m.mutate_container, read_image),
    "png": Kind(sound.pngs, change_png, read_image),
    "gif": Kind(sound.gifs, m.mutate_container, read_gif),
    "mp4": Kind(
        lambda f: sound.clips(f, ".mp4", "libx264", "mpeg4"), m.mutate_container, read_video
    ),
    "mkv": Kind(
        lambda f: sound.clips(f, ".mkv", "libx264", "mjpeg"), m.mutate_container, read_video
    ),
    "webm": Kind(
        lambda f: sound.clips(f, ".webm", "libvpx", "libvpx-vp9"), m.mutate_container, read_video
    ),
    "list": Kind(sound.lists, change_list, read_list),
    "text": Kind(sound.texts, change_text, read_text),
    "packed": Kind(sound.packed, change_packed, read_text),
    "jsonl": Kind(sound.rows_of_text, change_lines, read_text),
    "table": Kind(sound.tables, change_list, read_text),
    "chat": Kind(sound.chats, change_lines, read_chat),
    "parquet": Kind(sound.parquets, change_parquet, read_text),
    "items": Kind(sound.items, change_lines, read_items),
    "config": Kind(sound.configs, change_yaml, read_config, told=tuple(SETTINGS.split())),
    "adapter-json": Kind(
        lambda f: sound.adapters(f, ".json"), change_json, read_adapter, told=("adapter",)
    ),
    "adapter-safetensors": Kind(
        lambda f: sound.adapters(f, ".safetensors"),
        change_safetensors,
        read_adapter,
        told=("adapter",),
    ),
    "checkpoint": Kind(sound.checkpoints, change_checkpoint, load_run),
    "resume": Kind(sound.vision_run, change_run, read_resumed, 0.1, told=("vit/run",)),
    "gguf": Kind(sound.ggufs, m.mutate_container, load_language_model),
}
