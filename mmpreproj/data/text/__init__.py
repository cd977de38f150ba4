"""Text as blocks of tokens: plain text, JSON lines, parquet and Hugging Face datasets."""

from mmpreproj.data.text.text_module import TextDataModule
from mmpreproj.data.text.token_blocks import IGNORE, TokenBlocks

__all__ = ["IGNORE", "TextDataModule", "TokenBlocks"]
