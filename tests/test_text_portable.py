"""Tokenizers that a checkpoint brings along."""

import json

import pytest

transformers = pytest.importorskip("transformers")

from evaluation_models import byte_tokenizer  # noqa: E402
from text_data import character_tokenizer  # noqa: E402

from mmpreproj.backbones.lm.lm_tokenizer import (  # noqa: E402
    from_text,
    to_text,
    tokenizer_hash,  # noqa: E402
)


def test_a_tokenizer_comes_back_with_all_of_its_special_tokens():
    more = ["<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer(
        60, True, ("<s>", "</s>", *more), True, pad_token="</s>", extra_special_tokens=more
    )
    again = from_text(to_text(tokenizer))
    assert again.all_special_tokens == tokenizer.all_special_tokens == ["<s>", "</s>", *more]
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.pad_token_id == tokenizer.eos_token_id
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer) and len(again) == len(tokenizer)
    text = "<|im_start|>The old man<|im_end|>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"], skip_special_tokens=True) == "The old man"


def test_what_was_kept_without_them_is_still_read():
    tokenizer = character_tokenizer()
    held = json.loads(to_text(tokenizer))
    assert held.pop("more") == []
    assert tokenizer_hash(from_text(json.dumps(held))) == tokenizer_hash(tokenizer)


@pytest.mark.slow
def test_a_tokenizer_that_is_code_cannot_be_kept(tmp_path):
    tokenizer = transformers.CanineTokenizer()
    with pytest.raises(ValueError, match="CanineTokenizer cannot be kept.*fast tokenizer"):
        to_text(tokenizer)
