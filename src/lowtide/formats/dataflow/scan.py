"""The recovered text of a data-flow picture, cut into pieces: names, fields, edge labels, noise.

Every character that is not blank belongs to exactly one piece, so that nothing of the text is lost unseen.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from lowtide.cost import Note, NoteKind
from lowtide.errors import FormatError
from lowtide.formats.dataflow.words import digits_of, nearest
from lowtide.formats.text import shorten, whole

__all__ = ["BOX_KEYS", "DIM_KEYS", "Box", "Kind", "Notebook", "Piece", "Use", "scan"]

DIM_KEYS = ("dim", "result_dim")
BOX_KEYS = ("dist_input", "dist_filters", "dist_weights", "read_rect", "write_rect", "dist_result")
"""In the order in which a node lists them, from top to bottom."""

_INT32 = 2**31 - 1
_LONGEST_NAME = 200
_BOX_TEXT = "`Rect(array([…], dtype=int32), array([…], dtype=int32))`"
_FIELD = re.compile(
    r"(?P<key>(?:(?:result|dist|read|write)[_ ]{1,2})?[A-Za-z0-9_]{2,16}) ?= ?"
    r"(?P<value>Rect\((?:[^()]*\([^()]*\)){2}[^()]*\)"
    r"|None\b|\[[0-9OoQDIil|ZSB,. ]*\]?|[0-9OIl]{1,19}(?=\s|$))"
)
_ARRAY = re.compile(r"\s*(\w+)\(\[([^\[\]]*)\]\s*,\s*(\w+)=(\w+)\)\s*")
_BOX_LEFT = re.compile(r"Rect ?\(|array ?\(")
_SET_ZERO = re.compile(r"[gq9]rad[. ]{0,2}[sS5]et[_ ]{0,2}[^\s]{0,24}|[sS5]et[_ ]{1,2}[zZ2]er[oO0]", re.ASCII)
_WORD = re.compile(r"\S+")
_NAME = re.compile(r"(?=[^A-Za-z]*[A-Za-z])\w+(?:\.\w+)+|update_\S+", re.ASCII)
_TORN = re.compile(r"(?=(?:[^A-Za-z0-9]*[A-Za-z0-9]){4})[^\s=<>()\[\]]*\w\.\w[^\s=<>()\[\]]*|\.\w+(?:\.\w+)+")
_LABEL_IN = re.compile(r"(?:[^A-Za-z0-9>]{0,4}|[A-Z])>(?P<port>[A-Za-z0-9_.]+)", re.ASCII)
_LABEL_OUT = re.compile(r"(?P<port>[A-Za-z0-9_.]+)[-=]>", re.ASCII)
_ARROW = re.compile(r"[-=]+>")
_NUMBER = re.compile(r"[0-9]{1,10},?", re.ASCII)
_FRAME = re.compile(r"[^A-Za-z0-9_. ]+")


class Kind(enum.Enum):
    """What a piece looks like on its own."""

    FIELD = "field"
    NAME = "name"
    SET_ZERO = "set_zero"
    LABEL_IN = "label of an edge into an operator"
    LABEL_OUT = "label of an edge out of an operator"
    ARROW = "arrow"
    NUMBER = "number"
    WORD = "word"


class Use(str, enum.Enum):
    """What became of a piece."""

    OPEN = "open"
    NODE = "node"
    PORT = "port"
    REPAIR = "repair"
    SKIPPED = "skipped"


class Box(NamedTuple):
    """The bounds of a box as they stand in the text; damage can make one list shorter than the other."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether the box holds nothing, and so settles nothing."""
        return any(hi <= lo for lo, hi in zip(self.lo, self.hi, strict=False))


@dataclass(slots=True, eq=False)
class Piece:
    """A run of characters of one line, with what it says."""

    kind: Kind
    line: int
    column: int
    text: str
    key: str = ""
    """Of a field: its name as the format spells it."""
    body: str = ""
    """The part that says something: the name, the port, the value of the field."""
    box: Box | None = None
    numbers: tuple[int, ...] = ()
    use: Use = Use.OPEN


