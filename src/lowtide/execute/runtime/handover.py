"""What passes from the forward part of a Program to its backward part, which autograd may ask for later.

The table of tensors goes on as forward leaves it, but for leaves that the step updates: backward finds them
as they were before the step, and views of them that forward made are not among what it finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.execute.calls.views import Views
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Role
from lowtide.plan.program.instructions import Drop, Fetch, Instruction, Program, Run, Send
from lowtide.plan.program.memory import saved_for
from lowtide.trace.step.joint import Joint

__all__ = ["Handover", "fetched_by_backward", "handed_over", "old_values", "without_views"]


@dataclass(frozen=True, slots=True)
class Handover:
    """What forward hands over, with tensors in the place of their views."""

    saved: tuple[int, ...]
    again: tuple[tuple[int, int], ...]
    """Views that backward makes again when it begins, each with the tensor that it is a view of."""
    forward: tuple[Instruction, ...]
    """The instructions of forward, without the drops of what is handed over for its views."""


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


def without_views(
    joint: Joint, program: Program, views: Views, saved: Sequence[int], old: frozenset[int]
) -> Handover:
    """Hand over a tensor once instead of views of it: less for autograd to keep, and to check.

    A view holds the storage of the tensor that it is a view of, so that dropping that gives no memory back.
    What lies on the host meanwhile, and what the step updates, is handed over as it is.
    """
    graph = joint.graph
    moving = {line.tensor for line in program.instructions if isinstance(line, Send | Fetch)}
    storages = graph.storages()
    apart = {storages[t] for t in moving if t < len(storages)} | {storages[t] for t in graph.updated}
    lies, dropped = _storages_at_the_end(joint, program, views)
    handed: set[int] = set()
    again: list[tuple[int, int]] = []
    left_out: dict[int, set[int]] = {}
    for tensor in saved:
        owner = views.owner(tensor)
        if owner == tensor or storages[owner] in apart or owner in old:
            handed.add(tensor)
        elif owner in joint.constants or lies.get(owner) == lies[tensor]:
            again.append((tensor, owner))
        elif owner not in lies and owner in dropped and dropped[owner][1] == lies[tensor]:
            left_out.setdefault(dropped[owner][0], set()).add(owner)
            again.append((tensor, owner))
        else:
            handed.add(tensor)
    forward = list(program.forward)
    for position, owners in left_out.items():
        line = forward[position]
        assert isinstance(line, Drop)
        forward[position] = Drop(tuple(t for t in line.tensors if t not in owners))
    handed.update(owner for _, owner in again if owner not in joint.constants)
    return Handover(tuple(sorted(handed)), tuple(again), tuple(forward))


def _storages_at_the_end(
    joint: Joint, program: Program, views: Views
) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """Which memory each tensor is on when forward ends; of others, the last drop and the memory then.

    A tensor that is made again is on other memory.
    """
    fresh = itertools.count()
    lies = {t: next(fresh) for t in joint.inputs if t is not None}
    dropped: dict[int, tuple[int, int]] = {}
    for position, line in enumerate(program.forward):
        if isinstance(line, Run):
            for t in _made(joint.graph.ops[line.op], line):
                if t not in lies:
                    source = views.source(t)
                    lies[t] = next(fresh) if source is None or source not in lies else lies[source]
                    dropped.pop(t, None)
        elif isinstance(line, Drop):
            dropped |= {t: (position, lies.pop(t)) for t in line.tensors if t in lies}
        elif isinstance(line, Fetch):
            lies[line.tensor] = next(fresh)
    return lies, dropped


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
