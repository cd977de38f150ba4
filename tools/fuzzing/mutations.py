"""Mutants of bytes, of binary containers by their layout, and of trees of plain values.

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

Layout = tuple[list[tuple[int, int, str]], list[tuple[int, int]]]
"""Of a container: its numbers (offset, bytes, byte order), and its parts (start, end)."""

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


def mutate_container(data: bytes, rng: Random, layout: Callable[[bytes], Layout]) -> bytes:
    """Odd values in the numbers of a container; its parts left out, doubled, moved, nested."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        numbers, parts = layout(data)
        if numbers and (rng.random() < 0.65 or not parts):
            at, size, order = rng.choice(numbers)
            found = int.from_bytes(data[at : at + size], order)
            top = 256**size - 1
            odd = [0, 1, 2, top, top - 1, top // 2, top // 2 + 1, found + 1, found - 1, found * 2]
            value = rng.choice([*odd, found // 2, rng.randint(0, top), 2 ** (4 * size)])
            data = data[:at] + (value & top).to_bytes(size, order) + data[at + size :]
        elif parts:
            (a, b), (c, d) = rng.choice(parts), rng.choice(parts)
            how = rng.randrange(5)
            if how == 0:
                data = data[:a] + data[b:]
            elif how == 1:
                data = data[:b] + data[a:]
            elif how == 2:
                data = data[:c] + data[a:b] + data[c:]
            elif how == 3:
                data = data[:a] + data[c:d] + data[b:]
            else:
                data = data[:a] + mutate_bytes(data[a:b], rng, data[c:d]) + data[b:]
    return data


def png(data: bytes) -> Layout:
    numbers, parts, at = [], [], 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        numbers.append((at, 4, "big"))
        if data[at + 4 : at + 8] == b"IHDR":
            numbers += [(at + 8, 4, "big"), (at + 12, 4, "big")]
            numbers += [(at + 16 + k, 1, "big") for k in range(5)]
        parts.append((at, min(at + 12 + size, len(data))))
        at += 12 + size
    return numbers, parts


def with_checksums(data: bytes) -> bytes:
    """A PNG file whose chunks have the checksums that they should have."""
    for start, end in png(data)[1]:
        data = (
            data[: end - 4] + struct.pack(">I", zlib.crc32(data[start + 4 : end - 4])) + data[end:]
        )
    return data


def jpeg(data: bytes) -> Layout:
    numbers, parts, at = [], [], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        size = int.from_bytes(data[at + 2 : at + 4], "big")
        numbers.append((at + 2, 2, "big"))
        if 0xC0 <= data[at + 1] <= 0xCF:  # a frame's header, or tables
            numbers += [(at + 4, 1, "big"), (at + 5, 2, "big"), (at + 7, 2, "big")]
            numbers += [(at + 9 + k, 1, "big") for k in range(7)]
        parts.append((at, min(at + 2 + size, len(data))))
        at += 2 + size
    return [n for n in numbers if n[0] + n[1] <= len(data)], parts


def gif(data: bytes) -> Layout:
    numbers, parts = [(6, 2, "little"), (8, 2, "little"), (10, 1, "little")], []
    for block in re.finditer(rb"\x2c|\x21[\xf9\xff]", data[13:], re.DOTALL):
        at = 13 + block.start()
        numbers += [(at + k, 2, "little") for k in (1, 3, 5, 7)] + [(at + 9, 1, "little")]
        parts.append((at, min(at + 32, len(data))))
    return [n for n in numbers if n[0] + n[1] <= len(data)], parts


BOXES = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"dinf", b"udta", b"moof", b"traf"}


def mp4(data: bytes, start: int = 0, end: int | None = None) -> Layout:
    numbers, parts, at = [], [], start
    end = len(data) if end is None else end
    while at + 8 <= end:
        size = int.from_bytes(data[at : at + 4], "big")
        stop = min(at + max(size, 8), end)
        numbers.append((at, 4, "big"))
        parts.append((at, stop))
        if data[at + 4 : at + 8] in BOXES:
            inside = mp4(data, at + 8, stop)
            numbers, parts = numbers + inside[0], parts + inside[1]
        elif data[at + 4 : at + 8] != b"mdat":
            numbers += [(place, 4, "big") for place in range(at + 8, min(stop - 3, at + 108), 4)]
        at = stop
    return numbers, parts


MASTERS = {"1a45dfa3", "18538067", "1549a966", "1654ae6b", "ae", "e0", "1f43b675", "1c53bb6b"}
MASTERS |= {"114d9b74", "4dbb", "a0", "bb", "b7", "e1"}


def ebml(data: bytes, start: int = 0, end: int | None = None) -> Layout:
    """Of Matroska and WebM."""
    numbers, parts, at = [], [], start
    end = len(data) if end is None else end
    while at + 2 <= end:
        n_name = 9 - data[at].bit_length() if data[at] else 9
        n_size = 9 - data[at + n_name].bit_length() if at + n_name < end else 9
        inside = at + n_name + n_size
        if n_name > 4 or n_size > 8 or inside > end:
            break
        size = int.from_bytes(data[at + n_name : inside], "big") & (1 << 7 * n_size) - 1
        stop = min(inside + size, end)
        numbers.append((at + n_name, n_size, "big"))
        parts.append((at, stop))
        if data[at : at + n_name].hex() in MASTERS:
            deeper = ebml(data, inside, stop)
            numbers, parts = numbers + deeper[0], parts + deeper[1]
        elif 0 < stop - inside <= 8:
            numbers.append((inside, stop - inside, "big"))
        at = stop
    return numbers, parts


def gguf(data: bytes) -> Layout:
    numbers, parts, at = [(4, 4, "little")], [], 8
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(size: int) -> int:
        nonlocal at
        if at + size > len(data):
            raise EOFError
        numbers.append((at, size, "little"))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def value(kind: int) -> None:
        nonlocal at
        if kind == 8:
            at += number(8)
        elif kind == 9:
            of, n = number(4), number(8)
            for k in range(min(n, 300)):
                kept = len(numbers)
                value(of)
                if k > 2:  # enough of these
                    del numbers[kept:]
        else:
            number(sizes.get(kind, 4))

    try:
        n_tensors, n_values = number(8), number(8)
        for k in range(min(n_values + n_tensors, 300)):
            start = at
            at += number(8)
            if k < n_values:
                value(number(4))
            else:
                for _ in range(min(number(4), 5)):
                    number(8)
                number(4), number(8)
            parts.append((start, at))
    except EOFError:
        pass
    return numbers, parts


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
