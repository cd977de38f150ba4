"""Mutants of bytes, of binary containers by their marks, and of trees of plain values.

All draw from one random.Random, so that a mutant follows from its number alone.
"""

from __future__ import annotations

import copy
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

DEEP, LONG = "@deep@", "@long@"  # stand for what json.dumps cannot write
WRITTEN = {f'"{DEEP}"': "[" * 100_000 + "]" * 100_000, f'"{LONG}"': "9" * 5000}
STRINGS = ["", " ", "x", "a.b", "../../x", "/etc/hostname", "\0", "\ud800", "é\n", "x" * 10_000]
STRINGS += ["nan", "-1", "20000000000000000000", "1e999", "null", "%s%n", "os.system"]
NUMBERS = [0, 1, -1, 2, 2**31, 2**63, 10**20, 10**400, 0.5, 1e308, float("nan"), float("inf")]
ODD = [None, True, False, *NUMBERS, *STRINGS, DEEP, LONG]
ODD += [[], {}, [None], [[]], {"": 1}, ["x", 1], {"class_path": "os.system"}]


# Bytes


def mutate_bytes(data: bytes, rng: Random, other: bytes) -> bytes:
    """Flips, cuts, and splices with `other`; places near the start are preferred."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        end = len(data) if rng.random() < 0.5 else min(len(data), 512)
        a, b = sorted((rng.randint(0, end), rng.randint(0, end)))
        how = rng.randrange(7)
        if how == 0:
            data = data[:a]
        elif how == 1:
            data = data[:a] + data[b:]
        elif how == 2:
            data = data[:b] + data[a:]
        elif how == 3:
            data = data[:a] + other[rng.randint(0, len(other)) :]
        elif how == 4:
            data = data[:a] + rng.randbytes(rng.choice((1, 4, b - a))) + data[b:]
        else:
            changed = bytearray(data)
            for _ in range(rng.choice((1, 2, 8))):
                if changed:
                    place = rng.randrange(max(1, min(len(changed), end)))
                    changed[place] = rng.choice((0, 255, changed[place] ^ 1 << rng.randrange(8)))
            data = bytes(changed)
    return data


# Containers

# What marks a part: a name of four letters (chunks of PNG, boxes of MP4), a marker of JPEG, a block
# of GIF, an element of Matroska, a key of GGUF.
MARKS = re.compile(
    rb"[A-Za-z]{4}|\xff[\xc0-\xfe]|\x00[\x2c\x21]|\x1a\x45\xdf\xa3|\x18\x53\x80\x67|\x1f\x43\xb6\x75"
    rb"|\x16\x54\xae\x6b|\x1c\x53\xbb\x6b|[\xa0\xa3\xae\xbb\xe0\xe1][\x81-\xff]"
)


def mutate_container(data: bytes, rng: Random) -> bytes:
    """Odd values in the numbers beside the marks of a container; its parts left out, doubled,
    moved, nested."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        marks = [found.span() for found in MARKS.finditer(data)] or [(0, 0)]
        if rng.random() < 0.65:
            start, end = rng.choice(marks)
            size, order = rng.choice((1, 2, 4, 4, 8)), rng.choice(("big", "big", "little"))
            at = max(0, rng.choice((start - size, end, end + size * rng.randrange(12))))
            found = int.from_bytes(data[at : at + size], order)
            top = 256**size - 1
            odd = [0, 1, 2, top, top - 1, top // 2, top // 2 + 1, found + 1, found - 1, found * 2]
            value = rng.choice([*odd, found // 2, rng.randint(0, top), 2 ** (4 * size)])
            data = data[:at] + (value & top).to_bytes(size, order) + data[at + size :]
            continue
        cuts = sorted(max(0, rng.choice(marks)[0] - rng.choice((0, 4, 8))) for _ in range(4))
        if rng.random() < 0.5:
            cuts = cuts[2:] + cuts[:2]
        a, b, c, d = cuts
        data = rng.choice(
            (
                data[:a] + data[b:],
                data[:b] + data[a:],
                data[:c] + data[a:b] + data[c:],
                data[:a] + data[c:d] + data[b:],
                data[:a] + mutate_bytes(data[a:b], rng, data[c:d]) + data[b:],
            )
        )
    return data


def with_checksums(data: bytes) -> bytes:
    """A PNG file whose chunks have the checksums that they should have."""
    at = 8
    while at + 12 <= len(data):
        end = min(at + 12 + int.from_bytes(data[at : at + 4], "big"), len(data))
        data = data[: end - 4] + struct.pack(">I", zlib.crc32(data[at + 4 : end - 4])) + data[end:]
        at = end
    return data


# Trees of dicts, lists and plain values


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def mutate_tree(tree: Any, rng: Random, odd: Callable[[Random], Any] | None = None) -> Any:
    """Other types, missing and huge values, other nesting and names, somewhere in a tree.

    odd: gives values to put in, beside ODD.
    """
    root = [copy.deepcopy(tree)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(root))
        holder, key = rng.choice(found)
        value, how = holder[key], rng.randrange(8)
        if how <= 2:
            holder[key] = odd(rng) if odd and rng.random() < 0.5 else copy.deepcopy(rng.choice(ODD))
        elif how == 3:
            holder[key] = [value] if rng.random() < 0.5 else {rng.choice(STRINGS): value}
        elif how == 4:
            there, at = rng.choice(found)
            holder[key] = copy.deepcopy(there[at])
        elif how == 5 and isinstance(value, (bool, int, float, str)):
            holder[key] = rng.choice((str(value), not value, [*str(value)], f"{value} "))
        elif holder is not root:
            value = holder.pop(key)
            if isinstance(holder, list):
                holder[key:key] = [copy.deepcopy(value) for _ in range(rng.choice((0, 0, 2, 50)))]
            elif how == 6:
                holder[rng.choice([*STRINGS, str(key).upper(), f"{key}s"])] = value
    return root[0]


def as_json(tree: Any, rng: Random, indent: int | None = None) -> bytes:
    """A tree as JSON; at times with a key twice in an object, or with what JSON does not have."""
    text = json.dumps(tree, indent=indent, ensure_ascii=rng.random() < 0.9)
    for mark, written in WRITTEN.items():
        text = text.replace(mark, written)
    if rng.random() < 0.15:
        keys = re.findall(r'"\w+"(?=:)', text) or ['"x"']
        opened = [found.end() for found in re.finditer(r"\{", text)] or [0]
        at = rng.choice(opened)
        twice = f"{rng.choice(keys)}: {json.dumps(rng.choice(STRINGS))}, "
        text = text[:at] + twice + text[at:]
    return text.encode("utf-8", "surrogatepass")
