"""What a tokenizer is told apart by, whether its ids fit a model, and how a checkpoint keeps it."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmpreproj.files import write_whole
from mmpreproj.messages import about, need

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["borders", "bpe_size", "check_hash", "check_tokenizer", "encode", "from_text"]
__all__ += ["number_of_ids", "to_text", "tokenizer_hash", "tokenizer_name", "trained_bpe"]

BPE_PREFIX = "bpe:"
BPE_SMALLEST = 257  # the bytes and the end of text
END_OF_TEXT = "<|endoftext|>"


def number_of_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id of a tokenizer and one; more than its length where ids are left out."""
    return 1 + max(tokenizer.get_vocab().values())


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, n_embeddings: int) -> None:
    """Raises ValueError, naming both sizes, if an id is not below a model's embedding rows.

    More rows than ids are fine (Pythia has 50304 for 50277): nothing is resized.
    """
    n_ids = number_of_ids(tokenizer)
    if n_ids > n_embeddings:
        raise ValueError(
            f"the tokenizer {tokenizer_name(tokenizer)!r} has ids up to {n_ids - 1}, the model "
            f"{n_embeddings} embedding rows: ids have to be below that. Is it another model's "
            "tokenizer?"
        )


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """What records and errors call a tokenizer."""
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that give the same ids: of what they are made of, not of their name.

    It covers the rules, the vocabulary and which tokens are special; padding and truncation, which
    calls set, are left out.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        made_of = backend.to_str()
        made_of = made_of[made_of.index('"added_tokens"') :]  # truncation and padding come before
    else:  # one written in Python: its class holds the rules
        made_of = [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())]
    special = {key: str(token) for key, token in tokenizer.special_tokens_map.items()}
    text = json.dumps([made_of, special], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_hash(tokenizer: PreTrainedTokenizerBase, then: str | None) -> None:
    """Raises: ValueError if the tokenizer's hash is not what it was (None: it is not known)."""
    now = tokenizer_hash(tokenizer)
    if then not in (None, now):
        raise ValueError(
            f"the checkpoint was trained with another tokenizer: its hash was {then} and is {now} "
            "now. Put back the model's folder, or the text that a bpe: tokenizer is made of, or "
            "start a new run"
        )


def to_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fast tokenizer as JSON, for a checkpoint that has to bring its own.

    Raises: ValueError for a slow one, which is code of its own.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"a {type(tokenizer).__name__} cannot be kept in a checkpoint: use a fast tokenizer"
        )
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    more = [token for token in tokenizer.all_special_tokens if token not in special.values()]
    return json.dumps(
        {"tokenizer": tokenizer.backend_tokenizer.to_str(), "special": special, "more": more}
    )


def from_text(text: str) -> PreTrainedTokenizerBase:
    """The tokenizer that `to_text` was given."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    held = json.loads(text)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(held["tokenizer"]),
        extra_special_tokens=held.get("more", []),
        **held["special"],
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without the special tokens that a tokenizer adds at its ends.

    A special token that is written out in the text ("<|endoftext|>") becomes that token, as the
    tokenizer does it everywhere else.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.truncation is None and backend.padding is None:
        # as below in two thirds of the time: no character offsets are kept
        with about(f"the tokenizer {tokenizer_name(tokenizer)!r}", "cannot write the text"):
            found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
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


def trained_bpe(size: int, texts: Iterable[str], folder: Path, key: str) -> PreTrainedTokenizerBase:
    """A byte-level BPE (GPT-2's kind) of `size` tokens for some texts, from the cache if it is
    there.

    The same texts give the same tokenizer. Its one special token ends documents and, as in
    GPT-NeoX, serves as BOS as well. Every text can be written with it, byte by byte if need be.

    Args:
        folder: of the cache.
        key: stands for the texts.
    """
    transformers = need("transformers", f"tokenizer={BPE_PREFIX}{size}", "text")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = folder / f"bpe-{size}-{key}.json"
    if path.is_file():
        backend = Tokenizer.from_file(str(path))
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        write_whole(path, backend.to_str())
    if backend.get_vocab_size() < size:
        warnings.warn(
            f"the training text is too short for {size} tokens: the tokenizer has "
            f"{backend.get_vocab_size()}",
            stacklevel=2,
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
    tokenizer.name_or_path = f"{BPE_PREFIX}{size}"
    return tokenizer
