"""Which text each split has: sources, and what of each is held out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from mmpreproj.data.text.text_sources import Piece, Source, open_sources
from mmpreproj.messages import listed

__all__ = ["SPLITS", "TextSplits"]

SPLITS = ("train", "val", "test")


class TextSplits:
    """The text of "train", "val" and "test": see TextDataModule, whose settings these are."""

    names: Mapping[str, str | list[str] | None]
    text_key: str
    held_out: Mapping[str, float]
    """Of the splits that are held out of training, the fraction of each source."""

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

    def pieces(self, split: str, part: int | None = None) -> Iterator[Piece]:
        """The text of a split, as it is tokenised; of one of the names in `train`, if given."""
        for source, start, end in self._ranges_of(split, part):
            yield from source.pieces(start, end)

    def _ranges_of(self, split: str, part: int | None) -> list[tuple[Source, int, int]]:
        return [found for found in self.ranges[split] if part in (None, found[0].part)]

    def documents(self, split: str) -> Iterator[str]:
        """The text of a split, document by document."""
        self.require(split)
        texts: list[str] = []
        for piece in self.pieces(split):
            texts.append(piece.text)
            if piece.ends:
                yield "".join(texts)
                texts = []

    def identity(self, split: str, part: int | None = None) -> list[Any]:
        """What decides a split's text: the content of the sources, and the range of each."""
        ranges = self._ranges_of(split, part)
        return [[*source.identity, start, end] for source, start, end in ranges]
