"""The step that a tile log is about, untiled: four kinds of tensors and an operator each way."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from lowtide.cost import Note, NoteKind
from lowtide.formats.tilelog.model import Log, Operator
from lowtide.formats.tilelog.script import REFERENCE_IN, REFERENCE_OUT
from lowtide.graph import Graph, Op, Phase, Role, Tensor

__all__ = ["ATTRIBUTE", "graph_of", "notes_of"]

ATTRIBUTE = "tilelog"
"""Where the graph's attributes keep the log."""
_DTYPE = "float32"
_ITEM_BYTES = 4


class _Builder:
    """Tensors and operators, referred to by position."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.device = log.printed(REFERENCE_OUT)[0].device
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []

    def tensor(self, name: str, shape: tuple[int, ...], role: Role, gradient_of: int | None = None) -> int:
        self.tensors.append(
            Tensor(
                id=name,
                bytes=_ITEM_BYTES * math.prod(shape),
                role=role,
                shape=shape,
                dtype=_DTYPE,
                device=self.device,
                gradient_of=gradient_of,
            )
        )
        return len(self.tensors) - 1

    def weight(self, one: Operator) -> int:
        shape = (one.output_shape[1], one.input_shape[1], *self.log.kernel(one.id))
        return self.tensor(f"{one.id}.weight", shape, Role.PARAMETER)

    def attributes(self, one: Operator) -> dict[str, Any]:
        if one.pools:
            across, down = one.window
            return {"kernel": [down, across], "stride": [down, across]}
        left, right, top, bottom = self.log.margin(one.id)
        return {
            "kernel": list(self.log.kernel(one.id)),
            "stride": [1, 1],
            "padding": [[top, bottom], [left, right]],
        }


def graph_of(log: Log) -> Graph:
    """The chain of operators and its backward pass in program order, with the log in the attributes."""
    build = _Builder(log)
    current = build.tensor("input", log.input_shape, Role.INPUT)
    weights = {one.id: build.weight(one) for one in log.operators if not one.pools}
    inputs: dict[int, int] = {}
    for one in log.operators:
        inputs[one.id] = current
        output = build.tensor(f"{one.id}.output", one.output_shape, Role.ACTIVATION)
        build.ops.append(_forward(build, one, current, weights.get(one.id), output))
        current = output
    gradient = build.tensor(
        f"{build.tensors[current].id}.gradient", build.tensors[current].shape or (), Role.GRADIENT, current
    )
    for one in reversed(log.operators):
        gradient = _backward(build, one, inputs[one.id], weights.get(one.id), gradient)
    plain = msgspec.json.decode(msgspec.json.encode(log))
    return Graph(
        tensors=tuple(build.tensors), ops=tuple(build.ops), name="tiled step", attributes={ATTRIBUTE: plain}
    )


def _forward(build: _Builder, one: Operator, current: int, weight: int | None, output: int) -> Op:
    return Op(
        id=str(one.id),
        kind=one.kind,
        phase=Phase.FORWARD,
        inputs=(current,) if weight is None else (current, weight),
        outputs=(output,),
        name=f"{one.kind}{one.id}",
        device=build.device,
        input_ports=("input",) if weight is None else ("input", "weight"),
        output_ports=("output",),
        attributes=build.attributes(one),
    )


def _backward(build: _Builder, one: Operator, source: int, weight: int | None, gradient: int) -> int:
    """Add the backward operator; gives the position of the gradient of the operator's input."""
    before = build.tensors[source]
    result = build.tensor(f"{before.id}.gradient", before.shape or (), Role.GRADIENT, source)
    reads, writes = [gradient, source], [result]
    in_ports, out_ports = ["output.gradient", "input"], ["input.gradient"]
    if weight is not None:
        kernel = build.tensors[weight]
        writes.append(build.tensor(f"{kernel.id}.gradient", kernel.shape or (), Role.GRADIENT, weight))
        reads.append(weight)
        in_ports.append("weight")
        out_ports.append("weight.gradient")
    build.ops.append(
        Op(
            id=f"bk-{one.id}",
            kind=one.kind,
            phase=Phase.BACKWARD,
            inputs=tuple(reads),
            outputs=tuple(writes),
            name=f"bk-{one.kind}{one.id}",
            device=build.device,
            input_ports=tuple(in_ports),
            output_ports=tuple(out_ports),
            attributes=build.attributes(one),
        )
    )
    return result


def notes_of(log: Log, cut: int, line: int | None) -> tuple[Note, ...]:
    """What was assumed, and that ``cut`` lines were put together again, the first of them at ``line``."""
    assumed = (
        "values are float32, 4 bytes each: torch names a type only where it is another one",
        "the backward pass of a convolution reads its input and its weight; there is no bias",
        "the backward pass of a pool reads its input, in which it finds the maxima again",
        "a convolution writes the gradient of its weight too, which the log does not print",
        "the gradient of the last output comes from outside: the loss is the sum of the output",
        "the graph is the untiled step; tiles, records and printed tensors are in its attributes",
    )
    at = log.printed(REFERENCE_IN)[0].line
    notes = [Note(NoteKind.ASSUMPTION, text, at) for text in assumed]
    if cut:
        text = f"{cut} lines cut by messages of the autograd engine are whole again"
        notes.insert(0, Note(NoteKind.REPAIR, text, line))
    return tuple(notes)
