"""The data module of language models: text in, blocks of tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from mmpreproj.backbones.lm.lm_tokenizer import number_of_ids, tokenizer_hash, tokenizer_name
from mmpreproj.data.loaders import LabelledDataModule
from mmpreproj.data.text.blocks import TokenBlocks
from mmpreproj.data.text.cache import TokenFile, tokens_of
from mmpreproj.data.text.parts import PARTS, TextParts, digest
from mmpreproj.data.text.tokenizers import (
    BPE_PREFIX,
    borders,
    bpe_size,
    trained_bpe,
)
from mmpreproj.files import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1  # of the rules by which text becomes tokens; part of the key of the cache


class TextDataModule(LabelledDataModule):
    """Text as blocks of tokens, tokenised once.

    A batch is {"input_ids": int64 [B, T], "targets": int64 [B, T]}, and targets[t] is the token
    that follows input_ids[t] (-100: nothing to predict); no model must shift them again. Training
    takes whole blocks in a shuffled order; evaluation scores every token of a part but its very
    first exactly once, with any number of processes.

    Documents. A row of JSON lines, parquet or a data set is a document, and so is what a part holds
    of a text file. They follow each other, with BOS before and EOS after each as add_bos and
    add_eos say, and blocks are cut from that stream: attention crosses document borders. Line ends
    become LF; a byte order mark is dropped; all other text stays as it is.

    Held-out parts. Where `test` is None, the last `test_fraction` of every source of `train` is the
    test part: of a text file's bytes, from the first start of a line in it; of the rows of a table,
    rounded. The same with `val` and the `val_fraction` before that. So each part is contiguous in
    each source, and no block of one overlaps another. A fraction of 0: no such part.

    Args:
        train: files, folders, globs, or "hf:NAME[:config[:split]]"; None: the built-in sample,
            370 KB of English that come with CPython. Files ending in .jsonl, .ndjson or .json have
            an object a line, .parquet a table, all others are UTF-8 text; .gz, .bz2 and .xz are
            unpacked. A folder that `datasets` has written is one source.
        val: the same, to choose on; None: held out of `train`.
        test: the same, to report; None: held out of `train`.
        tokenizer: a folder, a hub name, a .gguf file; "bpe:2048", a byte-level BPE of that size
            made from the training part; None: the model's, set as `tokenizer` before loaders are
            asked for.
        block_size: T, tokens in a block.
        batch_size: blocks in a training batch, on each process.
        eval_batch_size: the same for validation and test; None: batch_size.
        num_workers: worker processes of each loader; 0 reads in the main process.
        val_fraction: of every source of `train`, where `val` is None.
        test_fraction: the same, where `test` is None.
        text_key: the column of text in tables.
        add_bos: put BOS before each document; None: if the tokenizer does so by itself.
        add_eos: put EOS after each document; None: if the tokenizer has one.
        cache_dir: for tokens; None: mmpreproj/tokens in $XDG_CACHE_HOME, or in ~/.cache.
        max_train_tokens: train on so many tokens at most, in blocks evenly spread over the part.
        drop_last: leave out the last, smaller training batch of an epoch.
    """

    gives = "text"
    items = "blocks"

    def __init__(
        self,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        tokenizer: str | None = None,
        block_size: int = 512,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        text_key: str = "text",
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        cache_dir: str | None = None,
        max_train_tokens: int | None = None,
        drop_last: bool = True,
    ):
        super().__init__(batch_size, eval_batch_size, num_workers, drop_last)
        if block_size < 1:
            raise ValueError(f"block_size must be 1 or more, got {block_size}")
        if min(val_fraction, test_fraction) < 0 or val_fraction + test_fraction >= 1:
            raise ValueError(
                "val_fraction and test_fraction must be 0 or more and leave something to train "
                f"on, got {val_fraction} and {test_fraction}"
            )
        if max_train_tokens is not None and max_train_tokens < block_size:
            raise ValueError(
                f"max_train_tokens={max_train_tokens} is less than one block of {block_size}"
            )
        if tokenizer is not None and tokenizer.startswith(BPE_PREFIX):
            bpe_size(tokenizer)
        self.names = {"train": train, "val": val, "test": test}
        self.tokenizer_source = tokenizer
        self.block_size = block_size
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.text_key = text_key
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.cache_dir = Path(cache_dir or cache_folder("tokens")).expanduser()
        self.max_train_tokens = max_train_tokens
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizer_name: str | None = None
        self._parts: TextParts | None = None
        self._tokens: dict[str, TokenFile] = {}

    # The tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in use. Setting it replaces the one that the settings name.

        Raises: ValueError if the settings name none and none was set.
        """
        if self._tokenizer is None:
            source = self.tokenizer_source
            if source is None:
                raise ValueError(
                    "the data have no tokenizer yet: set data.tokenizer to the model's before "
                    "asking for loaders, or name one in the settings (--data.tokenizer bpe:2048, "
                    "a folder or a hub name)"
                )
            if source.startswith(BPE_PREFIX):
                texts = (piece.text for piece in self.parts.pieces("train"))
                key = digest([VERSION, self.parts.identity("train")])
                self._tokenizer = trained_bpe(bpe_size(source), texts, self.cache_dir, key)
            else:
                from mmpreproj.backbones.lm import load_tokenizer

                self._tokenizer = load_tokenizer(source)
            self._tokenizer_name = source
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokenizer_name = tokenizer_name(tokenizer)
        self._tokens = {}

    @property
    def has_tokenizer(self) -> bool:
        """Whether one was set, or the settings name one."""
        return self._tokenizer is not None or self.tokenizer_source is not None

    # Parts of the text

    @property
    def parts(self) -> TextParts:
        """The text of the parts. Raises: as TextParts, at the first use."""
        if self._parts is None:
            fractions = {"val": self.val_fraction, "test": self.test_fraction}
            self._parts = TextParts(self.names, fractions, self.text_key)
        return self._parts

    def part_text(self, part: str) -> Iterator[str]:
        """The text of "train", "val" or "test", document by document, as it is tokenised."""
        self.parts.require(part)
        return self.parts.documents(part)

    def has_split(self, part: str) -> bool:
        """Whether the settings have such a part.

        Raises: ValueError if they do, but there is no text for it.
        """
        if self.parts.held_out.get(part) == 0.0:
            return False
        self.parts.require(part)
        return True

    def split_size(self, part: str) -> int:
        """Blocks of a part, without padding."""
        return len(self.dataset(part)) if self.has_split(part) else 0

    # Tokens

    def prepare_data(self) -> None:
        """Tokenises what is not in the cache, on one process (where the tokenizer is known)."""
        if self.has_tokenizer:
            for part in self._needed():
                self._tokenised(part)

    def setup(self, stage: str | None = None) -> None:
        """Finds the text, and its tokens where the tokenizer is known: faults show at the start."""
        if stage == "fit" and self._world()[1] == 0:
            names = self.parts.files()["train"]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            print(f"training text: {', '.join(names[:3])}{more}", flush=True)
        for part in self._needed():
            self.parts.require(part)
            if self.has_tokenizer:
                self.tokens(part)

    def _needed(self) -> list[str]:
        function = str(self.trainer.state.fn or "fit") if self.trainer else "fit"
        one = {"validate": "val", "test": "test"}.get(function.rsplit(".", 1)[-1].lower())
        return [part for part in ([one] if one else PARTS) if self.has_split(part)]

    def tokens(self, part: str) -> TokenFile:
        """The tokens of a part, tokenised first if they are not in the cache.

        Of several processes, which all have to call this, the first does the work.

        Raises: ValueError without a tokenizer, and where the part has no text.
        """
        if part not in self._tokens:
            world, rank = self._world()
            if world > 1:
                try:
                    if rank == 0:
                        self._tokenised(part)
                finally:
                    self.trainer.strategy.barrier()
            self._tokens[part] = self._tokenised(part)
        return self._tokens[part]

    def _tokenised(self, part: str) -> TokenFile:
        self.parts.require(part)
        bos, eos = borders(self.tokenizer, self.add_bos, self.add_eos)
        about = {
            "version": VERSION,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "sources": self.parts.identity(part),
        }
        folder = self.cache_dir / digest([about, bos, eos])
        about["tokenizer_name"] = self._tokenizer_name
        title = f"tokens of the {part} part"
        return tokens_of(folder, self.parts.pieces(part), self.tokenizer, bos, eos, about, title)

    def dataset(self, part: str, n_padding: int = 0) -> TokenBlocks:
        """The blocks of "train", "val" or "test".

        n_padding: blocks without targets to add.
        """
        whole = part == "train"
        most = None
        if whole and self.max_train_tokens is not None:
            most = self.max_train_tokens // self.block_size
        tokens = self.tokens(part)
        blocks = TokenBlocks(tokens, self.block_size, whole, n_padding, most)
        if not blocks.n_blocks:
            needed = self.block_size + 1 if whole else 2
            raise ValueError(
                f"the {part} part has {tokens.n_tokens} tokens, fewer than the {needed} of one "
                f"block (block_size={self.block_size}) and what follows it: give more text, or a "
                "smaller --data.block_size"
            )
        return blocks

    # Loaders (the rest: LabelledDataModule)

    def test_dataloader(self) -> DataLoader | list:
        """The part that is reported; where there is none an empty list."""
        return self._eval_loader("test") if self.has_split("test") else []

    # For records

    def describe(self) -> dict[str, Any]:
        """Plain facts for the record of a run; what is not known (yet) is None.

        Of each part: n_documents, n_tokens (with BOS and EOS), n_words (as str.split counts them)
        and n_bytes (UTF-8, LF line ends), for perplexities per word and per byte.
        """
        facts: dict[str, Any] = {
            "name": type(self).__name__,
            "files": self._parts.files() if self._parts else None,
            "tokenizer": None,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "block_size": self.block_size,
            "val_fraction": self.val_fraction,
            "test_fraction": self.test_fraction,
            "text_key": self.text_key,
            "max_train_tokens": self.max_train_tokens,
        }
        if self._tokenizer is not None:
            bos, eos = borders(self._tokenizer, self.add_bos, self.add_eos)
            facts["add_bos"], facts["add_eos"] = bos is not None, eos is not None
            facts["tokenizer"] = {
                "name": self._tokenizer_name,
                "vocab_size": number_of_ids(self._tokenizer),
                "hash": tokenizer_hash(self._tokenizer),
            }
        counts = ("n_documents", "n_tokens", "n_words", "n_bytes")
        for part in PARTS:
            tokens = self._tokens.get(part)
            facts[part] = {name: tokens.header[name] if tokens else None for name in counts}
        if self.max_train_tokens is not None and "train" in self._tokens:
            facts["train"]["n_tokens_used"] = len(self.dataset("train")) * self.block_size
        return facts
