"""Text as blocks of tokens: plain text, JSON lines, parquet and Hugging Face datasets."""

from mmpreproj.data.text.blocks import IGNORE, TokenBlocks
from mmpreproj.data.text.module import TextDataModule
from mmpreproj.data.text.tokenizers import check_tokenizer, tokenizer_hash

__all__ = ["IGNORE", "TextDataModule", "TokenBlocks", "check_tokenizer", "tokenizer_hash"]
