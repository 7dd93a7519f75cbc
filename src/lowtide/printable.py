"""Text from files and from users, safe to show: nothing in it commands a terminal or reorders a line."""

from __future__ import annotations

import re

__all__ = ["printable"]

_CONTROL = (
    "\x00-\x1f\x7f-\x9f"  # C0, DEL, C1: escape sequences start here
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks and overrides of writing direction
    "\u2028\u2029"  # separators of lines and paragraphs
    "\ud800-\udfff"  # bytes of a file name that are no UTF-8
)
_ALL = re.compile(f"[{_CONTROL}]")
_BUT_LINES = re.compile(f"(?!\n)[{_CONTROL}]")


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with control characters spelt out, an escape character as ``\x1b``.

    A line break is one of them, unless ``lines`` says that the text has several lines of its own.
    """
    return (_BUT_LINES if lines else _ALL).sub(_spelt, text)


def _spelt(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
