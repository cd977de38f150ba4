"""What a tokenizer is told apart by, whether its ids fit a model, and how a checkpoint keeps it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_hash", "check_tokenizer", "from_text", "number_of_ids", "to_text"]
__all__ += ["tokenizer_hash", "tokenizer_name"]


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
