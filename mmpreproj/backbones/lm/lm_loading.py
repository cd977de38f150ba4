"""Language models of transformers, loaded or new, with the method or without it.

Nothing that is loaded runs code of its own: hub repositories that need theirs are refused, and
weights are read as safetensors, or as a state dict without unpickling anything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmpreproj.attach import attach
from mmpreproj.backbones.lm.lm_sources import (
    TOKENIZER_FILES,
    check_gguf,
    file_hash,
    find_source,
    unpacked,
)
from mmpreproj.backbones.lm.lm_tokenizer import check_tokenizer, number_of_ids
from mmpreproj.backbones.modes import exact_frequencies
from mmpreproj.files import parse_json
from mmpreproj.folders import CONFIG_FILE, PEFT_CONFIG
from mmpreproj.hf import from_pretrained, is_whole
from mmpreproj.hub_cache import MODEL_FILES, Source, cached_snapshot, require_model
from mmpreproj.messages import about, nearest, need
from mmpreproj.preproj import PreProjConfig
from mmpreproj.saving import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LoadedText", "load_language_model", "load_tokenizer", "load_with_adapter"]
__all__ += ["new_language_model"]

PEFT_BASE = "base_model_name_or_path"
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass
class LoadedText:
    """A language model, in eval mode, and its tokenizer.

    Args:
        info: where it came from, as plain types: source, kind ("hub", "folder", "gguf"), revision
            (the commit, of a hub name), file and hash (of a GGUF file), architecture, dtype,
            parameters (with the method's), vocabulary (of the tokenizer) and embeddings (rows).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    info: dict[str, Any]


def load_language_model(
    source: str | os.PathLike[str],
    *,
    preproj: PreProjConfig | str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> LoadedText:
    """Load a decoder-only language model and its tokenizer; then give it the method, if asked.

    The tokenizer stays as it is: no token is added where it has none to pad or to begin with, and
    no embedding is resized. Embeddings may have more rows than it has ids.

    Args:
        source: a hub name, in its cache or online; a folder with config.json, of a model with the
            method too (then it has it); a .gguf file, a
            folder with exactly one, or "package:NAME", an installed package that carries one. GGUF
            weights are unpacked to `dtype`, by way of a cache in float32.
        preproj: a config attaches the method, at its start; the path of a folder that
            `mmpreproj.save` wrote attaches what is in there.
        dtype: "float32", "bfloat16", "float16" or "float64".
        revision: branch, tag or commit of a hub name.
        attn_implementation: as transformers knows them ("eager", "sdpa", ...); None: its choice.
        tokenizer: another source to take the tokenizer from.

    Raises:
        FileNotFoundError: if the file, folder or package is not there, or lacks a file.
        ConnectionError: if a hub name is neither in the cache nor to be reached; within seconds.
        ValueError: if what is there is no language model that can be loaded without running its
            code, the tokenizer has ids that the model has no rows for, or the method does not fit.
    """
    _transformers()
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    found = find_source(source, revision)
    keywords: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if attn_implementation is not None:
        keywords["attn_implementation"] = attn_implementation
    made = _load_tokenizer(find_source(tokenizer) if tokenizer is not None else found)
    model = _load_model(found, keywords)
    check_tokenizer(made, model.get_input_embeddings().weight.shape[0])
    # what adapters and records name as their base
    model.config._name_or_path = model.name_or_path = found.name
    if isinstance(preproj, PreProjConfig):
        attach(model, preproj)
    elif preproj is not None:
        load(model, preproj)
    return LoadedText(model.eval(), made, _info(found, model, made, dtype))


def load_with_adapter(
    source: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "float32",
) -> LoadedText:
    """A language model with an adapter beside its base.

    Args:
        source, dtype: as `load_language_model` takes them; or an adapter, which names its base.
        adapter: a folder of `mmpreproj.save`, or of PEFT's save_pretrained (LoRA, or this method as
            one of PEFT's), which makes the model a PeftModel; None: the base alone.

    Raises: as `load_language_model`, and what PEFT does; ImportError where PEFT is needed and is
        not there.
    """
    if adapter is None and (base := base_of(source)):
        source, adapter = base, source
    if adapter is None or not Path(adapter, PEFT_CONFIG).is_file():
        return load_language_model(source, preproj=adapter, dtype=dtype)
    peft = need("peft", str(adapter), "text")
    import mmpreproj.peft_method  # noqa: F401  its name among PEFT's methods

    loaded = load_language_model(source, dtype=dtype)
    model = peft.PeftModel.from_pretrained(loaded.model, adapter).eval()
    info = {**loaded.info, "parameters": sum(p.numel() for p in model.parameters())}
    return LoadedText(model, loaded.tokenizer, info)


def base_of(folder: str | os.PathLike[str]) -> str | None:
    """The base that an adapter folder names; None if it is no such folder, or names none."""
    if not Path(folder, "config.json").is_file():
        for file, path in ((CONFIG_FILE, "base.name"), (PEFT_CONFIG, PEFT_BASE)):
            if Path(folder, file).is_file():
                found = parse_json(Path(folder, file).read_bytes(), Path(folder, file))
                for key in path.split("."):
                    found = found.get(key) if isinstance(found, dict) else None
                return found if isinstance(found, str) and found else None
    return None


def load_tokenizer(
    source: str | os.PathLike[str], revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of any source that `load_language_model` takes, or of a folder with it alone.

    Raises: as `load_language_model`.
    """
    _transformers()
    return _load_tokenizer(find_source(source, revision))


def new_language_model(
    model_type: str,
    config_args: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    preproj: PreProjConfig | None = None,
    dtype: str = "float32",
) -> PreTrainedModel:
    """A decoder-only language model with random weights, drawn from torch's generator.

    Args:
        model_type: transformers' name of the architecture, such as "gpt_neox".
        config_args: fields of its configuration. The vocabulary's size and the special tokens' ids
            come from the tokenizer unless they are given here.
        preproj: what to attach; None attaches nothing.

    Raises:
        ValueError: for an unknown architecture, a field it does not have (with close matches), a
            value it does not take, or a vocabulary smaller than the tokenizer's.
    """
    transformers = _transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if model_type not in KNOWN:
        near = nearest(model_type, KNOWN) or ["gpt_neox", "llama", "gpt2"]
        raise ValueError(
            f"model_type={model_type!r} is no decoder-only language model of transformers; the "
            f"nearest are {', '.join(near)}"
        )
    arguments = dict(config_args or {})
    if tokenizer is not None:
        ids = {f"{name}_token_id" for name in ("bos", "eos", "pad")}
        defaults = {name: getattr(tokenizer, name) for name in ids}
        arguments = {"vocab_size": number_of_ids(tokenizer), **defaults, **arguments}
    try:
        config = transformers.AutoConfig.for_model(model_type, **arguments)
        # transformers keeps what it does not know as an attribute, without a word
        unknown = set(config.to_dict()) & set(arguments) - set(type(config)().to_dict())
        if not unknown:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype)
            )
    except Exception as error:  # each configuration has errors of its own
        raise ValueError(f"{model_type} does not take config_args={arguments}: {error}") from error
    if unknown:
        name = min(unknown)
        known = [*type(config)().to_dict(), *config.attribute_map]
        near = nearest(name, known)
        hint = f"{'the nearest are' if near else 'it has'} {', '.join(near or sorted(known))}"
        raise ValueError(f"the configuration of {model_type} has no field {name!r}; {hint}")
    if tokenizer is not None:
        check_tokenizer(tokenizer, model.get_input_embeddings().weight.shape[0])
    if preproj is not None:
        attach(model, preproj)
    return model


def _transformers() -> Any:
    return need("transformers", "a language model", "text")


def _load_model(source: Source, keywords: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM as auto

    if source.kind == "gguf":
        return _load_gguf(auto, source, keywords)
    if source.kind == "folder" and not (Path(source.place) / "config.json").is_file():
        raise FileNotFoundError(f"{source.name} has no config.json: it holds a tokenizer alone")
    if source.kind == "folder" and is_whole(source.place):
        return from_pretrained(source.place, **keywords)
    # so that all that is wrong is told at once, below
    keywords = {**keywords, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, told = _from_pretrained(auto, source, keywords, "a language model", MODEL_FILES)
    check_loaded(source.name, told)
    return model


def check_loaded(name: str, told: Mapping[str, Any], hint: str = "") -> None:
    """Raises ValueError unless the weights, as from_pretrained tells of them, are the model's.

    transformers draws what is missing at random, and drops what it has no place for.

    Args:
        hint: said behind what has another shape.
    """
    missing, unexpected = sorted(told["missing_keys"]), sorted(told["unexpected_keys"])
    wrong = sorted(str(key) for key in told["mismatched_keys"])
    method = [key for key in unexpected if ".preproj." in key]
    if method:
        raise ValueError(
            f"{name} holds {len(method)} tensors of the method beside the base's, such as "
            f"{method[0]!r}, which would be lost: it was saved by save_pretrained while the method "
            "was attached. mmpreproj.from_pretrained loads both; for files of one alone, use "
            "mmpreproj.save for the method and, after detach, save_pretrained for the base"
        )
    if missing or wrong:
        raise ValueError(
            f"the weights of {name} do not make up the model: {len(missing)} tensors are missing, "
            f"such as {missing[:2]}, and {len(wrong)} of another shape, such as {wrong[:2]}{hint}; "
            f"tensors it has no place for: {unexpected[:2] or 'none'}"
        )


def _load_gguf(auto: Any, source: Source, keywords: dict[str, Any]) -> PreTrainedModel:
    def read() -> PreTrainedModel:
        # versions of transformers that could keep the file's blocks are asked for plain weights
        config = getattr(_transformers(), "GgufConfig", None)
        plain = {} if config is None else {"quantization_config": config(dequantize=True)}
        return _plain(_read_gguf(auto, source, {**keywords, "dtype": torch.float32, **plain}))

    folder = unpacked(source.place, "model", lambda folder: read().save_pretrained(folder))
    if folder is None:
        model = read()
        with exact_frequencies(model):
            return model.to(keywords["dtype"])
    return auto.from_pretrained(folder, trust_remote_code=False, **keywords)


def _read_gguf(auto: Any, source: Source, keywords: dict[str, Any]) -> Any:
    need("gguf", source.name, "text")
    file = Path(source.place)
    with about(source.name, "cannot be read as a GGUF model"):
        check_gguf(file)
        return auto.from_pretrained(
            str(file.parent), gguf_file=file.name, trust_remote_code=False, **keywords
        )


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """Take the marks of quantisation off a model whose weights are ordinary numbers."""
    packed = [n for n, p in model.named_parameters() if not p.is_floating_point()]
    if packed:
        raise ValueError(f"{packed[0]} is still packed ({len(packed)} weights are)")
    for name in ("hf_quantizer", "quantization_method", "is_quantized", "_is_quantized"):
        vars(model).pop(name, None)
    for module in model.modules():
        if hasattr(module, "config"):
            vars(module.config).pop("quantization_config", None)
    return model


def _load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if source.kind == "gguf":

        def write(folder: Path) -> None:
            read = _read_gguf(AutoTokenizer, source, {})
            read.save_pretrained(folder)
            _drop_strangers(folder, read.backend_tokenizer.get_vocab(with_added_tokens=False))

        folder = unpacked(source.place, "tokenizer", write)
        with tempfile.TemporaryDirectory() as scratch:
            if folder is None:
                write(folder := Path(scratch))
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    else:
        there = any((Path(source.place) / file).is_file() for file in TOKENIZER_FILES)
        if source.kind == "folder" and not there:
            raise FileNotFoundError(
                f"{source.name} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): give the "
                "source of one as tokenizer="
            )
        tokenizer = _from_pretrained(AutoTokenizer, source, {}, "a tokenizer", (TOKENIZER_FILES,))
    tokenizer.name_or_path = source.name
    return tokenizer


def _drop_strangers(folder: Path, own: Mapping[str, int]) -> None:
    """Take the tokens out of a saved tokenizer that its GGUF file does not have.

    transformers adds its defaults (<|endoftext|>, <s>) where they are missing, with ids behind the
    last one, for which the model has no embeddings.
    """
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text(encoding="utf-8"))
    strangers = {token["content"] for token in rules["added_tokens"]} - set(own)
    if not strangers:
        return
    rules["added_tokens"] = [t for t in rules["added_tokens"] if t["content"] not in strangers]
    path.write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    roles = {key: None for key, token in settings.items() if str(token) in strangers}
    path.write_text(json.dumps({**settings, **roles}, ensure_ascii=False), encoding="utf-8")


def _from_pretrained(
    auto: Any,
    source: Source,
    keywords: dict[str, Any],
    what: str,
    files: tuple[tuple[str, ...], ...],
) -> Any:
    # What is in the cache is not asked for again, and named by its folder: by its hub name,
    # transformers asks the hub for possible adapters all the same, for half a minute.
    try:
        if source.kind == "hub":
            cached = cached_snapshot(source.place, *files, revision=source.revision)
            if cached is not None:
                with contextlib.suppress(OSError):  # some of its files may be missing
                    return auto.from_pretrained(cached, trust_remote_code=False, **keywords)
            require_model(source.name)
            keywords = {**keywords, "revision": source.revision or "main"}
        return auto.from_pretrained(source.place, trust_remote_code=False, **keywords)
    except ConnectionError:
        raise
    except Exception as error:  # each of the formats has errors of its own
        raise ValueError(f"{source.name} cannot be loaded as {what}: {error}") from error


def _info(
    source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: str
) -> dict[str, Any]:
    gguf = source.kind == "gguf"
    commit = None
    if source.kind == "hub":
        commit = cached_snapshot(source.place, *MODEL_FILES[:1], revision=source.revision)
    return {
        "source": source.name,
        "kind": source.kind,
        "revision": commit.name if commit is not None else None,
        "file": Path(source.place).name if gguf else None,
        "hash": f"blake2b:{file_hash(source.place)}" if gguf else None,
        "architecture": type(model).__name__,
        "dtype": dtype,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": number_of_ids(tokenizer),
        "embeddings": model.get_input_embeddings().weight.shape[0],
    }
