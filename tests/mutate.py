"""Damage to files, the same for the same random seed."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec

NUMBERS = [
    b"-1", b"0", b"1", b"999999999999999999999999", b"9223372036854775808", b"1e308", b"1e999", b"-0",
    b"00", b"0x10", b"NaN", b"null", b"3.5", b"\xd9\xa3", b"2147483648", b"99999999", b"",
]  # fmt: skip
GARBAGE = [
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n\n\n", b"{" * 2000, b"[" * 100_000, b"(" * 500, b"'\"\\", b",,,",
    b"\r", b"\t", b" ", "é—§".encode(), b"0" * 5000, b"array([", b"PI( <", b"tensor([[", b"}}}]]]", b"-" * 300,
    b'"a":' * 50, b"\x1b[31m", b"x" * 70_000,
]  # fmt: skip
_NUMBER = re.compile(rb"\d+")


def _spot(rng: random.Random, data: bytes) -> int:
    return rng.randrange(len(data) + 1)


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: _spot(rng, data)]


def behead(rng: random.Random, data: bytes) -> bytes:
    return data[rng.randrange(min(len(data), 400) + 1) :]


def cut(rng: random.Random, data: bytes) -> bytes:
    at = _spot(rng, data)
    return data[:at] + data[at + rng.choice([1, 2, 5, 40, 400]) :]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = _spot(rng, data)
    return data[:at] + rng.choice(GARBAGE) + data[at:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    at = _spot(rng, data)
    return data[:at] + data[at : at + rng.choice([1, 10, 100, 1000])] * 2 + data[at:]


def number(rng: random.Random, data: bytes) -> bytes:
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    match = rng.choice(found)
    return data[: match.start()] + rng.choice([*NUMBERS, rng.choice(found).group()]) + data[match.end() :]


def lines(rng: random.Random, data: bytes) -> bytes:
    rows = data.split(b"\n")
    a, b = rng.randrange(len(rows)), rng.randrange(len(rows))
    how = rng.randrange(5)
    if how == 0:
        del rows[a]
    elif how == 1:
        rows.insert(a, rows[b])
    elif how == 2:
        rows[a], rows[b] = rows[b], rows[a]
    elif how == 3:
        rows[a] = rows[b]
    else:
        del rows[a : a + rng.randrange(1, 20)]
    return b"\n".join(rows)


def word(rng: random.Random, data: bytes) -> bytes:
    words = data.split(b" ")
    a, b = rng.randrange(len(words)), rng.randrange(len(words))
    words[a] = words[b] if rng.random() < 0.7 else b""
    return b" ".join(words)


TEXT: list[Callable[[random.Random, bytes], bytes]] = [
    flip, truncate, behead, cut, insert, repeat, number, number, lines, lines, lines, word,
]  # fmt: skip

_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**63, 10**30, 1.5, -2.5, 1e300, "", "0", "chk1", [], {}, [[]], {"": None}, [None], "x" * 99,
]  # fmt: skip


Path = tuple[Any, ...]


@functools.lru_cache(maxsize=4)
def _paths(data: bytes) -> list[Path]:
    """Where the members of a JSON document are, by their keys from the outside in."""
    found: list[Path] = []

    def look(value: Any, path: Path) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            found.append((*path, key))
            if isinstance(child, dict | list):
                look(child, (*path, key))

    root = json.loads(data)
    look(root if isinstance(root, dict | list) else [], ())
    return found


def _place(root: Any, path: Path) -> tuple[Any, Any]:
    """What holds a member, and the member's key there."""
    for key in path[:-1]:
        root = root[key]
    return root, path[-1]


def _written(root: Any) -> bytes:
    try:
        return msgspec.json.encode(root)
    except OverflowError:  # a number that only Python holds
        return json.dumps(root).encode()


def structure(rng: random.Random, data: bytes) -> bytes:
    """Change, drop, copy or double a member of a JSON document."""
    root = msgspec.json.decode(data)
    paths = _paths(data)
    for _ in range(rng.choice([1, 1, 1, 3])):
        try:
            parent, key = _place(root, rng.choice(paths))
            how = rng.randrange(5)
            if how == 0:
                del parent[key]
            elif how == 1:
                other, name = _place(root, rng.choice(paths))
                parent[key] = other[name]
            elif how == 2 and isinstance(parent, dict):
                parent[rng.choice(["x", "id", "0", "517"])] = parent[key]
            elif how == 3 and isinstance(parent, list):
                parent.append(parent[key])
            else:
                parent[key] = rng.choice(_VALUES)
        except (KeyError, IndexError, TypeError):  # an earlier change has taken it away
            continue
    try:
        return _written(root)
    except (ValueError, RecursionError):  # a member was copied into itself
        return data


def mutated(rng: random.Random, data: bytes, *, is_json: bool = False) -> bytes:
    """The document with one to three kinds of damage."""
    if is_json and rng.random() < 0.6:
        return structure(rng, data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        data = rng.choice(TEXT)(rng, data)
    return data
