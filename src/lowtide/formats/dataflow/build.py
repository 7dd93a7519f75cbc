"""From nodes, edges and boxes of a data-flow picture to a graph in an order in which it can run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lowtide.errors import FormatError
from lowtide.formats.dataflow.edges import ACCUMULATE, Edge, Picture, kind_of
from lowtide.formats.dataflow.names import GRAD, OUTPUT, Node
from lowtide.formats.dataflow.repair import FLOAT32, boxes_of
from lowtide.formats.dataflow.scan import Notebook, Piece
from lowtide.formats.dataflow.zero import SET_ZERO
from lowtide.graph import Graph, Op, Phase, Role, Tensor

__all__ = ["Parts", "build"]

_Shape = tuple[int, ...]


@dataclass(slots=True)
class Parts:
    """Everything that the text of a picture turned out to hold."""

    picture: Picture
    shapes: dict[str, _Shape]
    """Of variables by name."""
    results: dict[str, _Shape]
    """Of operators by name, where the text gives them."""
    parameters: set[str]
    forward: dict[str, list[Edge]]
    backward: dict[str, list[Edge]]
    updates: dict[str, list[Edge]]
    zeros: dict[str, Piece]
    """By the gradient that is cleared: the piece that says so."""
    restored: set[str]
    """Gradients whose set_zero left only the label of its edge."""


def build(parts: Parts, book: Notebook) -> Graph:
    """The graph: forward as drawn from top to bottom, then backward, then the updates."""
    tensors = _tensors(parts)
    position = {tensor.id: k for k, tensor in enumerate(tensors)}
    forward = _sorted(parts.forward, parts.picture)
    backward = _sorted(parts.backward, parts.picture)
    ops = [_op(parts, name, parts.forward[name], position, Phase.FORWARD, book) for name in forward]
    ops += _backward_ops(parts, backward, position, book)
    updates = sorted(parts.updates, key=lambda name: parts.picture.operators[name].place)
    ops += [_op(parts, name, parts.updates[name], position, Phase.UPDATE, book) for name in updates]
    return Graph(tensors=tuple(tensors), ops=tuple(ops))


def _tensors(parts: Parts) -> list[Tensor]:
    position = {name: k for k, name in enumerate(parts.picture.variables)}
    tensors = []
    for name, node in parts.picture.variables.items():
        base = name.removesuffix(GRAD)
        shape = parts.shapes[name]
        tensors.append(
            Tensor(
                id=name,
                name=name,
                bytes=FLOAT32 * math.prod(shape),
                role=_role(node, parts),
                shape=shape,
                dtype="float32",
                gradient_of=position[base] if base != name else None,
                boxes=boxes_of(node),
                attributes={"line": node.line},
            )
        )
    return tensors


def _role(node: Node, parts: Parts) -> Role:
    if node.name.endswith(GRAD):
        return Role.GRADIENT
    if node.name in parts.parameters:
        return Role.PARAMETER
    return Role.INPUT if kind_of(node.prefix) == "data" else Role.ACTIVATION


def _sorted(edges: dict[str, list[Edge]], picture: Picture) -> list[str]:
    """The operators so that each comes after those that write what it reads, otherwise as drawn."""
    writers: dict[str, list[str]] = {}
    for name, own in edges.items():
        for edge in own:
            if not edge.into:
                writers.setdefault(edge.tensor, []).append(name)
    before = {
        name: {w for e in own if e.into for w in writers.get(e.tensor, ())} for name, own in edges.items()
    }
    after: dict[str, list[str]] = {}
    for name, others in before.items():
        for other in others:
            after.setdefault(other, []).append(name)
    waiting = {name: len(others) for name, others in before.items()}
    ready = [(picture.operators[name].place, name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    done: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        done.append(name)
        for other in after.get(name, ()):
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (picture.operators[other].place, other))
    stuck = [name for name in edges if waiting[name]]
    if stuck:
        raise FormatError(
            f"{stuck[0]} waits for its own result",
            expected="operators that can run one after the other",
            line=picture.operators[stuck[0]].line,
        )
    return done


def _backward_ops(parts: Parts, order: list[str], position: dict[str, int], book: Notebook) -> list[Op]:
    """Gradient operators, each after the set_zero of the gradients that it touches first."""
    ops: list[Op] = []
    cleared: set[str] = set()

    def clear(gradients: Iterable[str]) -> None:
        for gradient in gradients:
            if gradient in parts.zeros and gradient not in cleared:
                cleared.add(gradient)
                ops.append(_zero(parts, gradient, position))

    touched = {edge.tensor for own in parts.backward.values() for edge in own}
    clear(gradient for gradient in parts.zeros if gradient not in touched)
    written = set(parts.zeros)
    for name in order:
        own = parts.backward[name]
        clear(edge.tensor for edge in own)
        again = [edge for edge in own if not edge.into and edge.tensor in written]
        node = parts.picture.operators[name]
        more = [parts.picture.edge(node, edge.tensor, ACCUMULATE, True, drawn=False) for edge in again]
        written.update(edge.tensor for edge in own if not edge.into)
        ops.append(_op(parts, name, own + more, position, Phase.BACKWARD, book))
    return ops


def _zero(parts: Parts, gradient: str, position: dict[str, int]) -> Op:
    attributes: dict[str, Any] = {"line": parts.zeros[gradient].line}
    if gradient in parts.restored:
        attributes["restored_from"] = "the label of its edge"
    return Op(
        id=gradient + SET_ZERO,
        name=gradient + SET_ZERO,
        kind="set_zero",
        phase=Phase.BACKWARD,
        outputs=(position[gradient],),
        output_ports=(OUTPUT,),
        attributes=attributes,
    )


def _op(
    parts: Parts, name: str, edges: list[Edge], position: dict[str, int], phase: Phase, book: Notebook
) -> Op:
    node = parts.picture.operators[name]
    inputs = [edge for edge in edges if edge.into]
    outputs = [edge for edge in edges if not edge.into]
    attributes: dict[str, Any] = {"line": node.line}
    if name in parts.results:
        attributes["result_dim"] = list(parts.results[name])
    return Op(
        id=name,
        name=name,
        kind=kind_of(name),
        phase=phase,
        inputs=tuple(position[edge.tensor] for edge in inputs),
        outputs=tuple(position[edge.tensor] for edge in outputs),
        input_ports=tuple(edge.port for edge in inputs),
        output_ports=tuple(edge.port for edge in outputs),
        shape_only=_unread(parts, name, inputs, book),
        boxes=boxes_of(node),
        attributes=attributes,
    )


def _unread(parts: Parts, name: str, inputs: list[Edge], book: Notebook) -> tuple[int, ...]:
    """Inputs whose read_rect is empty: the edge is drawn, but nobody reads the values."""
    unread = []
    for k, edge in enumerate(inputs):
        piece = parts.picture.variables[edge.tensor].fields.get("read_rect")
        if edge.port != ACCUMULATE and piece is not None and piece.box is not None and piece.box.empty:
            unread.append(k)
            book.assume(
                f"{name} has an edge from {edge.tensor}, whose read_rect is empty: it reads no values",
                piece.line,
            )
    return tuple(unread)