@dataclass(slots=True)
class Notebook:
    """The notes of one reading, and what became of each piece."""

    notes: list[Note] = field(default_factory=list)

    def repair(self, piece: Piece, before: str, after: str, why: str) -> None:
        """Note that a piece was damaged, and what proves the text that it stands for."""
        piece.use = Use.REPAIR
        self.notes.append(Note(NoteKind.REPAIR, why, piece.line, before, after))

    def skip(self, piece: Piece, why: str) -> None:
        """Note that a piece is no part of the document."""
        self.skip_all([piece], why)

    def skip_all(self, pieces: list[Piece], why: str) -> None:
        """Note that pieces of one line are no part of the document."""
        for piece in pieces:
            piece.use = Use.SKIPPED
        text = " ".join(piece.text for piece in pieces)
        self.notes.append(Note(NoteKind.SKIPPED, why, pieces[0].line, text))

    def assume(self, text: str, line: int | None = None, before: str = "", after: str = "") -> None:
        """Note something that the text does not say."""
        self.notes.append(Note(NoteKind.ASSUMPTION, text, line, before, after))


def scan(text: str, book: Notebook) -> list[Piece]:
    """The pieces of a text in reading order; boxes and dimensions are parsed, names are not yet looked at."""
    pieces: list[Piece] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line and not line.isspace():
            pieces += _line(line, number, book)
    return pieces


def _line(line: str, number: int, book: Notebook) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0
    for match in _FIELD.finditer(line):
        piece = _field(match, number, book)
        if piece is not None:
            pieces += _gap(line, start, match.start(), number)
            pieces.append(piece)
            start = match.end()
    return pieces + _gap(line, start, len(line), number)


def _field(match: re.Match[str], line: int, book: Notebook) -> Piece | None:
    raw, value = match["key"], match["value"]
    plain = re.sub(r"[_ ]+", "_", raw)
    key = plain if plain in DIM_KEYS or plain in BOX_KEYS else nearest(plain, (*DIM_KEYS, *BOX_KEYS), 2)
    is_box = value.startswith("Rect")
    if is_box and key not in BOX_KEYS:
        raise FormatError(
            f"{shorten(raw)} is no box of a node", expected=f"one of {', '.join(BOX_KEYS)}", line=line
        )
    if key is None or (key in BOX_KEYS) != (is_box or value == "None"):
        return None
    if key in DIM_KEYS and not value.endswith("]") and not any(c in "0123456789" for c in value):
        return Piece(Kind.WORD, line, match.start(), match[0].rstrip())
    piece = Piece(Kind.FIELD, line, match.start(), match[0], key, value)
    if key != raw:
        book.repair(piece, raw, key, "the name of the field: no other is as near")
    if is_box:
        piece.box = _box(piece, book)
    elif key in DIM_KEYS:
        piece.numbers = _dimensions(piece)
    return piece


def _box(piece: Piece, book: Notebook) -> Box:
    inner = piece.body[len("Rect(") : -1]
    first = _ARRAY.match(inner)
    second = _ARRAY.fullmatch(inner, inner.find(",", first.end()) + 1) if first else None
    if first is None or second is None or inner[first.end() :].find(",") != 0:
        raise FormatError(f"a damaged box {shorten(piece.body)}", expected=_BOX_TEXT, line=piece.line)
    bounds = []
    for array in (first, second):
        words = (array[1], array[3], array[4])
        if words != ("array", "dtype", "int32"):
            for word, right in zip(words, ("array", "dtype", "int32"), strict=True):
                if nearest(word, (right,), 1) is None:
                    raise FormatError(f"{shorten(word)} in a box", expected=_BOX_TEXT, line=piece.line)
            book.repair(piece, " ".join(words), "array dtype int32", "every box is written with these words")
        bounds.append(_bounds(piece, array[2], book))
    box = Box(*bounds)
    if any(hi < lo for lo, hi in zip(box.lo, box.hi, strict=False)):
        raise FormatError(
            f"{piece.key} ends before it starts", expected="lower bounds first, then upper", line=piece.line
        )
    return box


