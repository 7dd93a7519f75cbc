"""What moves between devices in the step of one of them: of which tensor, for which operator, how many bytes.

The nodes of forward that a device runs say which operator of the whole step they belong to, and what they
move. ``marked`` writes that where it passes through tracing to backward; ``moved_parts`` reads it from the
captured step, and ``unmarked`` leaves what the user has written there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
from torch import fx, nn

from lowtide.graph import Graph, Op
from lowtide.trace.distributed.exchange import ADD_UP, EXCHANGE
from lowtide.trace.shards.local import MOVED, NUMBER
from lowtide.trace.step.joint import Joint

__all__ = ["MovedPart", "marked", "moved_parts", "unmarked"]

_OPERATOR, _TENSOR, _HOW = "lowtide.operator", "lowtide.tensor", "lowtide.how"
_MARKS = (_OPERATOR, _TENSOR, _HOW)


@dataclass(frozen=True, slots=True)
class MovedPart:
    """One communication of a device."""

    tensor: int
    """Of the whole step; -1 where that is not known."""
    operator: int
    """For which operator of the whole step; -1 for gradients that are added up behind backward."""
    how: str
    """``halo``, ``gather``, ``sum`` or ``scattered sum``; in backward, of the gradient."""
    phase: str
    axis: int
    dim: int
    """Along which the tensor is cut; -1 for a sum."""
    bytes: int
    """What the device sends."""
    at: int = -1
    """Which operator of the device does it; -1 where none of them does."""


def marked(graph: fx.Graph, step: Graph) -> None:
    """Have nodes say where in the user's code they come from, and what they move."""
    for node in graph.nodes:
        number = node.meta.get(NUMBER)
        if number is None:
            continue
        op = step.ops[number]
        told = op.attributes.get("annotation")
        custom = {**told} if isinstance(told, dict) else {}
        custom[_OPERATOR] = str(number)
        if MOVED in node.meta:
            t, how = node.meta[MOVED]
            custom |= {_TENSOR: str(t), _HOW: how}
        node.meta["custom"] = custom
        if op.source is not None:
            node.meta["stack_trace"] = f'File "{op.source.file}", line {op.source.line}, in step'
        if op.name:
            node.meta["nn_module_stack"] = {op.name: (op.name, nn.Module)}


def moved_parts(joint: Joint, sizes: Sequence[int]) -> Iterator[MovedPart]:
    """The communications of a captured step, in order; ``sizes`` are those of the mesh."""
    for k, op in enumerate(joint.graph.ops):
        sent = _sent(joint, k, sizes)
        if sent:
            marks = op.attributes.get("annotation")
            marks = marks if isinstance(marks, dict) else {}
            call = joint.calls[k]
            axis = int(str(call.args[-1]).rpartition(" ")[2])
            dim = int(call.args[1]) if call.target is EXCHANGE else -1
            yield MovedPart(
                int(marks.get(_TENSOR, -1)),
                int(marks.get(_OPERATOR, -1)),
                str(marks.get(_HOW, "sum" if dim < 0 else "halo")),
                op.phase.value,
                axis,
                dim,
                sent,
                k,
            )


def unmarked(joint: Joint) -> Joint:
    """The step with nothing but the user's own annotations."""
    ops = tuple(_without(op) for op in joint.graph.ops)
    return replace(joint, graph=msgspec.structs.replace(joint.graph, ops=ops))


def _without(op: Op) -> Op:
    told = op.attributes.get("annotation")
    if not isinstance(told, dict) or not any(mark in told for mark in _MARKS):
        return op
    own = {key: value for key, value in told.items() if key not in _MARKS}
    rest = {key: value for key, value in op.attributes.items() if key != "annotation"}
    return msgspec.structs.replace(op, attributes={**rest, "annotation": own} if own else rest)


def _sent(joint: Joint, k: int, sizes: Sequence[int]) -> int:
    """Bytes that an operator sends to others."""
    call, op = joint.calls[k], joint.graph.ops[k]
    if call.target is ADD_UP:
        return joint.graph.tensors[op.outputs[0]].bytes
    if call.target is not EXCHANGE:
        return 0
    x = joint.values[op.inputs[0]]
    dim, sends, wire = call.args[1], call.args[2], call.args[6]
    axis = int(str(wire).rpartition(" ")[2])
    rank = int(str(wire).split(",")[0].rpartition(" ")[2])
    mine = rank // math.prod(sizes[axis + 1 :]) % sizes[axis]
    pieces = [sends[i : i + 3] for i in range(0, len(sends), 3)]
    moved = sum(hi - lo for to, lo, hi in pieces if to != mine)
    return int(moved * (x.numel() // max(1, x.shape[dim])) * x.element_size())
