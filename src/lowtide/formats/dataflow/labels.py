"""The labels of a data-flow picture, given to the edges that they were drawn on.

A label stands between the lines of its operator and its variable; of several edges the one that ends first
has it, which leaves the most labels with an edge.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.formats.dataflow.edges import Edge
from lowtide.formats.dataflow.names import OUTPUT
from lowtide.formats.dataflow.scan import Kind, Notebook, Piece, Use
from lowtide.formats.dataflow.words import nearest
from lowtide.formats.dataflow.zero import SET_ZERO, Zeros

__all__ = ["attach_labels", "restore_zeros", "skip_rest"]

_LABELS = (Kind.LABEL_IN, Kind.LABEL_OUT)
_MAX_DAMAGED = 200
_NEAREST = "the nearest port of the edges drawn across this line"


class _Free:
    """The edges that have no label yet, by direction and port."""

    def __init__(self, edges: Iterable[Edge]) -> None:
        self._edges: dict[tuple[bool, str], list[Edge]] = {}
        for edge in sorted(edges, key=lambda e: (e.last, -e.first)):
            if edge.drawn and edge.label is None:
                self._edges.setdefault((edge.into, edge.port), []).append(edge)

    def ports(self, line: int, into: bool) -> list[str]:
        """Ports of edges drawn across this line."""
        return [
            port
            for (way, port), edges in self._edges.items()
            if way is into and any(e.first <= line <= e.last for e in edges)
        ]

    def take(self, piece: Piece, into: bool, port: str) -> bool:
        """Give the label to the edge of this port that is drawn across its line and ends first."""
        edges = self._edges.get((into, port), [])
        for k, edge in enumerate(edges):
            if edge.first <= piece.line <= edge.last:
                edge.label = piece
                del edges[k]
                return True
        return False


def attach_labels(pieces: list[Piece], edges: list[Edge], book: Notebook) -> None:
    """Give every label that can be read to an edge; damaged ones to the only port that is near enough."""
    free = _Free(edges)
    labels = [piece for piece in pieces if piece.kind in _LABELS and piece.use is Use.OPEN]
    for piece in labels:
        into = piece.kind is Kind.LABEL_IN
        if free.take(piece, into, piece.body):
            _attached(piece, into, piece.body, "arrows are drawn whole", book)
    damaged = [piece for piece in labels if piece.use is Use.OPEN][:_MAX_DAMAGED]
    for piece in damaged:
        into = piece.kind is Kind.LABEL_IN
        ports = [port for port in free.ports(piece.line, into) if len(port) > 2]
        port = nearest(piece.body, ports, max(1, len(piece.body) // 4))
        if port is not None and free.take(piece, into, port):
            _attached(piece, into, port, _NEAREST, book)
    _attach_fragments(pieces, free, book)


def _attached(piece: Piece, into: bool, port: str, why: str, book: Notebook) -> None:
    piece.use = Use.PORT
    text = f"->{port}" if into else f"{port}->"
    if piece.text != text:
        book.repair(piece, piece.text, text, why)


def _attach_fragments(pieces: list[Piece], free: _Free, book: Notebook) -> None:
    """Words between labels: a port without its arrow, or two labels printed over each other."""
    labelled = {piece.line for piece in pieces if piece.kind in _LABELS and piece.use is not Use.OPEN}
    words = [
        (before, piece)
        for before, piece in zip([None, *pieces], pieces, strict=False)
        if piece.kind is Kind.WORD
        and piece.use is Use.OPEN
        and piece.line in labelled
        and len(piece.text) >= 6
    ]
    for before, piece in words[:_MAX_DAMAGED]:
        ports = free.ports(piece.line, True)
        if (
            before is not None
            and before.line == piece.line
            and _attach_pair(before, piece, ports, free, book)
        ):
            continue
        arrows = {f"->{port}": port for port in ports}
        found = nearest(piece.text, arrows, len(piece.text) // 4)
        if found is not None and free.take(piece, True, arrows[found]):
            _attached(piece, True, arrows[found], _NEAREST, book)


def _attach_pair(before: Piece, piece: Piece, ports: list[str], free: _Free, book: Notebook) -> bool:
    """Two labels printed over each other: the first is cut short, the second starts with its end."""
    if before.kind is not Kind.LABEL_IN or before.use is not Use.OPEN:
        return False
    pairs = {a + b: (a, b) for a in ports for b in ports if a != b and a.startswith(before.body)}
    joined = before.body + piece.text
    found = nearest(joined, pairs, len(joined) // 4)
    if found is None:
        return False
    first, second = pairs[found]
    if not (free.take(before, True, first) and free.take(piece, True, second)):
        return False
    why = "two labels printed over each other; no other two ports of edges drawn here are as near"
    book.repair(before, f"{before.text} {piece.text}", f"->{first} ->{second}", why)
    piece.use = Use.REPAIR
    return True


def restore_zeros(pieces: list[Piece], zeros: Zeros, book: Notebook) -> dict[str, Piece]:
    """Set_zero operators of which only the label of their edge is left, by the gradient that they clear.

    A label ``output->`` that fits no edge, below an operator one of whose gradients lacks a set_zero, can
    only have come from that one; the same for two of each.
    """
    restored: dict[str, Piece] = {}
    loose = [p for p in pieces if p.kind is Kind.LABEL_OUT and p.use is Use.OPEN and p.body == OUTPUT]
    lacking: dict[str, list[str]] = {}
    for name in zeros.lacking():
        if name in zeros.writers:
            lacking.setdefault(zeros.writers[name].name, []).append(name)
    for op, names in lacking.items():
        first = zeros.writers[names[0]].line
        last = min(zeros.gradients[name].line for name in names)
        here = [piece for piece in loose if first <= piece.line <= last and piece.use is Use.OPEN]
        if len(here) < len(names):
            continue
        for name, piece in zip(names, here, strict=False):
            restored[name] = piece
            why = (
                f"of {name}{SET_ZERO} only the label of its edge is left: no other edge across this line "
                f"lacks one, and of what {op} computes {', '.join(names)} lacked a set_zero"
            )
            book.repair(piece, piece.text, name + SET_ZERO, why)
    return restored


def skip_rest(pieces: list[Piece], book: Notebook) -> None:
    """Note everything that became part of nothing; words of noise side by side together."""
    reasons = {
        Kind.LABEL_IN: "a label that no edge of the document has",
        Kind.LABEL_OUT: "a label that no edge of the document has",
        Kind.ARROW: "an arrow whose port is not left",
    }
    noise: list[Piece] = []
    for piece in pieces:
        if noise and (piece.use is not Use.OPEN or piece.kind in reasons or piece.line != noise[0].line):
            book.skip_all(noise, "no part of the document")
            noise = []
        if piece.use is Use.OPEN and piece.kind in reasons:
            book.skip_all([piece], reasons[piece.kind])
        elif piece.use is Use.OPEN:
            noise.append(piece)
    if noise:
        book.skip_all(noise, "no part of the document")