def _bounds(piece: Piece, text: str, book: Notebook) -> tuple[int, ...]:
    if not text.strip():
        return ()
    parts = text.split(",")
    digits = [digits_of(part.strip()) for part in parts]
    numbers = tuple(whole(d, piece.line, "bound of a box") for d in digits)
    if max(numbers) > _INT32:
        raise FormatError(
            f"the bound {max(numbers)}", expected="at most 2^31 - 1, the largest int32", line=piece.line
        )
    clean = ", ".join(map(str, numbers))
    if any(d != part.strip() for d, part in zip(digits, parts, strict=True)):
        book.repair(
            piece, text.strip(), clean, "an array of int32 holds digits only: letters stand for digits"
        )
    elif any(not part.startswith(" ") for part in parts[1:]):
        book.repair(piece, text.strip(), clean, "blanks got lost; the commas keep the numbers apart")
    return numbers


def _dimensions(piece: Piece) -> tuple[int, ...]:
    words = piece.body.strip("[]").replace(",", " ").split()
    numbers = tuple(whole(digits_of(word), piece.line, "dimension") for word in words)
    if numbers and max(numbers) > 10**18:
        raise FormatError(f"the dimension {max(numbers)}", expected="at most 10^18", line=piece.line)
    return numbers


def _gap(line: str, start: int, end: int, number: int) -> list[Piece]:
    """The pieces of the part of a line that holds no fields."""
    text = line[start:end]
    if _BOX_LEFT.search(text):
        raise FormatError(
            f"a box that is cut off or damaged: {shorten(text.strip())}", expected=_BOX_TEXT, line=number
        )
    pieces: list[Piece] = []
    words = [(m.start(), m.end()) for m in _WORD.finditer(text)]
    ends = [end for _, end in words]
    done = 0
    for match in _SET_ZERO.finditer(text):
        first = bisect_right(ends, match.start())
        last = bisect_left(ends, match.start() + len(match[0].rstrip()))
        if first > done and _torn(text, words[first - 1], words[first], match.start()):
            first -= 1
        if first < done:
            continue
        pieces += [_word(text[a:b], number, start + a) for a, b in words[done:first]]
        whole_text = text[words[first][0] : words[last][1]]
        body = _FRAME.sub("", text[words[first][0] : match.start()]).rstrip(". ")
        pieces.append(Piece(Kind.SET_ZERO, number, start + words[first][0], whole_text, body=body))
        done = last + 1
    return pieces + [_word(text[a:b], number, start + a) for a, b in words[done:]]


def _torn(text: str, before: tuple[int, int], word: tuple[int, int], end: int) -> bool:
    """Whether a blank got into the name before ``grad.set_zero``: names have dots, frames start with <."""
    name = text[word[0] : end].rstrip(". ")
    return "." not in name and not name.startswith("<") and "." in text[before[0] : before[1]]


def _word(text: str, line: int, column: int) -> Piece:
    if len(text) <= _LONGEST_NAME and _NAME.fullmatch(text):
        return Piece(Kind.NAME, line, column, text, body=text)
    for kind, pattern in ((Kind.LABEL_IN, _LABEL_IN), (Kind.LABEL_OUT, _LABEL_OUT)):
        match = pattern.fullmatch(text)
        if match:
            return Piece(kind, line, column, text, body=match["port"])
    if _ARROW.fullmatch(text):
        return Piece(Kind.ARROW, line, column, text)
    if _NUMBER.fullmatch(text):
        return Piece(Kind.NUMBER, line, column, text, body=text.rstrip(","))
    if len(text) <= _LONGEST_NAME and _TORN.fullmatch(text):
        return Piece(Kind.NAME, line, column, text, body=text)
    return Piece(Kind.WORD, line, column, text, body=text)
