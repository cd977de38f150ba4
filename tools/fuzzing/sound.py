"""Sound files of every kind, to make mutants of: each function writes some into a folder.

Their bytes are the same each time, but for checkpoints, which hold times and paths.
"""

from __future__ import annotations

import copy
import functools
import gzip
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import av
import gguf
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import timm
import torch
from PIL import Image

import mmpreproj
from mmpreproj.training.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
WORDS = "the cat sat on the mat é and then, of course, it went away again"


def written(folder: Path, files: dict[str, str | bytes]) -> list[Path]:
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return [folder / name for name in files]


# Pictures and videos


def picture(mode: str = "RGB", size: tuple[int, int] = (24, 20)) -> Image.Image:
    ramp = np.indices((size[1], size[0])).sum(0) * 5 % 256
    return Image.fromarray(ramp.astype(np.uint8)).convert(mode)


def _saved(folder: Path, suffix: str, *pictures: tuple[Image.Image, dict[str, Any]]) -> list[Path]:
    for k, (image, keywords) in enumerate(pictures):
        image.save(folder / f"{k}{suffix}", **keywords)
    return sorted(folder.iterdir())


def jpegs(folder: Path) -> list[Path]:
    turned = Image.Exif()
    turned[0x0112] = 6
    kinds = (picture(), {"exif": turned}), (picture("CMYK"), {}), (picture("L"), {})
    return _saved(folder, ".jpg", *kinds, (picture(), {"progressive": True}))


def pngs(folder: Path) -> list[Path]:
    wide = Image.fromarray(np.arange(480, dtype=np.uint16).reshape(20, 24) * 100)
    kinds = (picture(), {}), (picture("RGBA"), {}), (picture("P"), {"transparency": 3})
    return _saved(folder, ".png", *kinds, (wide, {}))


def gifs(folder: Path) -> list[Path]:
    first, *others = [picture("P").rotate(turn) for turn in (0, 90, 180)]
    moving = {"save_all": True, "append_images": others, "duration": 50}
    return _saved(folder, ".gif", (first, moving), (first, {"transparency": 1}))


def clips(folder: Path, suffix: str, *codecs: str) -> list[Path]:
    for codec in codecs:
        place = str(folder / f"{codec}{suffix}")
        with av.open(place, "w", options={"fflags": "+bitexact"}) as out:
            stream = out.add_stream(codec, rate=25)
            stream.width, stream.height, stream.gop_size = 48, 32, 6
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.codec_context.thread_count = 1
            for k in range(16):
                frame = av.VideoFrame.from_image(picture(size=(48, 32)).rotate(20 * k))
                out.mux(stream.encode(frame))
            out.mux(stream.encode())
    return sorted(folder.iterdir())


# Text and tables


def lists(folder: Path) -> list[Path]:
    """Of videos, which are there, and empty."""
    (folder / "train").mkdir()
    names = [f"train/clip {k}_000001_000011.mp4" for k in range(6)]
    written(folder, dict.fromkeys(names, b""))
    kinetics = ["label,youtube_id,time_start,time_end,split"]
    kinetics += [f"a dance,clip {k},1,11,train" for k in range(6)]
    headed = ["path,label,verb", *(f"{name},{k % 3},run" for k, name in enumerate(names))]
    tables = {"kinetics.csv": kinetics, "headed.csv": headed}
    tables |= {"tabs.txt": [f"{name}\tjump" for name in names]}
    tables |= {"blanks.list": [f"{name} {k}" for k, name in enumerate(names)]}
    return written(folder, {name: "\n".join(lines) for name, lines in tables.items()})


def texts(folder: Path) -> list[Path]:
    text = "\n".join(f"{k} {WORDS[k % 20 :]}" for k in range(60))
    others = {"b.md": text.replace("\n", "\r\n"), "c.txt": "\ufeff" + text.replace(" ", "")}
    return written(folder, {"a.txt": text, **others})


def packed(folder: Path) -> list[Path]:
    text = "\n".join(f"{k} {WORDS}" for k in range(60)).encode()
    return written(folder, {"a.gz": gzip.compress(text, mtime=0), "a.xz": lzma.compress(text)})


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of_text(folder: Path) -> list[Path]:
    rows = [{"text": f"{k} {WORDS}", "id": k, "meta": {"of": [k, None]}} for k in range(30)]
    return written(folder, {"a.jsonl": _lines(rows), "b.json": _lines(rows[:20])})


def tables(folder: Path) -> list[Path]:
    rows = "".join(f'{k},"{WORDS}"\n' for k in range(30))
    return written(folder, {"a.csv": f"id,text\n{rows}", "b.tsv": f"text\n{rows}"})


