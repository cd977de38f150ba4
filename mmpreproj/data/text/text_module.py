"""The data module of language models: text in, blocks of tokens out."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from mmpreproj.data.text.chat import ChatEncoder
from mmpreproj.data.text.text_sources import Chats
from mmpreproj.data.text.text_splits import SPLITS, TextSplits
from mmpreproj.data.text.token_blocks import (
    Mixture,
    PackedDocuments,
    TokenBlocks,
    TokenFile,
    tokens_of,
)
from mmpreproj.files import cache_folder
from mmpreproj.messages import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TextDataModule"]

VERSION = 2  # of the rules by which text becomes tokens; part of the key of the cache


class TextDataModule(TextSplits, LabelledDataModule):
    """Text as blocks of tokens, tokenised once.

    A batch is {"input_ids": int64 [B, T], "targets": int64 [B, T]}, and targets[t] is the token
    that follows input_ids[t] (-100: nothing to predict); no model must shift them again. Training
    takes whole blocks in a shuffled order; evaluation scores every token of a split but its
    very first exactly once, with any number of processes.

    Documents. A row of JSON lines, CSV, parquet or a data set is a document, and so is what a split
    holds of a text file. They follow each other, with BOS before and EOS after each as add_bos and
    add_eos say, and blocks are cut from that stream: attention crosses document borders, unless
    `packing_strategy` is "bfd". Line ends become LF; a byte order mark is dropped; all other text
    stays as it is.

    Conversations. Tables without the column of text may have `messages`, `prompt` and `completion`,
    or Alpaca's `instruction`, `input` and `output`: see chat.py.

    Held-out splits. Where `test` is None, it is the last `test_fraction` of every source of
    `train`: of a text file's bytes, from the first start of a line in it; of the rows of a table,
    rounded. The same with `val` and the `val_fraction` before that. So each split is contiguous in
    each source, and no block of one overlaps another. A fraction of 0: no such split.

    Args:
        train: files, folders, globs, or "hf:NAME[:config[:split]]"; None: the built-in sample,
            370 KB of English that come with CPython. Files ending in .jsonl, .ndjson or .json have
            an object a line, .parquet, .csv and .tsv a table, all others are UTF-8 text; .gz, .bz2
            and .xz are unpacked. A folder that `datasets` has written is one source.
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
        packing_strategy: "wrapped", blocks are cut from the stream; "bfd", documents are laid into
            blocks by best fit and do not see each other, and batches have "position_ids", too.
        probabilities: of the names in `train`, the part of each in the training blocks; None: all
            that there is.
        completion_only_loss: of conversations with a prompt, only the completion counts; None: yes.
        assistant_only_loss: of messages, only the assistant's count.
        chat_template_path: a file with the chat template; None: the tokenizer's.
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
        packing_strategy: Literal["wrapped", "bfd"] = "wrapped",
        probabilities: list[float] | None = None,
        completion_only_loss: bool | None = None,
        assistant_only_loss: bool = False,
        chat_template_path: str | None = None,
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
        if packing_strategy not in ("wrapped", "bfd"):
            raise ValueError(f"packing_strategy is 'wrapped' or 'bfd', got {packing_strategy!r}")
        if probabilities is not None:
            n = len(train) if isinstance(train, list) else 1
            if (
                len(probabilities) != n
                or min(probabilities) <= 0
                or abs(sum(probabilities) - 1) > 1e-6
            ):
                raise ValueError(
                    f"probabilities are one above 0 for each of the {n} names in train, 1 in all, "
                    f"got {probabilities}"
                )
            if max_train_tokens is not None:
                raise ValueError("give probabilities or max_train_tokens, not both")
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
        self.packing_strategy = packing_strategy
        self.probabilities = probabilities
        self.completion_only_loss = completion_only_loss
        self.assistant_only_loss = assistant_only_loss
        self.chat_template_path = chat_template_path
        self._tokens: dict[tuple[str, int | None], TokenFile] = {}

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

    def split_size(self, split: str) -> int:
        """Blocks of a split, without padding."""
        return len(self.dataset(split)) if self.has_split(split) else 0

    # Tokens

    def prepare_data(self) -> None:
        """Tokenises what is not in the cache, on one process (where the tokenizer is known)."""
        if self.has_tokenizer:
            for split in self._needed():
                for part in self._parts(split):
                    self._tokenised(split, part)

    def setup(self, stage: str | None = None) -> None:
        """Finds the text, and its tokens where the tokenizer is known: faults show at the start."""
        if stage == "fit" and self._world()[1] == 0:
            names = [source.name for source, _, _ in self.ranges["train"]]
            print(f"training text: {listed(names, 3)}", flush=True)
        for split in self._needed():
            if self.has_tokenizer:
                for part in self._parts(split):
                    self.tokens(split, part)

    def _needed(self) -> list[str]:
        function = str(self.trainer.state.fn or "fit") if self.trainer else "fit"
        one = {"validate": "val", "test": "test"}.get(function.rsplit(".", 1)[-1].lower())
        return [split for split in ([one] if one else SPLITS) if self.has_split(split)]

    def _parts(self, split: str) -> list[int | None]:
        """What of a split is tokenised by itself: all of it, or each of the names in `train`."""
        mixed = split == "train" and self.probabilities is not None
        return [*range(len(self.probabilities))] if mixed else [None]

    def tokens(self, split: str, part: int | None = None) -> TokenFile:
        """The tokens of a split, tokenised first if they are not in the cache.

        Of several processes, which all have to call this, the first does the work.

        Raises: ValueError without a tokenizer, and where the split has no text.
        """
        if (split, part) not in self._tokens:
            world, rank = self._world()
            if world > 1:
                try:
                    if rank == 0:
                        self._tokenised(split, part)
                finally:
                    self.trainer.strategy.barrier()
            self._tokens[split, part] = self._tokenised(split, part)
        return self._tokens[split, part]

    def _tokenised(self, split: str, part: int | None) -> TokenFile:
        self.require(split)
        bos, eos = borders(self.tokenizer, self.add_bos, self.add_eos)
        ranges = self._ranges_of(split, part)
        about = {
            "version": VERSION,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "sources": self.identity(split, part),
        }
        answers = None
        if any(isinstance(source, Chats) for source, _, _ in ranges):
            loss = (self.completion_only_loss, self.assistant_only_loss)
            path = self.chat_template_path
            template = Path(path).expanduser().read_text(encoding="utf-8") if path else None
            answers = ChatEncoder(self.tokenizer, bos, eos, template, *loss)
            about["chat"] = [answers.template, *loss]
        folder = self.cache_dir / _digest([about, bos, eos])
        about["tokenizer_name"] = self._tokenizer_name
        total = sum(end - start for _, start, end in ranges)
        how = (self.tokenizer, bos, eos, about, f"tokens of the {split} split", total, answers)
        return tokens_of(folder, self.pieces(split, part), *how)

    def dataset(self, split: str, n_padding: int = 0) -> TokenBlocks | Mixture:
        """The blocks of "train", "val" or "test".

        n_padding: blocks without targets to add.
        """
        whole, most = split == "train", None
        if whole and self.max_train_tokens is not None:
            most = self.max_train_tokens // self.block_size
        kind = PackedDocuments if self.packing_strategy == "bfd" else TokenBlocks
        how = (self.block_size, whole, n_padding, most)
        parts = [kind(self.tokens(split, part), *how) for part in self._parts(split)]
        for part, blocks in zip(self._parts(split), parts, strict=True):
            if not blocks.n_blocks:
                needed = self.block_size + 1 if whole and kind is TokenBlocks else 2
                name = self._told(split) if part is None else self.names["train"][part]
                raise ValueError(
                    f"the {split} split has {blocks.tokens.n_tokens} tokens, fewer than the "
                    f"{needed} of one block (block_size={self.block_size}) and what follows it: "
                    f"give more text than {name}, or a smaller --data.block_size"
                )
        if parts[1:]:
            parts = [Mixture(parts, self.probabilities)]
        if not len(parts[0]):
            raise ValueError(
                f"probabilities={self.probabilities} of what there is make up no whole block"
            )
        return parts[0]

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
        settings += ("packing_strategy", "probabilities", "completion_only_loss")
        settings += ("assistant_only_loss", "chat_template_path")
        facts: dict[str, Any] = {"name": type(self).__name__, "files": files, "tokenizer": None}
        facts |= {name: getattr(self, name) for name in settings}
        held_out = {split: self.held_out.get(split) for split in ("val", "test")}
        facts |= {f"{split}_fraction": fraction for split, fraction in held_out.items()}
        read = {split: self.datasets.get(split) for split in SPLITS}
        facts["n_targets"] = {  # where they are of all the text that words and bytes are counted of
            split: blocks.n_targets if getattr(blocks, "covers_text", False) else None
            for split, blocks in read.items()
        }
        if self._tokenizer is not None:
            bos, eos = borders(self._tokenizer, self.add_bos, self.add_eos)
            facts["add_bos"], facts["add_eos"] = bos is not None, eos is not None
            facts["tokenizer"] = {
                "name": self._tokenizer_name,
                "vocab_size": number_of_ids(self._tokenizer),
                "hash": tokenizer_hash(self._tokenizer),
            }
        for split in SPLITS:
            found = [
                self._tokens[split, p] for p in self._parts(split) if (split, p) in self._tokens
            ]
            facts[split] = {
                name: sum(tokens.header[name] for tokens in found) if found else None
                for name in ("n_documents", "n_tokens", "n_words", "n_bytes")
            }
        if self.max_train_tokens is not None and ("train", None) in self._tokens:
            facts["train"]["n_tokens_used"] = len(self.dataset("train")) * self.block_size
        return facts


def _digest(value: Any) -> str:
    """Of plain values, 32 hexadecimal digits."""
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
