"""Reading text line by line, with errors that say where.

Every number goes through :func:`whole` or :func:`decimal`, so that a damaged file cannot ask for
unbounded work: at most 19 digits, no signs or blanks that the format does not have.
"""

from __future__ import annotations

import codecs
import math
import re

from lowtide.errors import FormatError

__all__ = ["Lines", "decimal", "decode", "shorten", "whole"]

_WHOLE = re.compile(r"[0-9]{1,19}", re.ASCII)
_SIGNED = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_DECIMAL = re.compile(r"-?[0-9]{1,19}(\.[0-9]{0,30})?([eE][-+]?[0-9]{1,3})?", re.ASCII)


def decode(data: bytes, *, bom: bool = False) -> str:
    """The text of a file, or a FormatError that names the byte which is not UTF-8 text.

    A byte order mark is refused, or with ``bom`` taken off.
    """
    if data.startswith(codecs.BOM_UTF8):
        if not bom:
            raise FormatError("a byte order mark", expected="UTF-8 text without one", byte=0)
        data = data[len(codecs.BOM_UTF8) :]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"byte 0x{data[error.start]:02x} is not valid UTF-8",
            expected="a UTF-8 text file",
            byte=error.start,
        ) from None
    nul = text.find("\0")
    if nul >= 0:
        raise FormatError("a NUL byte", expected="a UTF-8 text file", byte=len(text[:nul].encode()))
    return text


def shorten(text: str, limit: int = 60) -> str:
    """Text as it can stand in a message: quoted, and cut where it is long."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def whole(text: str, line: int, what: str, *, signed: bool = False) -> int:
    """A whole number of at most 19 digits."""
    pattern = _SIGNED if signed else _WHOLE
    if not pattern.fullmatch(text):
        kind = "a whole number" if signed else "a whole number that is not negative"
        raise FormatError(f"{shorten(text)} is no {what}", expected=kind, line=line)
    return int(text)


def decimal(text: str, line: int, what: str) -> float:
    """A finite decimal number."""
    if not _DECIMAL.fullmatch(text):
        raise FormatError(f"{shorten(text)} is no {what}", expected="a decimal number", line=line)
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"{shorten(text)} is too large for a {what}", expected="a finite number", line=line)
    return value


class Lines:
    """A cursor over the lines of a text; ``number`` is the line last taken, counted from 1."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        if self._lines[-1] == "":
            self._lines.pop()
        self.number = 0

    @property
    def left(self) -> int:
        """How many lines have not been taken."""
        return len(self._lines) - self.number

    def peek(self) -> str | None:
        """The next line, or None at the end."""
        return self._lines[self.number] if self.left else None

    def take(self, expected: str) -> str:
        """The next line; a FormatError at the end of the text."""
        line = self.peek()
        if line is None:
            raise FormatError("the file ends here", expected=expected, line=self.number + 1)
        self.number += 1
        return line

    def fail(self, problem: str, expected: str) -> FormatError:
        """An error at the line last taken."""
        return FormatError(problem, expected=expected, line=self.number)
