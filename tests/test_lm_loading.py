"""Language models from folders, the hub's cache and packages; new ones; what fails."""

import json
import os
import pickle
import subprocess
import sys
import time

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import torch  # noqa: E402
from helpers import perturb  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers_models import VOCABULARY, inputs, tiny  # noqa: E402

from mmpreproj import (  # noqa: E402
    PreProjConfig,
    attach,
    hub_cache,  # noqa: E402
    preproj_modules,
    save,
)
from mmpreproj.backbones.lm import (  # noqa: E402
    load_language_model,
    load_tokenizer,
    new_language_model,
)
from mmpreproj.backbones.lm.lm_sources import find_source  # noqa: E402


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_hub(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def word_tokenizer(words=VOCABULARY, **special):
    """One id a word, w0 to wN; without any special token unless told."""
    vocabulary = {f"w{index}": index for index in range(words)}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rules, **special)


def write(folder, model, words=VOCABULARY, **special):
    model.save_pretrained(folder)
    word_tokenizer(words, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model", tiny("gpt_neox"))


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(3, 12)[None]).logits


def test_a_folder_gives_its_model_and_tokenizer(folder):
    torch.manual_seed(0)
    expected = logits(transformers.AutoModelForCausalLM.from_pretrained(folder))
    loaded = load_language_model(folder)
    assert torch.equal(logits(loaded.model), expected)
    assert not loaded.model.training
    assert loaded.tokenizer("w5 w98")["input_ids"] == [5, 98]
    assert loaded.model.config.name_or_path == str(folder)
    assert loaded.info == {
        "source": str(folder),
        "kind": "folder",
        "revision": None,
        "file": None,
        "hash": None,
        "architecture": "GPTNeoXForCausalLM",
        "dtype": "float32",
        "parameters": loaded.model.num_parameters(),
        "vocabulary": VOCABULARY,
        "embeddings": VOCABULARY,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float64])
def test_weights_come_in_the_dtype_asked_for(folder, dtype):
    model = load_language_model(folder, dtype=dtype).model
    assert {str(p.dtype) for p in model.parameters()} == {
        f"torch.{dtype}".replace("torch.torch", "torch")
    }


def test_an_unknown_dtype_is_an_error_that_lists_them(folder):
    with pytest.raises(ValueError, match="dtype='int8' must be one of float32, bfloat16, float16"):
        load_language_model(folder, dtype="int8")


def test_a_config_attaches_the_method_at_its_start(folder):
    base = load_language_model(folder).model
    model = load_language_model(folder, preproj=PreProjConfig(layers=[-1])).model
    assert list(preproj_modules(model)) == ["gpt_neox.layers.1.attention.preproj"]
    assert torch.equal(logits(model), logits(base))


def test_a_saved_adapter_comes_back_with_its_numbers(folder, tmp_path):
    trained = perturb(attach(load_language_model(folder).model))
    save(trained, tmp_path / "adapter")
    assert torch.equal(
        logits(load_language_model(folder, preproj=str(tmp_path / "adapter")).model),
        logits(trained),
    )
    described = json.loads((tmp_path / "adapter/preproj.json").read_text())
    assert described["base"]["name"] == str(folder)


def test_an_adapter_of_another_base_is_refused(folder, tmp_path):
    save(attach(load_language_model(folder).model), tmp_path / "adapter")
    other = write(tmp_path / "other", tiny("gpt_neox"))
    with pytest.raises(ValueError, match="with other weights than this model"):
        load_language_model(other, preproj=tmp_path / "adapter")


def test_more_embedding_rows_than_ids_are_left_as_they_are(tmp_path):
    loaded = load_language_model(write(tmp_path / "model", tiny("gpt_neox"), words=90))
    assert loaded.model.get_input_embeddings().weight.shape[0] == VOCABULARY
    assert (loaded.info["vocabulary"], loaded.info["embeddings"]) == (90, VOCABULARY)


def test_ids_without_embedding_rows_are_refused(tmp_path):
    folder = write(tmp_path / "model", tiny("gpt_neox"), words=120)
    with pytest.raises(ValueError, match=r"ids up to 119, the model 99 embedding rows"):
        load_language_model(folder)


