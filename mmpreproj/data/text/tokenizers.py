"""What the data need of a tokenizer: the ids of texts, document borders, a BPE."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpreproj.backbones.lm.lm_tokenizer import tokenizer_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BPE_PREFIX = "bpe:"
BPE_SMALLEST = 257  # the bytes and the end of text
END_OF_TEXT = "<|endoftext|>"


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without the special tokens that a tokenizer adds at its ends.

    A special token that is written out in the text ("<|endoftext|>") becomes that token, as the
    tokenizer does it everywhere else.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.truncation is None and backend.padding is None:
        # as below in two thirds of the time: no character offsets are kept
        try:
            found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library has no kind of its own
            raise ValueError(
                f"the tokenizer {tokenizer_name(tokenizer)!r} cannot write the text: {error}"
            ) from error
        return [encoding.ids for encoding in found]
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # texts longer than a model's context are what this is for
    )["input_ids"]


def borders(
    tokenizer: PreTrainedTokenizerBase, add_bos: bool | None, add_eos: bool | None
) -> tuple[int | None, int | None]:
    """The ids put before and after each document; None: nothing.

    Unless told otherwise, BOS is added where the tokenizer itself puts it before a text, and EOS
    where there is one.

    Raises:
        ValueError: if a token is asked for that the tokenizer does not have.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for wanted, found, name in ((add_bos, bos, "bos"), (add_eos, eos, "eos")):
        if wanted and found is None:
            raise ValueError(
                f"add_{name}=true, but the tokenizer {tokenizer_name(tokenizer)!r} has no "
                f"{name}_token: leave add_{name} out, or set it to false"
            )
    if add_bos is None:
        whole = tokenizer("a", verbose=False)["input_ids"]
        add_bos = bos is not None and whole[:1] == [bos] and whole != encode(tokenizer, ["a"])[0]
    return bos if add_bos else None, None if add_eos is False else eos


def bpe_size(name: str) -> int:
    """Of "bpe:SIZE". Raises: ValueError if that is not a number, or too small for the bytes."""
    size = name.removeprefix(BPE_PREFIX)
    if not size.isdecimal() or int(size) < BPE_SMALLEST:
        raise ValueError(
            f"tokenizer={name!r}: expected {BPE_PREFIX}SIZE with a size of {BPE_SMALLEST} or more "
            f"(256 bytes and {END_OF_TEXT}), for example {BPE_PREFIX}2048"
        )
    return int(size)


def trained_bpe(size: int, texts: Iterable[str], folder: Path, key: str) -> Any:
    """A byte-level BPE (GPT-2's kind) of `size` tokens for some texts, from the cache if it is
    there.

    The same texts give the same tokenizer. Its one special token ends documents and, as in
    GPT-NeoX, serves as BOS as well. Every text can be written with it, byte by byte if need be.

    Args:
        folder: of the cache.
        key: stands for the texts.
    """
    try:
        import tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ImportError(
            f"tokenizer={BPE_PREFIX}{size} needs tokenizers and transformers: "
            "pip install 'mmpreproj[text]'"
        ) from error
    path = folder / f"bpe-{size}-{key}.json"
    if path.is_file():
        backend = tokenizers.Tokenizer.from_file(str(path))
    else:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        write_whole(path, backend.to_str().encode())
    if backend.get_vocab_size() < size:
        warnings.warn(
            f"the training text is too short for {size} tokens: the tokenizer has "
            f"{backend.get_vocab_size()}",
            stacklevel=2,
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
    tokenizer.name_or_path = f"{BPE_PREFIX}{size}"
    return tokenizer


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name in its folder, then rename it: it is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp's own mode shuts out the others that share a cache
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def dtype_for(n_ids: int) -> np.dtype:
    """The smallest unsigned integers, little-endian, that hold ids below n_ids."""
    return np.dtype("<u2") if n_ids <= 1 << 16 else np.dtype("<u4")
