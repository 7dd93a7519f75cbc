"""Operators that write over an input which dies with them: one storage less."""

from __future__ import annotations

from collections.abc import Collection

from lowtide.graph import Graph
from lowtide.plan.program.instructions import Drop, Instruction, Program, Run, Send
from lowtide.plan.program.memory import Memory, allocated_bytes
from lowtide.plan.program.simple import kept_throughout

__all__ = ["pointwise", "with_in_place"]

_POINTWISE = frozenset(
    {"ReLU", "LeakyReLU", "ClippedReLU", "Sigmoid", "Tanh", "Dropout"}  # Chainer
    | {"Elemwise"}  # MegEngine
    | {"Relu", "Relu6", "ReluGrad", "BiasAdd"}  # TensorFlow
)


def pointwise(graph: Graph) -> tuple[int, ...]:
    """Operators of another framework's step that may write over their first input, by their kind.

    Each value of their output depends on the value at the same place of an input as large.
    """
    tensors = graph.tensors
    return tuple(
        k
        for k, op in enumerate(graph.ops)
        if op.kind in _POINTWISE
        and op.inputs
        and op.outputs
        and tensors[op.inputs[0]].bytes == tensors[op.outputs[0]].bytes
    )


def with_in_place(graph: Graph, program: Program, able: Collection[int]) -> Program:
    """The Program with every operator of ``able`` in place where its first input allows it.

    Safe where the input is dropped right after, nobody else is on its storage (no view of it, nothing kept
    for backward), and the operator reads it once. ``able`` names operators whose first output may take the
    place of their first input: same shape, type and layout. What the Program said before does not count, but
    of short runs, which stay as they are.
    """
    memory = Memory(graph)
    kept = set(kept_throughout(graph))
    given = set(memory.storage_of)
    owner = graph.storages()
    lines = list(program.instructions)
    found: list[Instruction] = []
    sent = {line.tensor for line in lines if isinstance(line, Send)}
    for position, line in enumerate(lines):
        if not isinstance(line, Run):
            memory.move(line)
            found.append(line)
            continue
        if line.short:  # it is part of a kernel that gives the result as it is planned
            memory.run(line)
            found.append(line)
            continue
        op = graph.ops[line.op]
        following = lines[position + 1] if position + 1 < len(lines) else None
        dropped = following.tensors if isinstance(following, Drop) else ()
        crosses = position + 1 == len(program.forward)
        chosen = Run(line.op)
        if line.op in able and op.inputs and not crosses:
            source = op.inputs[0]
            alone = memory.holders.get(memory.storage_of.get(source, -1)) == 1
            free = source in dropped and not {source, owner[source]} & (kept | given | sent)
            once = op.inputs.count(source) == 1 and op.outputs[0] not in memory.storage_of
            if alone and free and once and _fills(memory, source, op.outputs[0]):
                chosen = Run(line.op, in_place=0)
        memory.run(chosen)
        found.append(chosen)
    cut = len(program.forward)
    return Program(tuple(found[:cut]), tuple(found[cut:]))


def _fills(memory: Memory, source: int, output: int) -> bool:
    """Whether the output would take up the whole storage: a gradient must not keep a larger one alive."""
    return memory.size[memory.storage_of[source]] == allocated_bytes(memory.graph.tensors[output])
