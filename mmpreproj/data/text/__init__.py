"""Text as blocks of tokens: plain text, JSON lines, parquet and Hugging Face datasets."""

from mmpreproj.data.text.blocks import IGNORE, TokenBlocks
from mmpreproj.data.text.module import TextDataModule

__all__ = ["IGNORE", "TextDataModule", "TokenBlocks"]
