"""From the words of a data-flow picture to the names of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from lowtide.errors import FormatError
from lowtide.formats.dataflow.scan import Kind, Notebook, Piece, Use
from lowtide.formats.dataflow.words import KINDS, Spelling, distance, nearest, swapped

__all__ = ["GRAD", "UPDATE", "Node", "find_nodes", "is_output"]

GRAD = ".grad"
UPDATE = "update_"
OUTPUT = "output"

_MAX_NODES = 1000
_MAX_COMPARISONS = 20_000
_LOOK_ALIKE = "letters and digits look alike: layers, and parts that are words of the format, end in a number"


@dataclass(slots=True, eq=False)
class Node:
    """A named frame of the picture, with the fields that were found to belong to it."""

    name: str
    piece: Piece
    fields: dict[str, Piece] = field(default_factory=dict)
    last_line: int = 0
    """Of the field it got last."""
    rank: int = -1
    """How far down its list of fields it got."""

    @property
    def line(self) -> int:
        """Where the name stands."""
        return self.piece.line

    @property
    def place(self) -> tuple[int, int]:
        """Line and column of the name: reading order."""
        return self.piece.line, self.piece.column

    @property
    def part(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def prefix(self) -> str:
        """The name without its last part."""
        return self.name.rpartition(".")[0]


def is_output(part: str) -> bool:
    """Whether the last part of a name says "output", if with its letters in the wrong order."""
    return part == OUTPUT or part.endswith("_output") or swapped(part, OUTPUT)


def find_nodes(pieces: list[Piece], book: Notebook) -> tuple[list[Node], Spelling]:
    """The nodes in reading order, each named as the rest of the document spells it, and that spelling.

    Names of ``update_`` operators are looked at again when the sizes are known.
    """
    named = [piece for piece in pieces if piece.kind is Kind.NAME]
    if len(named) > _MAX_NODES:
        raise FormatError(
            f"more than {_MAX_NODES} names", expected="a picture of a step", line=named[_MAX_NODES].line
        )
    spelling = Spelling([_split(piece.body)[1] for piece in named])
    right = {piece.body: _spell(piece.body, spelling) for piece in named}
    right |= _mend({name for name in right.values() if not name.startswith(UPDATE)}, right, spelling)
    roots = {name.partition(".")[0] for name in right.values()} & set(KINDS)
    nodes: dict[str, Node] = {}
    for piece in pieces:
        if piece.kind is Kind.WORD and piece.body and spelling.name(piece.body) in roots:
            piece.kind = Kind.NAME
            right[piece.body] = spelling.name(piece.body)
        if piece.kind is Kind.NAME:
            _add(nodes, piece, right[piece.body], spelling, book)
    for node in nodes.values():
        if swapped(node.part, OUTPUT):
            book.assume(
                f"{node.name} keeps its spelling and is taken as the output: letters changed places, "
                "which recognition does not do, so the picture itself has them so",
                node.line,
                node.piece.body,
                node.name,
            )
    return list(nodes.values()), spelling


def _split(raw: str) -> tuple[str, str]:
    """``update_``, if the name starts so or nearly so, and the rest of the name."""
    head, line, rest = raw.partition("_")
    if line and nearest(head, (UPDATE[:-1],), 2) is not None:
        return UPDATE, rest
    return "", raw


def _spell(raw: str, spelling: Spelling) -> str:
    prefix, rest = _split(raw)
    return prefix + spelling.name(rest)


def _add(nodes: dict[str, Node], piece: Piece, name: str, spelling: Spelling, book: Notebook) -> None:
    if spelling.noise(name.removeprefix(UPDATE)) and not name.startswith(UPDATE):
        book.skip(piece, "no part of it is a name of the document")
        return
    if name in nodes:
        book.skip(piece, f"repeats the name of {name} (line {nodes[name].line}) without saying more")
        return
    nodes[name] = Node(name, piece)
    piece.use = Use.NODE
    if name != piece.body and not name.startswith(UPDATE):
        plain = _spell(piece.body, spelling)
        why = (
            _LOOK_ALIKE
            if plain == name
            else "the nearest of the names that the other names ask for and that no other node has"
        )
        book.repair(piece, piece.body, name, why)


def _mend(names: set[str], right: dict[str, str], spelling: Spelling) -> dict[str, str]:
    """For names with parts that stand nowhere else: the nearest of those that the others ask for."""
    whole = {name for name in names if spelling.whole(name)}
    missing = sorted(set(_family(whole)) - names)
    left = _MAX_COMPARISONS
    mended: dict[str, str] = {}
    for raw, name in right.items():
        if name in whole or name.startswith(UPDATE):
            continue
        left -= len(missing)
        if left < 0:
            break
        found = _nearest_missing(name, missing)
        if found and found not in mended.values():
            mended[raw] = found
    return mended


def _family(names: Iterable[str]) -> Iterator[str]:
    """Every name that goes with these: an operator has an output and a gradient, a variable a gradient."""
    for name in names:
        base = name.removesuffix(GRAD)
        yield from (base, base + GRAD)
        owner, _, part = base.rpartition(".")
        if owner and (is_output(part) or part == "probability"):
            yield from (owner, owner + GRAD, f"{owner}.{OUTPUT}", f"{owner}.{OUTPUT}{GRAD}")


def _nearest_missing(name: str, missing: list[str]) -> str | None:
    bound = max(1, len(name) // 6)
    best, found = bound + 1, None
    for choice in missing:
        if any(swapped(a, b) for a, b in zip(name.split("."), choice.split("."), strict=False)):
            continue  # recognition does not swap letters: that is how the picture spells it
        d = distance(name, choice, bound)
        if d < best:
            best, found = d, choice
        elif d == best:
            found = None
    return found if best <= bound else None