def test_a_tokenizer_without_pad_or_bos_gets_none(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (None, None, None)
    assert len(tokenizer) == VOCABULARY


def test_the_tokenizer_may_come_from_elsewhere(tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path / "model")
    word_tokenizer(50).save_pretrained(tmp_path / "words")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer .* as tokenizer="):
        load_language_model(tmp_path / "model")
    loaded = load_language_model(tmp_path / "model", tokenizer=tmp_path / "words")
    assert loaded.info["vocabulary"] == 50
    with pytest.raises(FileNotFoundError, match="has no config.json: it holds a tokenizer alone"):
        load_language_model(tmp_path / "words")


def tensors_of(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_not_drawn_at_random(folder):
    name = "gpt_neox.layers.0.attention.dense.weight"
    tensors_of(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"1 tensors are missing, such as \['{name}'\]"):
        load_language_model(folder)


def test_a_tensor_of_another_shape_is_refused(folder):
    name = "gpt_neox.layers.0.attention.dense.bias"
    tensors_of(folder, lambda tensors: tensors.update({name: torch.zeros(5)}))
    with pytest.raises(ValueError, match="0 tensors are missing.* 1 of another shape.*dense.bias"):
        load_language_model(folder)


def test_a_method_that_was_saved_with_its_base_is_not_dropped(tmp_path):
    model = perturb(attach(tiny("gpt_neox")))
    folder = write(tmp_path / "model", model)
    x = inputs(model)
    assert torch.equal(load_language_model(folder).model(**x).logits, model(**x).logits)
    described = json.loads((folder / "config.json").read_text())
    del described["transformers_weights"]  # as it was written when nothing refused it
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"holds 6 tensors of the method .* use mmpreproj\.save"):
        load_language_model(folder)


def test_damaged_weights_are_an_error_that_names_the_folder(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match=rf"{folder} cannot be loaded as a language model"):
        load_language_model(folder)


class Boom:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


def test_nothing_that_is_loaded_runs_code(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Boom()}))
    with pytest.raises(ValueError, match="cannot be loaded as a language model"):
        load_language_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.Config"}
    config["model_type"] = "of_its_own"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("import os\nos.mkdir('ran')\n")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_language_model(folder)
    assert not (tmp_path / "ran").exists()


# Sources


@pytest.mark.slow
def test_an_encoder_is_no_language_model(tmp_path):
    folder = write(tmp_path / "vit", tiny("vit"))
    with pytest.raises(ValueError, match="cannot be loaded as a language model"):
        load_language_model(folder)


