"""Which gradient each ``set_zero`` clears, proved from what is left of its name.

Their frames are narrow and came through badly: ``<:::§§.filter.output.grad.set zeg§:::>``. Four facts settle
them: each gradient has one; a torn name ends as the whole one does; a frame stands above the operator that
accumulates into its gradient, below the operator before that; and frames in one row stand in the order of
their gradients. The last two are used only where the frames with whole names bear them out.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field

from lowtide.formats.dataflow.names import GRAD, Node
from lowtide.formats.dataflow.scan import Kind, Notebook, Piece, Use
from lowtide.formats.dataflow.words import Spelling, distance, nearest

__all__ = ["SET_ZERO", "Zeros", "find_zeros"]

SET_ZERO = ".set_zero"
_MAX_TORN = 64


@dataclass(slots=True)
class Zeros:
    """The gradients of a document and the frames that clear them."""

    gradients: dict[str, Node]
    writers: dict[str, Node]
    """The operator that accumulates into each gradient; none for the one that starts the backward pass."""
    found: dict[str, Piece] = field(default_factory=dict)

    def lacking(self) -> list[str]:
        """Gradients without a set_zero so far, in the order of the document."""
        return [name for name in self.gradients if name not in self.found]

    def keeps_order(self, name: str, piece: Piece) -> bool:
        """Whether the frame stands among those of its row as its gradient among theirs."""
        place = self.gradients[name].place
        return all(
            (place < self.gradients[other].place) == (piece.column < frame.column)
            for other, frame in self.found.items()
            if frame.line == piece.line and other != name
        )


@dataclass(slots=True)
class _Torn:
    """A frame whose name is damaged, and the gradients that it could clear as far as it can be read."""

    frame: Piece
    possible: list[str]
    below: Node | None
    """The next gradient operator, where its place is known to tell."""

    def candidates(self, zeros: Zeros) -> list[str]:
        return [
            name
            for name in self.possible
            if name not in zeros.found and (self.below is None or zeros.writers.get(name) is self.below)
        ]


def find_zeros(pieces: list[Piece], zeros: Zeros, spelling: Spelling, book: Notebook) -> None:
    """Find the gradient of every set_zero of the text; what nothing settles is skipped, with a note."""
    frames = [piece for piece in pieces if piece.kind is Kind.SET_ZERO]
    damaged = [frame for frame in frames if not _whole_name(frame, zeros, spelling, book)]
    for frame in damaged[_MAX_TORN:]:
        book.skip(frame, f"more than {_MAX_TORN} set_zero with damaged names: not looked at")
    damaged = [frame for frame in damaged[:_MAX_TORN] if not _near_name(frame, zeros, spelling, book)]
    witnesses = [
        (frame.line, zeros.writers[name]) for name, frame in zeros.found.items() if name in zeros.writers
    ]
    operators = sorted(set(zeros.writers.values()), key=lambda node: node.place)
    lines = [node.line for node in operators]

    def below(line: int) -> Node | None:
        at = bisect_right(lines, line)
        return operators[at] if at < len(operators) else None

    use_place = len(witnesses) >= 2 and all(writer is below(line) for line, writer in witnesses)
    torn = []
    for frame in damaged:
        possible = [name for name in zeros.lacking() if _ends_alike(frame.body, name.removesuffix(GRAD))]
        torn.append(_Torn(frame, possible, below(frame.line) if use_place else None))
    for one in _resolve(torn, zeros, len(witnesses), book):
        names = ", ".join(one.candidates(zeros)) or "none"
        book.skip(one.frame, f"a set_zero whose gradient could not be proven; left to choose from: {names}")


def _resolve(torn: list[_Torn], zeros: Zeros, witnesses: int, book: Notebook) -> list[_Torn]:
    """Settle one frame after the other, as each one settled leaves less to choose from; return the rest."""
    while torn:
        left = [one for one in torn if not _by_rest(one, zeros, witnesses, book)]
        if len(left) == len(torn):
            left = [one for one in torn if not _by_order(one, zeros, book)]
        if len(left) == len(torn):
            break
        torn = left
    return torn


def _take(frame: Piece, name: str, zeros: Zeros, book: Notebook, why: str) -> bool:
    zeros.found[name] = frame
    frame.use = Use.NODE
    if frame.text != name + SET_ZERO:
        book.repair(frame, frame.text, name + SET_ZERO, why)
    return True


def _whole_name(frame: Piece, zeros: Zeros, spelling: Spelling, book: Notebook) -> bool:
    name = spelling.name(frame.body) + GRAD
    if name not in zeros.gradients:
        return False
    if name in zeros.found:
        book.skip(frame, f"repeats the set_zero of {name}, which line {zeros.found[name].line} has")
        return True
    return _take(
        frame, name, zeros, book, "the name is whole but for blanks, dots and letters that look alike"
    )


def _near_name(frame: Piece, zeros: Zeros, spelling: Spelling, book: Notebook) -> bool:
    written = spelling.name(frame.body)
    if written.startswith(".") or "." not in written:
        return False
    bases = [name.removesuffix(GRAD) for name in zeros.lacking()]
    base = nearest(written, bases, max(1, len(written) // 6))
    if base is None:
        return False
    return _take(frame, base + GRAD, zeros, book, "the nearest gradient that no other set_zero clears")


def _ends_alike(body: str, base: str) -> bool:
    """Whether the rest of a torn name can be the end of this one; a rest without a dot says nothing."""
    if "." not in body:
        return True
    parts = [part for part in body.split(".") if part]
    tail = ".".join(base.split(".")[-len(parts) :])
    bound = len(tail) // 4
    return distance(".".join(parts), tail, bound) <= bound


def _by_rest(one: _Torn, zeros: Zeros, witnesses: int, book: Notebook) -> bool:
    names = one.candidates(zeros)
    if len(names) != 1:
        return False
    why = f"of the gradients without a set_zero only this one can end in what is left, {one.frame.body!r}"
    if one.below is not None:
        why += (
            f", and is accumulated by the next gradient operator, {one.below.name} on line {one.below.line}, "
            f"as are all {witnesses} whose names came through"
        )
    return _take(one.frame, names[0], zeros, book, why)


def _by_order(one: _Torn, zeros: Zeros, book: Notebook) -> bool:
    by_line = sorted(zeros.found.items(), key=lambda item: item[1].line)
    rows = [list(row) for _, row in itertools.groupby(by_line, key=lambda item: item[1].line)]
    rows = [row for row in rows if len(row) > 1]
    if not rows or not all(zeros.keeps_order(name, piece) for row in rows for name, piece in row):
        return False
    beside = [name for name, piece in zeros.found.items() if piece.line == one.frame.line]
    candidates = one.candidates(zeros)
    names = [name for name in candidates if zeros.keeps_order(name, one.frame)]
    if not beside or len(names) != 1:
        return False
    lines = ", ".join(str(row[0][1].line) for row in rows)
    why = (
        f"one of {', '.join(candidates)}; it stands beside the set_zero of {', '.join(beside)}, and the "
        f"frames of a row stand in the order of their gradients (as on lines {lines}), which leaves this one"
    )
    return _take(one.frame, names[0], zeros, book, why)
