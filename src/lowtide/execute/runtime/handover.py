"""What passes from the forward part of a Program to its backward part, which autograd may ask for later.

The table of tensors goes on as forward leaves it, but for leaves that the step updates: backward finds them
as they were before the step, and views of them that forward made are not among what it finds.
"""

from __future__ import annotations

from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.memory import saved_for
from lowtide.trace.step.joint import Joint

__all__ = ["fetched_by_backward", "handed_over", "old_values"]


def old_values(graph: Graph) -> frozenset[int]:
    """Leaves that backward reads as they were before the step: buffers, and what the step updates.

    A leaf that an operator of backward updates is not among them: it is updated itself, not a copy.
    """
    updated = set(graph.updated)
    late = {t for op in graph.ops if op.phase is not Phase.FORWARD for t in set(op.changes)}
    return frozenset(
        t
        for t, tensor in enumerate(graph.tensors)
        if tensor.role in RESIDENT_ROLES and (tensor.role is Role.BUFFER or t in updated) and t not in late
    )


def handed_over(
    joint: Joint, program: Program, leaves: frozenset[int], old: frozenset[int]
) -> tuple[int, ...]:
    """Tensors that forward holds when it ends and that the backward part names.

    ``leaves`` are those that the Program sends to the host, ``old`` those that backward gets copies of.
    """
    graph = joint.graph
    named = {t for t in joint.gradients if t is not None}
    ran = {line.op for line in program.forward if isinstance(line, Run)}
    sent = {line.tensor for line in program.forward if isinstance(line, Send)}
    for line in program.backward:
        if isinstance(line, Run):
            op = graph.ops[line.op]
            named.update(op.reads_again if line.op in ran else op.reads)
            named.update(saved_for(op) if line.short else ())
            named.update(_made(op, line))  # what is held is not made again
        elif isinstance(line, Send) or (isinstance(line, Fetch) and line.tensor in leaves):
            named.add(line.tensor)
        elif isinstance(line, Drop):  # its copy to the host may still be under way until here
            named.update(t for t in line.tensors if t in sent or t in leaves)
    renewed = old.intersection(graph.updated)
    owner = graph.storages()
    held = {t for t in _held(joint, program, leaves) if owner[t] == t or owner[t] not in renewed}
    return tuple(sorted(named.intersection(held).difference(joint.constants)))


def _held(joint: Joint, program: Program, leaves: frozenset[int]) -> set[int]:
    """Tensors that are there when forward ends."""
    held = {t for t in joint.inputs if t is not None}
    for line in program.forward:
        if isinstance(line, Run):
            held.update(_made(joint.graph.ops[line.op], line))
        elif isinstance(line, Drop):
            held.difference_update(t for t in line.tensors if t not in leaves)
        elif isinstance(line, Fetch):
            held.add(line.tensor)
    return held.intersection(range(len(joint.graph.tensors)))


def fetched_by_backward(program: Program, leaves: frozenset[int]) -> tuple[int, ...]:
    """Tensors that the backward part fetches and that the forward part sent."""
    sent: set[int] = set()
    found: set[int] = set()
    for line in program.backward:
        if isinstance(line, Send):
            sent.add(line.tensor)
        elif isinstance(line, Fetch) and line.tensor not in sent and line.tensor not in leaves:
            found.add(line.tensor)
    return tuple(sorted(found))


def _made(op: Op, line: Run) -> tuple[int, ...]:
    return op.outputs[:1] if line.short else op.outputs