def test_sources_that_are_not_there_or_hold_something_else(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04rest")
    (tmp_path / "empty").mkdir()
    for name in ("adapter/preproj.json", "lora/adapter_config.json", "two/a.gguf", "two/b.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    for name, error, message in (
        (tmp_path / "nowhere/model", FileNotFoundError, "there is no such file or folder"),
        ("nowhere.gguf", FileNotFoundError, "there is no such file or folder"),
        (tmp_path / "model.bin", ValueError, r"is not a GGUF file \(it starts with b'PK"),
        (tmp_path / "empty", ValueError, r"there is no config\.json and no \.gguf"),
        (tmp_path / "adapter", ValueError, "load its base with preproj="),
        (tmp_path / "lora", ValueError, "a PEFT adapter: load its base"),
        (tmp_path / "two", ValueError, r"holds 2 GGUF files \(a\.gguf, b\.gguf\): name one"),
        ("package:of_nobody", FileNotFoundError, "no package of that name is installed"),
        ("package:torch.nn", FileNotFoundError, "no package of that name is installed"),
        ("package:peft", ValueError, "holds no language model"),
    ):
        with pytest.raises(error, match=message):
            find_source(name)
    with pytest.raises(ValueError, match="revision='main' goes with a hub name"):
        find_source(tmp_path / "two/a.gguf", revision="main")


@pytest.mark.parametrize("load", [load_language_model, load_tokenizer])
def test_an_absent_hub_name_without_a_network_is_told_at_once(load, no_hub):
    start = time.monotonic()
    with pytest.raises(
        ConnectionError, match=r"nobody/pythia-1\.4b is no local folder.*not in the"
    ):
        load("nobody/pythia-1.4b")
    assert time.monotonic() - start < 5


def test_offline_mode_is_named(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set, and it is not in the cache"):
        load_language_model("nobody/nothing")


def test_files_that_are_not_in_the_cache_need_a_hub(no_hub, monkeypatch):
    source = find_source("nobody/nothing")
    with pytest.raises(ConnectionError):
        hub_cache.require_model(source.name)
    assert hub_cache.cached_snapshot(source.place, ("config.json",)) is None
    monkeypatch.setattr(hub_cache, "reachable", lambda endpoint: True)
    hub_cache.require_model(source.name)


def test_an_address_that_listens_is_reachable():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub_cache.reachable(address)
    assert not hub_cache.reachable(address, seconds=1)


CACHED = """
import pathlib, sys, time
from mmpreproj.backbones.lm import load_language_model
start = time.monotonic()
loaded = load_language_model("someone/tiny")
print(time.monotonic() - start)
print(loaded.info["kind"], loaded.info["revision"], loaded.tokenizer.name_or_path)
pathlib.Path(sys.argv[1], "model.safetensors").unlink()
try:
    load_language_model("someone/tiny")
except ConnectionError as error:
    print(error)
"""


@pytest.mark.slow
def test_what_is_in_the_hubs_cache_needs_no_network(folder, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hf/hub/models--someone--tiny"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    folder = folder.rename(repository / "snapshots" / commit)
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        env.pop(name, None)
    command = [sys.executable, "-c", CACHED, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    seconds, found, error = done.stdout.splitlines()
    assert float(seconds) < 15, done.stderr  # the hub's client alone would retry for longer
    assert found.split() == ["hub", commit, "someone/tiny"]
    assert error.startswith("someone/tiny is no local folder")  # without weights it is not there


# New models

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64}


def test_a_new_model_takes_its_vocabulary_and_special_tokens_from_the_tokenizer():
    tokenizer = word_tokenizer(77, eos_token="w7")
    model = new_language_model("gpt_neox", {**SMALL, "rotary_pct": 0.5}, tokenizer)
    config = model.config
    assert type(model).__name__ == "GPTNeoXForCausalLM"
    assert (config.vocab_size, config.hidden_size) == (77, 32)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (7, None, None)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    wide = new_language_model("gpt_neox", {**SMALL, "vocab_size": 128}, tokenizer)
    assert wide.get_input_embeddings().weight.shape[0] == 128


def test_the_same_seed_gives_the_same_model_with_the_method_at_its_start():
    torch.manual_seed(3)
    base = new_language_model("llama", {**SMALL, "vocab_size": 99})
    torch.manual_seed(3)
    model = new_language_model("llama", {**SMALL, "vocab_size": 99}, preproj=PreProjConfig())
    assert len(preproj_modules(model)) == 2
    x = inputs(base)
    assert torch.equal(model.eval()(**x).logits, base.eval()(**x).logits)


@pytest.mark.parametrize(
    "model_type, args, message",
    [
        ("gpt_nex", {}, "'gpt_nex' is no decoder-only .* nearest are gpt_neox"),
        ("vit", {}, "'vit' is no decoder-only language model"),
        ("gpt_neox", {"hiden_size": 8}, "no field 'hiden_size'; the nearest are hidden_size"),
        ("llama", {"zzzz": 1}, "has no field 'zzzz'; it has .*hidden_size"),
        ("gpt_neox", {"hidden_size": "wide"}, "does not take config_args=.*hidden_size"),
        ("gpt_neox", {**SMALL, "hidden_size": 30}, "does not take config_args="),
        ("gpt_neox", {**SMALL, "vocab_size": 50}, "ids up to 98, the model 50 embedding rows"),
    ],
)
def test_a_new_model_that_cannot_be_is_an_error_that_says_why(model_type, args, message):
    with pytest.raises(ValueError, match=message):
        new_language_model(model_type, args, word_tokenizer())
