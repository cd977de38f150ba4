"""The data module of language models: text in, blocks of tokens out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from mmpreproj.backbones.lm import load_tokenizer
from mmpreproj.backbones.lm.lm_tokenizer import (
    BPE_PREFIX,
    borders,
    bpe_size,
    number_of_ids,
    tokenizer_hash,
    tokenizer_name,
    trained_bpe,
)
from mmpreproj.data.loaders import LabelledDataModule
from mmpreproj.data.text.text_sources import Piece, Source, open_sources
from mmpreproj.data.text.token_blocks import TokenBlocks, TokenFile, tokens_of
from mmpreproj.files import cache_folder
from mmpreproj.messages import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextDataModule"]

SPLITS = ("train", "val", "test")
VERSION = 1  # of the rules by which text becomes tokens; part of the key of the cache


class TextDataModule(LabelledDataModule):
    """Text as blocks of tokens, tokenised once.

    A batch is {"input_ids": int64 [B, T], "targets": int64 [B, T]}, and targets[t] is the token
    that follows input_ids[t] (-100: nothing to predict); no model must shift them again. Training
    takes whole blocks in a shuffled order; evaluation scores every token of a split but its
    very first exactly once, with any number of processes.

    Documents. A row of JSON lines, parquet or a data set is a document, and so is what a split
    holds of a text file. They follow each other, with BOS before and EOS after each as add_bos and
    add_eos say, and blocks are cut from that stream: attention crosses document borders. Line ends
    become LF; a byte order mark is dropped; all other text stays as it is.

    Held-out splits. Where `test` is None, it is the last `test_fraction` of every source of
    `train`: of a text file's bytes, from the first start of a line in it; of the rows of a table,
    rounded. The same with `val` and the `val_fraction` before that. So each split is contiguous in
    each source, and no block of one overlaps another. A fraction of 0: no such split.

    Args:
        train: files, folders, globs, or "hf:NAME[:config[:split]]"; None: the built-in sample,
            370 KB of English that come with CPython. Files ending in .jsonl, .ndjson or .json have
            an object a line, .parquet a table, all others are UTF-8 text; .gz, .bz2 and .xz are
            unpacked. A folder that `datasets` has written is one source.
        val: the same, to choose on; None: held out of `train`.
        test: the same, to report; None: held out of `train`.
        tokenizer: a folder, a hub name, a .gguf file; "bpe:2048", a byte-level BPE of that size
            made from the training split; None: the model's, set as `tokenizer` before loaders are
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
        max_train_tokens: train on so many tokens at most, in blocks evenly spread over the split.
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
        fractions = {"val": val_fraction, "test": test_fraction}
        self.held_out = {s: part for s, part in fractions.items() if self.names[s] is None}
        self.tokenizer_source = tokenizer
        self.block_size = block_size
        self.max_train_tokens = max_train_tokens
        self.cache_dir = Path(cache_dir or cache_folder("tokens")).expanduser()
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.text_key = text_key
        self.add_bos = add_bos
        self.add_eos = add_eos
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizer_name: str | None = None
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
                texts = (piece.text for piece in self.pieces("train"))
                key = _digest([VERSION, self.identity("train")])
                self._tokenizer = trained_bpe(bpe_size(source), texts, self.cache_dir, key)
            else:
                self._tokenizer = load_tokenizer(source)
            self._tokenizer_name = source
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._tokenizer_name = tokenizer, tokenizer_name(tokenizer)
        self._tokens = {}

    @property
    def has_tokenizer(self) -> bool:
        """Whether one was set, or the settings name one."""
        return self._tokenizer is not None or self.tokenizer_source is not None

    # Splits of the text

    @cached_property
    def ranges(self) -> dict[str, list[tuple[Source, int, int]]]:
        """What each split takes of which sources.

        The first use reads every file once from end to end, for the hash of its content.

        Raises:
            ValueError: where two splits would be the same text; this and others as `open_sources`.
        """
        ranges: dict[str, list[tuple[Source, int, int]]] = {split: [] for split in SPLITS}
        val, test = (self.held_out.get(split, 0.0) for split in ("val", "test"))
        for source in open_sources(self.names["train"], self.text_key):
            ends = (0, source.cut(1.0 - test - val), source.cut(1.0 - test), source.size)
            for split, start, end in zip(SPLITS, ends[:-1], ends[1:], strict=True):
                if start < end:
                    ranges[split].append((source, start, end))
        for split in ("val", "test"):
            if self.names[split] is not None:
                own = open_sources(self.names[split], self.text_key)
                ranges[split] = [(source, 0, source.size) for source in own]
        seen: dict[str, tuple[str, Source]] = {}
        for split in SPLITS:
            for source, _, _ in ranges[split]:
                other, first = seen.setdefault(source.digest, (split, source))
                if other != split and source is not first:
                    raise ValueError(
                        f"{source.name} of the {split} split has the content of {first.name} of "
                        f"the {other} split: name different text"
                    )
        return ranges

    def require(self, split: str) -> None:
        """Raises: ValueError, with what to do, if a split has no text."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if self.ranges[split]:
            return
        if split == "train":
            raise ValueError(
                f"there is no text to train on: all of {self._told('train')} is held out. Give "
                "more text, or lower val_fraction and test_fraction"
            )
        for source, start, end in self.ranges["train"]:
            next(source.pieces(start, end), None)  # what is no text at all says so, first
        raise ValueError(
            f"there is no text for the {split} split: {split}_fraction={self.held_out[split]} of "
            f"the training text ({self._told('train')}) holds no line or row. Name text with "
            f"{split}, or raise {split}_fraction"
        )

    def _told(self, split: str) -> str:
        """The text of a split for a message, or all text where it has none."""
        ranges = self.ranges[split] or itertools.chain(*self.ranges.values())
        return listed(dict.fromkeys(source.name for source, _, _ in ranges), most=3)

    def has_split(self, split: str) -> bool:
        """Whether the settings have such a split.

        Raises: ValueError if they do, but there is no text for it.
        """
        if self.held_out.get(split) == 0.0:
            return False
        self.require(split)
        return True

    def split_size(self, split: str) -> int:
        """Blocks of a split, without padding."""
        return len(self.dataset(split)) if self.has_split(split) else 0

    def pieces(self, split: str) -> Iterator[Piece]:
        """The text of a split, as it is tokenised."""
        for source, start, end in self.ranges[split]:
            yield from source.pieces(start, end)

    def documents(self, split: str) -> Iterator[str]:
        """The text of a split, document by document."""
        self.require(split)
        texts: list[str] = []
        for piece in self.pieces(split):
            texts.append(piece.text)
            if piece.ends:
                yield "".join(texts)
                texts = []

    def identity(self, split: str) -> list[Any]:
        """What decides a split's text: the content of the sources, and the range of each."""
        return [[*source.identity, start, end] for source, start, end in self.ranges[split]]

    # Tokens

    def prepare_data(self) -> None:
        """Tokenises what is not in the cache, on one process (where the tokenizer is known)."""
        if self.has_tokenizer:
            for split in self._needed():
                self._tokenised(split)

    def setup(self, stage: str | None = None) -> None:
        """Finds the text, and its tokens where the tokenizer is known: faults show at the start."""
        if stage == "fit" and self._world()[1] == 0:
            names = [source.name for source, _, _ in self.ranges["train"]]
            print(f"training text: {listed(names, 3)}", flush=True)
        for split in self._needed():
            if self.has_tokenizer:
                self.tokens(split)

    def _needed(self) -> list[str]:
        function = str(self.trainer.state.fn or "fit") if self.trainer else "fit"
        one = {"validate": "val", "test": "test"}.get(function.rsplit(".", 1)[-1].lower())
        return [split for split in ([one] if one else SPLITS) if self.has_split(split)]

    def tokens(self, split: str) -> TokenFile:
        """The tokens of a split, tokenised first if they are not in the cache.

        Of several processes, which all have to call this, the first does the work.

        Raises: ValueError without a tokenizer, and where the split has no text.
        """
        if split not in self._tokens:
            world, rank = self._world()
            if world > 1:
                try:
                    if rank == 0:
                        self._tokenised(split)
                finally:
                    self.trainer.strategy.barrier()
            self._tokens[split] = self._tokenised(split)
        return self._tokens[split]

    def _tokenised(self, split: str) -> TokenFile:
        self.require(split)
        bos, eos = borders(self.tokenizer, self.add_bos, self.add_eos)
        about = {
            "version": VERSION,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "sources": self.identity(split),
        }
        folder = self.cache_dir / _digest([about, bos, eos])
        about["tokenizer_name"] = self._tokenizer_name
        total = sum(end - start for _, start, end in self.ranges[split])
        how = (self.tokenizer, bos, eos, about, f"tokens of the {split} split", total)
        return tokens_of(folder, self.pieces(split), *how)

    def dataset(self, split: str, n_padding: int = 0) -> TokenBlocks:
        """The blocks of "train", "val" or "test".

        n_padding: blocks without targets to add.
        """
        whole, most = split == "train", None
        if whole and self.max_train_tokens is not None:
            most = self.max_train_tokens // self.block_size
        tokens = self.tokens(split)
        blocks = TokenBlocks(tokens, self.block_size, whole, n_padding, most)
        if not blocks.n_blocks:
            needed = self.block_size + 1 if whole else 2
            raise ValueError(
                f"the {split} split has {tokens.n_tokens} tokens, fewer than the {needed} of one "
                f"block (block_size={self.block_size}) and what follows it: give more text than "
                f"{self._told(split)}, or a smaller --data.block_size"
            )
        return blocks

    # Loaders (the rest: LabelledDataModule)

    def test_dataloader(self) -> DataLoader | list:
        """The split that is reported; where there is none an empty list."""
        return self._eval_loader("test") if self.has_split("test") else []

    # For records

    def describe(self) -> dict[str, Any]:
        """Plain facts for the record of a run; what is not known (yet) is None.

        Of each split: n_documents, n_tokens (with BOS and EOS), n_words (as str.split counts them)
        and n_bytes (UTF-8, LF line ends), for perplexities per word and per byte.
        """
        files = None
        if "ranges" in self.__dict__:
            files = {s: [source.name for source, _, _ in self.ranges[s]] for s in SPLITS}
        settings = ("add_bos", "add_eos", "block_size", "val_fraction", "test_fraction")
        settings += ("text_key", "max_train_tokens")
        facts: dict[str, Any] = {"name": type(self).__name__, "files": files, "tokenizer": None}
        facts |= {name: getattr(self, name) for name in settings}
        if self._tokenizer is not None:
            bos, eos = borders(self._tokenizer, self.add_bos, self.add_eos)
            facts["add_bos"], facts["add_eos"] = bos is not None, eos is not None
            facts["tokenizer"] = {
                "name": self._tokenizer_name,
                "vocab_size": number_of_ids(self._tokenizer),
                "hash": tokenizer_hash(self._tokenizer),
            }
        counts = ("n_documents", "n_tokens", "n_words", "n_bytes")
        for split in SPLITS:
            tokens = self._tokens.get(split)
            facts[split] = {name: tokens.header[name] if tokens else None for name in counts}
        if self.max_train_tokens is not None and "train" in self._tokens:
            facts["train"]["n_tokens_used"] = len(self.dataset("train")) * self.block_size
        return facts


def _digest(value: Any) -> str:
    """Of plain values, 32 hexadecimal digits."""
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