def chats(folder: Path) -> list[Path]:
    """Conversations in each form, and their template."""
    turns = [{"role": role, "content": WORDS} for role in ("user", "assistant")]
    forms = {
        "messages": {"messages": turns},
        "prompt": {"prompt": turns[:1], "completion": turns[1:]},
        "text": {"prompt": WORDS, "completion": WORDS},
        "alpaca": {"instruction": WORDS, "input": "", "output": WORDS},
    }
    return written(folder, {f"{name}.jsonl": _lines([row] * 30) for name, row in forms.items()})


def parquets(folder: Path) -> list[Path]:
    table = pa.table({"text": [f"{k} {WORDS}" for k in range(20)], "id": range(20)})
    pa.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    return [folder / "a.parquet"]


def items(folder: Path) -> list[Path]:
    """Of evaluation, in each form that is read."""
    swag = {"activity_label": "Running", "endings": ["ran [x]", "sat"], "label": "1"}
    forms = {
        "lambada": [{"text": f"{k} {WORDS}"} for k in range(4)],
        "pairs": [{"context": c, "continuation": "c"} for c in ("a b", "")],
        "choices": [{"query": f"q {k}", "choices": ["a", "b"], "gold": k} for k in range(2)],
        "hellaswag": [{**swag, "ctx": "a man"}, {**swag, "ctx_a": "a man", "ctx_b": "runs"}],
        "piqa": [{"goal": "to sit", "sol1": "sit", "sol2": "stand", "label": 0}],
    }
    return written(folder, {f"{name}.jsonl": _lines(rows) for name, rows in forms.items()})


# Configs, adapters, runs, models


def configs(folder: Path) -> list[Path]:
    for name in ("vit", "video", "lm", "imagenet/probe"):
        shutil.copy(CONFIGS / f"{name}.yaml", folder)
    return sorted(folder.iterdir())


@functools.lru_cache(maxsize=1)
def base() -> torch.nn.Module:
    """What the adapters belong to."""
    torch.manual_seed(0)
    small = dict(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    return timm.create_model("vit_tiny_patch16_224", **small).eval()


def adapters(folder: Path, suffix: str) -> list[Path]:
    for name, config, also in (("a", {}, ["head"]), ("b", {"layers": [-1], "skip_rank": 2}, [])):
        model = mmpreproj.attach(copy.deepcopy(base()), mmpreproj.PreProjConfig(**config))
        mmpreproj.save(mmpreproj.freeze_base(model, also), folder / name)
    return sorted(folder.glob(f"*/*{suffix}"))


ONE_BATCH = {
    **{"trainer.max_epochs": 1, "trainer.limit_train_batches": 1, "trainer.limit_val_batches": 1},
    **{"trainer.accelerator": "cpu", "run.test": False},
}
SMALL = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 1,
    "num_heads": 2,
    "in_chans": 1,
}
SMALL_NEOX = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def run(folder: Path, config: str, settings: dict[str, Any]) -> list[Path]:
    """The last checkpoint and the config of a run of one batch."""
    settings = {**ONE_BATCH, "run.root": str(folder), **settings}
    values = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in settings.items()]
    main([str(CONFIGS / config), *(f"--{key}={value}" for key, value in values)])
    (place,) = folder.glob(f"{Path(config).stem}/*/config.yaml")
    return [place.parent / "checkpoints/last.ckpt", place]


def vision_run(folder: Path) -> list[Path]:
    return run(folder, "vit.yaml", {"model.model_args": SMALL})


def checkpoints(folder: Path) -> list[Path]:
    (text,) = written(folder, {"text.txt": "\n".join(f"{k} {WORDS}" for k in range(99))})
    data = {"data.train": str(text), "data.tokenizer": "bpe:260", "data.block_size": 8}
    model = {"model.model_args": SMALL_NEOX, "model.prompts": []}
    return [vision_run(folder)[0], run(folder, "lm.yaml", {**data, **model})[0]]


def ggufs(folder: Path) -> list[Path]:
    """A llama of one layer, in llama.cpp's format, a matrix of it quantised."""
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    for key in ("context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{key}")(32)
    for key, value in {"block_count": 1, "head_count": 2, "head_count_kv": 2}.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(65 + k) for k in range(62)), "ab", "cd"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_token_types([1] * 64)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    squares = "attn_q attn_k attn_v attn_output ffn_gate ffn_down ffn_up".split()
    shapes = {f"blk.0.{name}": (32, 32) for name in squares}
    shapes |= dict.fromkeys(("token_embd", "output"), (64, 32))
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (32,))
    rng, q8 = np.random.default_rng(0), gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        if name == "blk.0.ffn_up":
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [folder / "tiny.gguf"]
