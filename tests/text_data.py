"""Tokenizers small enough to write their ids by hand, and text files to read."""

import json
import string

import tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = string.ascii_lowercase + " \n.é"
ID = {character: i for i, character in enumerate(CHARACTERS)}  # 30 of them
BOS, EOS = 30, 31


def character_tokenizer(bos=True, eos=True, adds_bos=False, shift=0):
    """One id a character: that of ID plus `shift`. No pad token."""
    vocabulary = {character: i + shift for character, i in ID.items()}
    special = {}
    if bos:
        special["bos_token"] = "<s>"
        vocabulary["<s>"] = BOS + shift
    if eos:
        special["eos_token"] = "</s>"
        vocabulary["</s>"] = EOS + shift
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    every = tokenizers.Regex(r"[\s\S]")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(every, "isolated")
    backend.add_special_tokens(list(special.values()))
    if adds_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS + shift)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def ids_of(text):
    return [ID[character] for character in text]


def write_lines(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return str(path)
