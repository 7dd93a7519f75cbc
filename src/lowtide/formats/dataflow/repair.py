"""Dimensions and boxes of the nodes, repaired where recognition damaged them and the boxes prove it.

Recognition loses blanks: ``dim=[64 1 164 7 727 27]``. The digits in a row are still those of the box that
the node names, ``array([64, 1, 1, 64, 7, 7, 27, 27])``, and the box says where the blanks were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.errors import FormatError
from lowtide.formats.dataflow.edges import Edge, Picture
from lowtide.formats.dataflow.layout import one_digits
from lowtide.formats.dataflow.names import GRAD, UPDATE, Node
from lowtide.formats.dataflow.scan import BOX_KEYS, Box, Kind, Notebook, Piece, Use
from lowtide.formats.dataflow.words import digits_of, distance
from lowtide.formats.text import shorten
from lowtide.graph import MAX_BYTES, Rect

__all__ = [
    "FLOAT32",
    "boxes_of",
    "check_operators",
    "check_variables",
    "complete_boxes",
    "result_dim",
    "settle_updates",
    "shape_of",
]

FLOAT32 = 4
"""Bytes of a value, as assumed: the text does not say."""

_STRAY_LINES = 4
_MAX_DAMAGED = 50
_BOX_PORTS = {
    (True, "input"): "dist_input",
    (True, "filters"): "dist_filters",
    (True, "weights"): "dist_weights",
    (False, "output"): "dist_result",
    (False, "raw_data"): "dist_result",
    (False, "params"): "dist_result",
}
_GRADIENT_BOX_PORTS = {
    (True, "input"): "dist_input",
    (True, "filters"): "dist_filters",
    (True, "weights"): "dist_weights",
    (True, "output.delta"): "read_rect",
    (False, "input.delta"): "write_rect",
}
_Shape = tuple[int, ...]


def boxes_of(node: Node) -> dict[str, Rect | None]:
    """The boxes of a node by name, as the graph holds them."""
    boxes: dict[str, Rect | None] = {}
    for key, piece in node.fields.items():
        if key in BOX_KEYS:
            boxes[key] = None if piece.box is None else Rect(piece.box.lo, piece.box.hi)
    return boxes


def complete_boxes(nodes: Iterable[Node], pieces: list[Piece], book: Notebook) -> None:
    """Repair boxes with fewer upper than lower bounds, or raise a FormatError that names the node."""
    strays = [piece for piece in pieces if piece.kind is Kind.NUMBER]
    for node in nodes:
        for key, piece in node.fields.items():
            if piece.box is not None and len(piece.box.lo) != len(piece.box.hi):
                piece.box = _complete(node, key, piece, strays, book)


def _complete(node: Node, key: str, piece: Piece, strays: list[Piece], book: Notebook) -> Box:
    assert piece.box is not None
    lo, hi = piece.box
    others = {other: p.box for other, p in node.fields.items() if p.box is not None and other != key}
    for other, box in others.items():
        if len(box.hi) != len(lo) or len(box.lo) != len(lo):
            continue
        if one_digits(box.hi) == one_digits(hi):
            book.repair(piece, _row(hi), _row(box.hi), f"commas got lost; {other} of {node.name} has them")
            return Box(lo, box.hi)
        for stray in strays:
            near = piece.line < stray.line <= piece.line + _STRAY_LINES and stray.use is Use.OPEN
            if near and _without_one(box.hi, int(stray.body)) == hi:
                where = f"{other} of {node.name} shows where it belongs"
                why = f"{stray.text!r} fell out to line {stray.line}; {where}"
                book.repair(piece, _row(hi), _row(box.hi), why)
                stray.use = Use.REPAIR
                return Box(lo, box.hi)
    raise FormatError(
        f"{key} of {node.name} has {len(lo)} lower and {len(hi)} upper bounds",
        expected="as many of both, or another box of the node that settles it",
        line=piece.line,
    )


def _without_one(numbers: _Shape, value: int) -> _Shape:
    if value not in numbers:
        return ()
    at = numbers.index(value)
    return numbers[:at] + numbers[at + 1 :]


def _row(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def shape_of(node: Node, ranks: set[int], book: Notebook) -> _Shape:
    """The dimensions of a variable, or a FormatError that names it when nothing settles them.

    ``ranks``: how many dimensions the boxes of the document have, for a variable without a box of its own.
    """
    boxes = [(key, piece.box) for key, piece in node.fields.items() if piece.box is not None]
    boxes = [(key, box) for key, box in boxes if not box.empty]
    dim = node.fields.get("dim")
    if dim is None:
        shape = _shape_without_dim(node, boxes, book)
    else:
        witnesses = [(f"{key} of {node.name}", box) for key, box in boxes]
        shape = _settle(node, dim, witnesses, ranks, book)
    _check_shape(node, shape)
    return shape


def _shape_without_dim(node: Node, boxes: list[tuple[str, Box]], book: Notebook) -> _Shape:
    shapes = {box.hi for _, box in boxes if not any(box.lo)}
    if len(shapes) != 1:
        raise FormatError(
            f"{node.name} has no dimensions, and its boxes do not settle them",
            expected="`dim=[…]`, or a box that is not empty",
            line=node.line,
        )
    shape = shapes.pop()
    keys = " and ".join(key for key, _ in boxes)
    why = f"the dimensions of {node.name} got lost; {keys} settle them"
    book.repair(node.piece, "", f"dim=[{_blank(shape)}]", why)
    return shape


def result_dim(node: Node, shapes: dict[str, _Shape], ranks: set[int], book: Notebook) -> _Shape | None:
    """The result dimensions of an operator, None when it has none, a FormatError when nothing settles them.

    ``shapes``: what is known so far, by name: of operators their result, of variables their dimensions.
    A gradient repeats the dimensions of the operator that it belongs to, whatever it computes itself.
    """
    piece = node.fields.get("result_dim")
    own = node.fields.get("dist_result")
    witnesses = [] if own is None or own.box is None else [(f"dist_result of {node.name}", own.box)]
    if piece is None:
        return None
    base = node.name.removesuffix(GRAD)
    same = shapes.get(base) if base != node.name else None
    if same is not None:
        witnesses.append((f"the operator {base} whose gradient it computes", Box((0,) * len(same), same)))
    shape = _settle(node, piece, witnesses, ranks, book)
    if same not in (None, shape):
        raise FormatError(
            f"{node.name} has {shorten(piece.text)}, but the result of {base} is [{_blank(same or ())}]",
            expected="the dimensions of the operator whose gradient it computes",
            line=piece.line,
        )
    return shape


def _settle(
    node: Node, dim: Piece, witnesses: list[tuple[str, Box]], ranks: set[int], book: Notebook
) -> _Shape:
    """The dimensions that the text gives, as boxes confirm or settle them."""
    numbers = dim.numbers
    clean = digits_of(dim.body) == dim.body and (dim.body.endswith("]") or not dim.body.startswith("["))
    for who, box in witnesses:
        if one_digits(box.hi) == one_digits(numbers) and not any(box.lo):
            if box.hi != numbers or not clean:
                damage = "blanks got lost" if box.hi != numbers else "letters stand for digits"
                why = f"{damage}; {who} settles the dimensions"
                book.repair(dim, dim.body, f"[{_blank(box.hi)}]", why)
            return box.hi
    inside = [w for w in witnesses if _inside(w[1], numbers)]
    if clean and (inside or (not witnesses and len(numbers) in ranks)):
        return numbers
    if not witnesses:
        raise FormatError(
            f"{node.name} has {dim.text}, and no box settles where one number ends and the next begins",
            expected="a box of the node that is not empty",
            line=dim.line,
        )
    raise FormatError(
        f"{node.name} has {shorten(dim.text)}, but {witnesses[0][0]} ends at [{_blank(witnesses[0][1].hi)}]",
        expected="dimensions with the digits of the box, or a box inside them",
        line=dim.line,
    )


def _inside(box: Box, shape: _Shape) -> bool:
    return len(box.hi) == len(shape) and all(hi <= n for hi, n in zip(box.hi, shape, strict=True))


def _blank(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _check_shape(node: Node, shape: _Shape) -> None:
    for key, piece in node.fields.items():
        if piece.box is not None and not _inside(piece.box, shape):
            raise FormatError(
                f"{key} of {node.name} ends at [{_blank(piece.box.hi)}], but its dim is [{_blank(shape)}]",
                expected="a box inside the variable",
                line=piece.line,
            )
    size = FLOAT32
    for n in shape:
        size *= n
        if size > MAX_BYTES:
            raise FormatError(
                f"{node.name} would take more than 2^60 bytes", expected="smaller dimensions", line=node.line
            )


def check_variables(picture: Picture, shapes: dict[str, _Shape]) -> None:
    """Raise a FormatError that names a variable whose dimensions contradict the rest of the document.

    A gradient has the dimensions of its variable. A box can be smaller than the variable, where devices share
    the work; then it is not the only one.
    """
    parts = [name for name, node in picture.variables.items() if _is_part(node, shapes[name])]
    if len(parts) == 1 and len(shapes) > 1:
        raise FormatError(
            f"{parts[0]} is [{_blank(shapes[parts[0]])}], more than its boxes hold, and no other variable is",
            expected="dimensions with the digits of the box",
            line=picture.variables[parts[0]].line,
        )
    for name, node in picture.variables.items():
        base = name.removesuffix(GRAD)
        if shapes[name] != shapes[base]:
            raise FormatError(
                f"{name} is [{_blank(shapes[name])}], but {base} is [{_blank(shapes[base])}]",
                expected="a gradient with the dimensions of its variable",
                line=node.line,
            )


def _is_part(node: Node, shape: _Shape) -> bool:
    boxes = [piece.box for piece in node.fields.values() if piece.box is not None and not piece.box.empty]
    return bool(boxes) and all(box.hi != shape or any(box.lo) for box in boxes)


def check_operators(
    picture: Picture, edges: Iterable[Edge], shapes: dict[str, _Shape], results: dict[str, _Shape]
) -> None:
    """Raise a FormatError that names an operator whose result or boxes do not fit its variables."""
    for edge in edges:
        node, shape = picture.operators[edge.op], shapes[edge.tensor]
        is_gradient = edge.op.endswith(GRAD)
        key = (_GRADIENT_BOX_PORTS if is_gradient else _BOX_PORTS).get((edge.into, edge.port), "")
        if key == "dist_result" and results.get(edge.op, shape) != shape:
            raise FormatError(
                f"{edge.op} has result_dim [{_blank(results[edge.op])}], but {edge.tensor} [{_blank(shape)}]",
                expected="the dimensions of what the operator writes",
                line=node.line,
            )
        piece = node.fields.get(key)
        if piece is not None and piece.box is not None and not _inside(piece.box, shape):
            raise FormatError(
                f"{key} of {edge.op} ends at [{_blank(piece.box.hi)}], but {edge.tensor} [{_blank(shape)}]",
                expected="a box inside the variable",
                line=piece.line,
            )


def settle_updates(nodes: list[Node], shapes: dict[str, _Shape], book: Notebook) -> dict[str, str]:
    """For every update its parameter, by name; damaged names are repaired on the nodes.

    ``shapes``: the dimensions of the parameters. Each parameter has one update, of its own dimensions.
    """
    target = {}
    left = dict(shapes)
    damaged = []
    for node in nodes:
        name = node.name.removeprefix(UPDATE)
        if name in left:
            target[node.name] = name
            del left[name]
            if node.piece.body != node.name:
                why = f"letters and digits that look alike: it updates {name}"
                book.repair(node.piece, node.piece.body, node.name, why)
        else:
            damaged.append(node)
    if len(damaged) > _MAX_DAMAGED:
        raise FormatError(
            f"{len(damaged)} updates of no parameter of the text",
            expected="names of parameters",
            line=damaged[0].line,
        )
    for node in sorted(damaged, key=lambda node: not _near(node, shapes)):
        name = _updated(node, left, _near(node, shapes))
        del left[name]
        _rename_update(node, name, book)
        target[node.name] = name
    return target


def _near(node: Node, names: Iterable[str]) -> list[str]:
    """The parameters that the damaged name of an update can stand for, nearest first."""
    written = node.name.removeprefix(UPDATE)
    far = {name: distance(written, name, len(name) // 2) for name in names}
    return sorted((name for name in far if far[name] <= len(name) // 2), key=lambda name: far[name])


def _updated(node: Node, left: dict[str, _Shape], near: list[str]) -> str:
    """The only parameter left that the update can be of: by name if that tells, and dimensions."""
    dims = _computed(node)
    meant = near or (left if dims is not None else ())
    fitting = [name for name in meant if name in left and dims in (None, left[name])]
    if len(fitting) != 1:
        raise FormatError(
            f"{node.name} updates none of the parameters, or more than one could be meant",
            expected="the name of a parameter, or dimensions that only one of those left has",
            line=node.line,
        )
    return fitting[0]


def _computed(node: Node) -> _Shape | None:
    own = node.fields.get("dist_result")
    return own.box.hi if own is not None and own.box is not None else None


def _rename_update(node: Node, name: str, book: Notebook) -> None:
    dims = _computed(node)
    proof = "no other parameter that it could be is without an update"
    if dims is not None:
        proof = f"its dimensions [{_blank(dims)}] are those of {name}, and {proof}"
    if _near(node, [name]):
        node.name = UPDATE + name
        book.repair(node.piece, node.piece.body, node.name, f"the nearest parameter: {proof}")
        return
    text = f"{node.name} is too far from any name to be damage, so the picture spells it so"
    book.assume(f"{text}; it updates {name}: {proof}", node.line, node.piece.body, node.name)
