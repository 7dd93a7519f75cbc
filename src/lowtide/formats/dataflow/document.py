"""Data-flow pictures of a distributed training step, as character recognition gives them back.

Operators and variables are frames with a name and fields below it; every node says which box of its tensor
this device holds. Labels of the edges stand between them; the arrows are lost:

    L1.W                                   a variable: dim, what is read here, what is written here
    dim=[64 1 164 7 727 27]                (blanks got lost; the boxes settle the dimensions)
    read_rect=Rect(array([0, …], dtype=int32), array([64, 1, 1, 64, 7, 7, 27, 27], dtype=int32))
    write_rect=None
    ->filters                              the label of an edge into the operator below
    Ll.filter                              an operator (and Ll is L1): result_dim, dist_input, …

What can be proved is repaired and noted, what is noise is noted, and what cannot be proved is an error.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lowtide.cost import NoteKind, Step
from lowtide.errors import FormatError, GraphError
from lowtide.formats.base import Format
from lowtide.formats.dataflow.build import Parts, build
from lowtide.formats.dataflow.edges import (
    Edge,
    Picture,
    backward_edges,
    forward_edges,
    kind_of,
    update_edges,
)
from lowtide.formats.dataflow.labels import attach_labels, restore_zeros, skip_rest
from lowtide.formats.dataflow.layout import attach_fields
from lowtide.formats.dataflow.names import GRAD, OUTPUT, UPDATE, Node, find_nodes, is_output
from lowtide.formats.dataflow.repair import (
    check_operators,
    check_variables,
    complete_boxes,
    result_dim,
    settle_updates,
    shape_of,
)
from lowtide.formats.dataflow.scan import Kind, Notebook, Piece, scan
from lowtide.formats.dataflow.words import Spelling
from lowtide.formats.dataflow.zero import SET_ZERO, Zeros, find_zeros
from lowtide.formats.dot.read import recognise_dot
from lowtide.formats.dot.write import write_dot
from lowtide.formats.text import decode
from lowtide.graph import Phase, Role, validate

__all__ = ["FORMAT", "facts", "read", "read_pieces", "recognise"]

_HEAD_BYTES = 1 << 16
_OPERATOR_FIELDS = frozenset({"result_dim", "dist_input", "dist_filters", "dist_weights", "dist_result"})


def recognise(data: bytes) -> bool:
    """Whether the text holds boxes of nodes as these pictures write them."""
    head = data[:_HEAD_BYTES]
    if recognise_dot(head) or head.lstrip()[:1] == b"{":
        return False
    return b"Rect(array([" in head and any(key in head for key in (b"read_rect=", b"write_rect=", b"dist_"))


def read(data: bytes) -> Step:
    """The step of a picture: its graph, and a note for everything repaired, skipped or assumed."""
    return read_pieces(data)[0]


def read_pieces(data: bytes) -> tuple[Step, list[Piece]]:
    """The step, and all pieces of the text with what became of each."""
    book = Notebook()
    text = decode(data)
    pieces = scan(text, book) if "=" in text else []
    if not any(piece.kind is Kind.FIELD for piece in pieces):
        raise FormatError(
            "no node with a box or dimensions", expected="`read_rect=Rect(array([…], …` below a name", line=1
        )
    nodes, spelling = find_nodes(pieces, book)
    attach_fields(pieces, nodes)
    nodes = [node for node in nodes if _has_fields(node, spelling, book)]
    complete_boxes(nodes, pieces, book)
    parts = _parts(nodes, pieces, spelling, book)
    _check_whole(parts, pieces[-1].line)
    graph = build(parts, book)
    skip_rest(pieces, book)
    _assumptions(parts, book)
    try:
        validate(graph)
    except GraphError as error:
        raise FormatError(str(error), expected="a graph that does not contradict itself", line=1) from None
    notes = sorted(book.notes, key=lambda note: (note.line is None, note.line or 0))
    return Step(graph, format="dataflow", notes=tuple(notes)), pieces


def _check_whole(parts: Parts, last: int) -> None:
    """Refuse a text that breaks off: in a training step every parameter has a gradient and an update."""
    gradients = {name for name in parts.picture.variables if name.endswith(GRAD)}
    updated = {edge.tensor for own in parts.updates.values() for edge in own}
    for name in sorted(parts.parameters):
        lost = name + GRAD if name + GRAD not in gradients else f"the update of {name}"
        if name + GRAD not in gradients or name not in updated:
            raise FormatError(
                f"the text does not hold {lost}: it breaks off, or a node is lost",
                expected="a gradient and an update for every parameter",
                line=last,
            )


def _has_fields(node: Node, spelling: Spelling, book: Notebook) -> bool:
    if node.fields:
        return True
    if spelling.whole(node.name.removeprefix(UPDATE)):
        raise FormatError(
            f"nothing is said about {node.name}",
            expected="its dimensions or boxes below the name",
            line=node.line,
        )
    book.skip(node.piece, "a name that the document knows nothing about")
    return False


def _parts(nodes: list[Node], pieces: list[Piece], spelling: Spelling, book: Notebook) -> Parts:
    ranks = {len(p.box.lo) for node in nodes for p in node.fields.values() if p.box is not None}
    picture = _picture(nodes)
    shapes = {name: shape_of(node, ranks, book) for name, node in picture.variables.items()}
    check_variables(picture, shapes)
    parameters = _parameters(picture)
    updates = [node for name, node in picture.operators.items() if name.startswith(UPDATE)]
    targets = settle_updates(updates, {name: shapes[name] for name in shapes if name in parameters}, book)
    picture.operators = {node.name: node for node in picture.operators.values()}
    results = _results(picture, ranks, book)
    forward = forward_edges(picture, pieces)
    backward = backward_edges(picture, forward)
    changes = update_edges(picture, targets)
    edges = [edge for phase in (forward, backward, changes) for own in phase.values() for edge in own]
    check_operators(picture, edges, shapes, results)
    zeros = _zeros(picture, backward)
    find_zeros(pieces, zeros, spelling, book)
    edges += [_clear(name, piece, picture) for name, piece in zeros.found.items()]
    attach_labels(pieces, edges, book)
    restored = restore_zeros(pieces, zeros, book)
    _unlabelled(edges, book)
    return Parts(
        picture=picture,
        shapes=shapes,
        results=results,
        parameters=parameters,
        forward=forward,
        backward=backward,
        updates=changes,
        zeros=zeros.found | restored,
        restored=set(restored),
    )


def _picture(nodes: list[Node]) -> Picture:
    known = {node.name: node for node in nodes}
    owners = {node.prefix for node in nodes if is_output(node.part) or node.part == "probability"}
    picture = Picture({}, {})
    for node in nodes:
        base = node.name.removesuffix(GRAD)
        fields = known.get(base, node).fields.keys()
        is_operator = not fields.isdisjoint(_OPERATOR_FIELDS) or ("dim" not in fields and base in owners)
        if is_operator or node.name.startswith(UPDATE):
            picture.operators[node.name] = node
        else:
            picture.variables[node.name] = node
    for name, node in picture.variables.items():
        if name.endswith(GRAD) and name.removesuffix(GRAD) not in picture.variables:
            raise FormatError(
                f"{name} is the gradient of no variable of the text",
                expected=f"a variable {name.removesuffix(GRAD)}",
                line=node.line,
            )
    return picture


def _parameters(picture: Picture) -> set[str]:
    """Variables that no operator writes, which the text says as ``write_rect=None``."""
    leaves = set()
    for name, node in picture.variables.items():
        if name.endswith(GRAD) or node.prefix in picture.operators:
            continue
        written = node.fields.get("write_rect")
        if written is None or written.box is not None:
            raise FormatError(
                f"no operator of the text writes {name}",
                expected=f"`write_rect=None`, or an operator {node.prefix or 'of that name'}",
                line=node.line,
            )
        leaves.add(name)
    return leaves


def _results(picture: Picture, ranks: set[int], book: Notebook) -> dict[str, tuple[int, ...]]:
    results: dict[str, tuple[int, ...]] = {}
    for node in sorted(picture.operators.values(), key=lambda n: (n.name.endswith(GRAD), n.place)):
        shape = result_dim(node, results, ranks, book)
        if shape is not None:
            results[node.name] = shape
    return results


def _zeros(picture: Picture, backward: dict[str, list[Edge]]) -> Zeros:
    writers: dict[str, Node] = {}
    for name, own in backward.items():
        for edge in own:
            if not edge.into:
                writers.setdefault(edge.tensor, picture.operators[name])
    gradients = {name: node for name, node in picture.variables.items() if name.endswith(GRAD)}
    return Zeros(gradients, writers)


def _clear(gradient: str, frame: Piece, picture: Picture) -> Edge:
    low, high = sorted((frame.line, picture.variables[gradient].line))
    return Edge(gradient + SET_ZERO, gradient, OUTPUT, False, frame.line, low, high)


def _unlabelled(edges: list[Edge], book: Notebook) -> None:
    """Note the edges that rest on names alone."""
    for edge in edges:
        if edge.drawn and edge.label is None:
            way = f"->{edge.port} from {edge.tensor}" if edge.into else f"{edge.port}-> to {edge.tensor}"
            book.assume(f"no label is left of an edge of {edge.op}; it rests on the names: {way}", edge.line)


def _assumptions(parts: Parts, book: Notebook) -> None:
    book.assume(
        "values are float32, 4 bytes each: the text does not say (int32 there is the type of the bounds)"
    )
    book.assume(
        "the arrows are lost: which variable an edge joins to which operator follows from names (X.output is "
        "written by X, X.grad reads X.output.grad and writes the gradients of what X reads), from the "
        "ports, and, for the input of a forward operator, from the nearest output above it"
    )
    book.assume(
        "the picture gives no full order: forward operators run as drawn from top to bottom, gradients from "
        "the loss back, each set_zero right before the operator that first touches its gradient, updates last"
    )
    for name, node in parts.picture.variables.items():
        if name.endswith(GRAD) and name not in parts.zeros:
            book.assume(f"no set_zero of {name} is left: it is taken as written, not accumulated", node.line)
    for node in (*parts.picture.variables.values(), *parts.picture.operators.values()):
        lost = [key for key in _usual_fields(node) if key not in node.fields]
        if lost:
            book.assume(f"{node.name} has no {' and no '.join(lost)} in the text", node.line)


def _usual_fields(node: Node) -> tuple[str, ...]:
    """The fields that a node has when nothing got lost, dimensions of variables aside."""
    if node.fields.keys().isdisjoint(_OPERATOR_FIELDS):
        return ("read_rect", "write_rect")
    if kind_of(node.name).removesuffix(GRAD) == "filter":
        return ("result_dim", "dist_input", "dist_filters", "dist_result")
    return ("result_dim", "dist_result")


def facts(step: Step) -> dict[str, Any]:
    """Counts of the picture, and every repair and every piece of noise with its line."""
    notes = {kind: [note for note in step.notes if note.kind is kind] for kind in NoteKind}
    roles = Counter(tensor.role for tensor in step.graph.tensors)
    kinds = Counter(op.kind for op in step.graph.ops)
    phases = Counter(op.phase for op in step.graph.ops)
    return {
        "variables": len(step.graph.tensors),
        "operators": len(step.graph.ops),
        "parameters": roles[Role.PARAMETER],
        "inputs": roles[Role.INPUT],
        "gradients": roles[Role.GRADIENT],
        "forward": phases[Phase.FORWARD],
        "backward": phases[Phase.BACKWARD] - kinds["set_zero"],
        "set_zero": kinds["set_zero"],
        "set_zero_restored": [op.id for op in step.graph.ops if "restored_from" in op.attributes],
        "updates": kinds["update"],
        "repairs": [
            {"line": n.line, "before": n.before, "after": n.after, "why": n.text}
            for n in notes[NoteKind.REPAIR]
        ],
        "skipped": [{"line": n.line, "text": n.before, "why": n.text} for n in notes[NoteKind.SKIPPED]],
        "assumptions": [{"line": n.line, "text": n.text} for n in notes[NoteKind.ASSUMPTION]],
    }


FORMAT = Format(
    name="dataflow",
    title="data-flow picture of a distributed step, recovered text",
    recognise=recognise,
    read=read,
    write=write_dot,
    facts=facts,
)
