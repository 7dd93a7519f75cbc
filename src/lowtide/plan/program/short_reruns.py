"""Short second runs: what can be joined to one, what that costs, and where a Program has such runs.

run y = batch_norm(x)  again, short          one kernel: reads x and z, writes r
run s = add(y, z)      in place, short
run r = relu(s)        in place, short
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from lowtide.cost import Cost
from lowtide.graph import Graph, Op, Phase
from lowtide.plan.program.instructions import Drop, Instruction, Loop, Program, Run

__all__ = ["JOINED", "short_seconds", "with_joined"]

JOINED = {"aten.relu": "relu", "aten.add": "add"}
"""Operators that can be part of a short run before them, by their kind, and what that is called."""


def short_seconds(graph: Graph, costs: Sequence[Cost]) -> dict[int, float]:
    """Seconds of short second runs by operator; of those that follow one, what they add to it."""
    found: dict[int, float] = {}
    readers = _readers(graph)
    for k, cost in enumerate(costs):
        if not cost.short_seconds:
            continue
        named = {name: float(figure.value) for name, figure in cost.short_seconds.items()}
        found[k] = named[""]
        for chain in _chains(graph, k, readers):
            before, after = (
                ",".join(JOINED[graph.ops[j].kind] for j in part) for part in (chain[:-1], chain)
            )
            if before in named and after in named:
                found[chain[-1]] = max(0.0, named[after] - named[before])
    return found


def with_joined(graph: Graph, program: Program, short: Collection[int]) -> Program:
    """The Program with operators joined to the short run before them, whose result they write over.

    Between the two something may be dropped, nothing else.
    """
    lines: list[Instruction] = []
    before: Instruction | None = None
    ran: set[int] = set()
    for line in program.instructions:
        again = isinstance(line, Run) and line.op in ran
        joined = again and isinstance(line, Run) and line.op in short and _joins(graph, before, line)
        ran |= {line.op} if isinstance(line, Run) else set()
        lines.append(msgspec.structs.replace(line, short=True) if joined else line)
        before = before if isinstance(line, Drop) else lines[-1]
    cut = len(program.forward)
    return msgspec.structs.replace(program, forward=tuple(lines[:cut]), backward=tuple(lines[cut:]))


def _joins(graph: Graph, before: Instruction | None, line: Run) -> bool:
    if not isinstance(before, Run) or isinstance(before, Loop) or not before.short or line.in_place != 0:
        return False
    op = graph.ops[line.op]
    return op.kind in JOINED and graph.ops[before.op].outputs[0] == op.inputs[0]


def _readers(graph: Graph) -> Mapping[int, list[int]]:
    """Operators of forward by the tensor that they read first."""
    found: dict[int, list[int]] = {}
    for k, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD and op.inputs:
            found.setdefault(op.inputs[0], []).append(k)
    return found


def _chains(graph: Graph, op: int, readers: Mapping[int, list[int]]) -> Iterator[tuple[int, ...]]:
    """What may follow: a ReLU, a sum with a tensor that lies alike, or a sum and then a ReLU."""
    for k in readers.get(graph.ops[op].outputs[0], ()):
        if _is_relu(graph.ops[k]):
            yield (k,)
        elif _is_sum(graph, graph.ops[k]):
            yield (k,)
            for j in readers.get(graph.ops[k].outputs[0], ()):
                if _is_relu(graph.ops[j]):
                    yield k, j


def _is_relu(op: Op) -> bool:
    return op.kind == "aten.relu"


def _is_sum(graph: Graph, op: Op) -> bool:
    """Whether an operator adds two tensors of one shape, type and layout, as they are."""
    if op.kind != "aten.add" or len(op.inputs) != 2 or op.options:
        return False
    first, second = (graph.tensors[t] for t in op.inputs)
    strides = op.strides or (None, None)
    return (first.shape, first.dtype, strides[0]) == (second.shape, second.dtype, strides[1])
