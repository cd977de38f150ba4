"""What a tokenizer is told apart by, and whether its ids fit a model."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
