"""JSON as other programs write it, read strictly: no duplicate keys, no NaN, no endless numbers.

Errors inside a JSON document name a path of keys; :func:`locate` turns it into the byte where it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from lowtide.errors import FormatError
from lowtide.formats.text import shorten

__all__ = ["Key", "loads", "locate"]

Key = str | int

_BLANK = re.compile(r"[ \t\r\n]*")
_MAX_DIGITS = 19


class _RefusedError(ValueError):
    """Something valid as JSON that no document of ours has."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"the key {shorten(key)} stands twice in one object")
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS + 1:
        raise _RefusedError(f"the number {shorten(text)} has more than {_MAX_DIGITS} digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _RefusedError(f"the number {shorten(text)} is too large")
    return value


def _constant(text: str) -> NoReturn:
    raise _RefusedError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_real, parse_constant=_constant
)


def loads(text: str, *, line: int | None = None) -> Any:
    """The value of a JSON text; errors name ``line`` where given, else the byte."""

    def fail(problem: str, position: int) -> FormatError:
        byte = None if line is not None else len(text[:position].encode("utf-8", "replace"))
        return FormatError(problem, expected="a JSON document", line=line, byte=byte)

    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise fail(f"the JSON text breaks off or is damaged: {error.msg}", error.pos) from None
    except _RefusedError as error:
        raise fail(str(error), 0) from None
    except RecursionError:
        raise fail("the JSON text is nested too deeply", 0) from None


def locate(text: str, path: Sequence[Key]) -> int:
    """The byte at which the value under this path of keys starts; of its nearest parent if it is missing."""
    plain = json.JSONDecoder()
    position = _skip(text, 0)
    for key in path:
        found = _member(text, position, key, plain)
        if found is None:
            break
        position = found
    return len(text[:position].encode("utf-8", "replace"))


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _member(text: str, position: int, key: Key, plain: json.JSONDecoder) -> int | None:
    """Where the value of one key or index starts inside the object or array at this position."""
    closing = {"{": "}", "[": "]"}.get(text[position : position + 1])
    if closing is None or (closing == "}") != isinstance(key, str):
        return None
    position = _skip(text, position + 1)
    index = 0
    while text[position : position + 1] not in (closing, ""):
        name: Key = index
        if closing == "}":
            name, position = plain.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)
        if name == key:
            return position
        _, position = plain.raw_decode(text, position)
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        index += 1
    return None
