"""Language models of transformers: loaded or new, their tokenizers, and the head apart."""

from mmpreproj.backbones.lm.lm_loading import (
    LoadedText,
    load_language_model,
    load_tokenizer,
    load_with_adapter,
    new_language_model,
)

__all__ = [
    "LoadedText",
    "load_language_model",
    "load_tokenizer",
    "load_with_adapter",
    "new_language_model",
]
