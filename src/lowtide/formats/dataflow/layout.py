"""Which field belongs to which node, from where they stand.

Recognition reads a row of frames line by line, so frames side by side share lines:

    A            B            names, left to right
    dim=[…]      dim=[…]      a field stands below the name of its node,
    read_rect=…  read_rect=…  a node has at most one field on a line, always in the same order,
    write_rect=… write_rect=… and a row is done before the next but one begins
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import gt

from lowtide.errors import FormatError
from lowtide.formats.dataflow.names import GRAD, UPDATE, Node, is_output
from lowtide.formats.dataflow.scan import BOX_KEYS, DIM_KEYS, Kind, Piece, Use
from lowtide.formats.dataflow.words import KINDS
from lowtide.formats.text import shorten

__all__ = ["attach_fields", "one_digits"]

_RANK = dict.fromkeys(DIM_KEYS, 0) | {key: rank for rank, key in enumerate(BOX_KEYS, 1)}
_OF_VARIABLES = frozenset({"dim"})
_OF_OPERATORS = frozenset({"result_dim", "dist_input", "dist_filters", "dist_weights", "dist_result"})
_WIDEST_ROW = 6
"""Nodes among which fields that got lost are looked for; the ways to do it multiply."""

_Pairs = list[tuple[Piece, Node]]


def attach_fields(pieces: list[Piece], nodes: list[Node]) -> None:
    """Give every field to its node, or raise a FormatError that names the field or the node."""
    lines = sorted({node.line for node in nodes})
    fields = itertools.groupby((p for p in pieces if p.kind is Kind.FIELD), key=lambda p: p.line)
    waiting: list[tuple[Piece, list[Node]]] = []
    by_line = {line: list(group) for line, group in itertools.groupby(nodes, key=lambda n: n.line)}
    seen = 0
    for line, group in fields:
        while seen < len(lines) and lines[seen] < line:
            seen += 1
        open_nodes = [node for row in lines[max(0, seen - 2) : seen] for node in by_line[row]]
        _attach_line(list(group), open_nodes, waiting)
    for piece, candidates in waiting:
        _attach_late(piece, candidates)


def _attach_line(fields: list[Piece], nodes: list[Node], waiting: list[tuple[Piece, list[Node]]]) -> None:
    """Attach the fields of one line: first those where there are as many fields as nodes to take them."""
    groups: dict[str, list[Piece]] = {}
    for piece in fields:
        groups.setdefault(piece.key, []).append(piece)
    while groups:
        takers = {key: [n for n in nodes if _takes(n, group[0])] for key, group in groups.items()}
        key = min(groups, key=lambda k: abs(len(takers[k]) - len(groups[k])))
        group = groups.pop(key)
        pairs = _match(group, takers[key])
        if pairs is None:
            waiting.extend((piece, takers[key]) for piece in group)
            continue
        for piece, node in pairs:
            _give(piece, node)


def _give(piece: Piece, node: Node) -> None:
    node.fields[piece.key] = piece
    node.last_line, node.rank = piece.line, _RANK[piece.key]
    if piece.use is Use.OPEN:
        piece.use = Use.NODE


def _takes(node: Node, piece: Piece) -> bool:
    if node.last_line >= piece.line or node.rank >= _RANK[piece.key]:
        return False
    key = piece.key
    if key in _OF_VARIABLES or (key in ("read_rect", "write_rect") and "dim" in node.fields):
        return not _surely_operator(node.name) and node.fields.keys().isdisjoint(_OF_OPERATORS)
    if key in _OF_OPERATORS:
        return not _surely_variable(node.name) and node.fields.keys() <= _OF_OPERATORS
    return node.fields.keys().isdisjoint(_OF_OPERATORS) and not node.name.startswith(UPDATE)


def _surely_operator(name: str) -> bool:
    part = name.removesuffix(GRAD).rpartition(".")[2]
    return name.startswith(UPDATE) or part.rstrip("0123456789") in KINDS


def _surely_variable(name: str) -> bool:
    part = name.removesuffix(GRAD).rpartition(".")[2]
    return not name.startswith(UPDATE) and (is_output(part) or part == "probability")


def _match(fields: list[Piece], takers: list[Node]) -> _Pairs | None:
    """The fields with their nodes; None when only fields that come further down can tell."""
    if len(fields) > len(takers):
        extra = fields[len(takers)]
        raise FormatError(
            f"{extra.key} that belongs to no node: {shorten(extra.body)}",
            expected="the name of a node without one above it",
            line=extra.line,
        )
    if len(fields) == len(takers) and len({node.line for node in takers}) == 1:
        return list(zip(fields, takers, strict=True))
    ways = [(_worth(way), way) for way in _ways(fields, takers)]
    best = max((worth for worth, _ in ways), default=-1)
    ways = [(worth, way) for worth, way in ways if worth == best]
    if best >= 0 and len(ways) == 1:
        return ways[0][1]
    if fields[0].key in DIM_KEYS and best >= 0:
        return None
    raise FormatError(
        f"{len(fields)} {fields[0].key} for {_some(takers)}, and nothing tells whose",
        expected=f"one {fields[0].key} for each",
        line=fields[0].line,
    )


def _some(nodes: list[Node]) -> str:
    names = [node.name for node in nodes[:_WIDEST_ROW]]
    return ", ".join(names) + (f" and {len(nodes) - len(names)} more" if len(nodes) > len(names) else "")


def _ways(fields: list[Piece], takers: list[Node]) -> Iterator[_Pairs]:
    """Every way to give the fields away that keeps nodes of one line of names in their order."""
    if len(takers) > _WIDEST_ROW:
        return
    for order in itertools.permutations(takers, len(fields)):
        in_order = all(
            a.line != b.line or a.piece.column < b.piece.column for a, b in itertools.combinations(order, 2)
        )
        if in_order:
            yield list(zip(fields, order, strict=True))


def _worth(way: _Pairs) -> int:
    """How well boxes fit dimensions that are known; negative when one cannot fit at all."""
    total = 0
    for piece, node in way:
        known = node.fields.get("dim") or node.fields.get("result_dim")
        if piece.box is None or known is None:
            continue
        if one_digits(known.numbers) == one_digits(piece.box.hi):
            total += 1
        elif not _can_fit(known, piece.box.hi):
            return -1
    return total


def _can_fit(known: Piece, hi: Sequence[int]) -> bool:
    """Whether these dimensions, blanks lost or not, can be of something with a box that ends at ``hi``."""
    numbers = known.numbers
    if known.key == "dim" and len(numbers) == len(hi):
        return not any(map(gt, hi, numbers))
    return len(numbers) <= len(hi) <= len(one_digits(numbers))


def one_digits(numbers: Sequence[int]) -> str:
    """The digits of the numbers without what separates them: what is left when blanks get lost."""
    return "".join(map(str, numbers))


def _attach_late(piece: Piece, candidates: list[Node]) -> None:
    """Give dimensions that could be of several nodes to the first whose box they fit."""
    digits = one_digits(piece.numbers)
    for node in candidates:
        boxes = [p.box for p in node.fields.values() if p.box is not None]
        if piece.key not in node.fields and any(one_digits(box.hi) == digits for box in boxes):
            node.fields[piece.key] = piece
            piece.use = piece.use if piece.use is Use.REPAIR else Use.NODE
            return
    raise FormatError(
        f"{piece.key}={shorten(piece.body)} fits the boxes of none of {_some(candidates)}",
        expected="dimensions that the boxes of a node settle",
        line=piece.line,
    )
