"""A fast tokenizer as text, for a checkpoint that has to bring its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def to_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer as JSON. Raises: ValueError for a slow one, which is code of its own."""
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
