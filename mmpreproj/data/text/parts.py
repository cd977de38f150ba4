"""Training, validation and test text: what each takes of the sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from mmpreproj.data.text.pieces import Piece
from mmpreproj.data.text.sources import Source, open_sources

PARTS = ("train", "val", "test")


class TextParts:
    """The three parts of the text, read from their sources as often as asked.

    Opening reads every file once from end to end, for the hash of its content.

    Args:
        names: what `open_sources` takes, for each of PARTS; None for val and test: held out of
            train.
        fractions: of "val" and "test", used where their text is held out.
        text_key: the column of text in tables.

    Raises:
        ValueError: where two parts would be the same text; this and others as `open_sources`.
    """

    def __init__(
        self,
        names: Mapping[str, str | list[str] | None],
        fractions: Mapping[str, float],
        text_key: str,
    ):
        self.held_out = {p: fractions[p] for p in ("val", "test") if names[p] is None}
        self.ranges: dict[str, list[tuple[Source, int, int]]] = {part: [] for part in PARTS}
        test = self.held_out.get("test", 0.0)
        val = self.held_out.get("val", 0.0)
        for source in open_sources(names["train"], text_key):
            ends = (0, source.cut(1.0 - test - val), source.cut(1.0 - test), source.size)
            for part, start, end in zip(PARTS, ends[:-1], ends[1:], strict=True):
                if start < end:
                    self.ranges[part].append((source, start, end))
        for part in ("val", "test"):
            if names[part] is not None:
                own = open_sources(names[part], text_key)
                self.ranges[part] = [(source, 0, source.size) for source in own]
        self._refuse_shared()

    def require(self, part: str) -> None:
        """Raises: ValueError, with what to do, if a part has no text."""
        check_part(part)
        if self.ranges[part]:
            return
        if part == "train":
            raise ValueError(
                "there is no text to train on: all of it is held out. Give more text, or lower "
                "val_fraction and test_fraction"
            )
        for source, start, end in self.ranges["train"]:
            next(source.pieces(start, end), None)  # what is no text at all says so, first
        raise ValueError(
            f"there is no text for the {part} part: {part}_fraction={self.held_out[part]} of the "
            f"training text holds no line or row. Name text with {part}, or raise {part}_fraction"
        )

    def pieces(self, part: str) -> Iterator[Piece]:
        """The text of a part, with how much of the part was read."""
        check_part(part)
        ranges = self.ranges[part]
        total = sum(end - start for _, start, end in ranges)
        before = 0
        for source, start, end in ranges:
            for piece in source.pieces(start, end):
                yield piece._replace(done=(before + piece.done * (end - start)) / total)
            before += end - start

    def documents(self, part: str) -> Iterator[str]:
        """The text of a part, document by document."""
        texts: list[str] = []
        for piece in self.pieces(part):
            texts.append(piece.text)
            if piece.ends:
                yield "".join(texts)
                texts = []

    def identity(self, part: str) -> list[Any]:
        """What decides a part's text: the content of the sources, and the range taken of each."""
        return [
            [type(source).__name__, source.digest, getattr(source, "text_key", None), start, end]
            for source, start, end in self.ranges[part]
        ]

    def files(self) -> dict[str, list[str]]:
        return {part: [source.name for source, _, _ in self.ranges[part]] for part in PARTS}

    def _refuse_shared(self) -> None:
        where: dict[str, tuple[str, Source]] = {}
        for part in PARTS:
            for source, _, _ in self.ranges[part]:
                other, first = where.setdefault(source.digest, (part, source))
                if other != part and source is not first:
                    raise ValueError(
                        f"{source.name} of the {part} part has the content of {first.name} of the "
                        f"{other} part: name different text"
                    )


def check_part(part: str) -> None:
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")


def digest(value: Any) -> str:
    """Of plain values, 32 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
