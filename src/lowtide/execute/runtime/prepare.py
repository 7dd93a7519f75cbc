"""Prepares the instructions of a Program, which line waits for which copies and communications among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowtide.errors import PlanError
from lowtide.execute.runtime.instructions import (
    AlreadyRun,
    Dropping,
    Exchanging,
    Fetching,
    FetchingLeaf,
    Line,
    Running,
    Sending,
    SendingLeaf,
    Summing,
)
from lowtide.graph import EXCHANGE, LOOP, SUM
from lowtide.plan.program.instructions import Body, Drop, Fetch, Instruction, Loop, Program, Run, Send
from lowtide.plan.program.short_reruns import JOINED
from lowtide.trace.step.joint import Joint

__all__ = ["prepared", "random_again"]


def prepared(
    joint: Joint,
    program: Program,
    states: Sequence[int],
    leaves: frozenset[int] = frozenset(),
    loops: Callable[[Any, Loop, Sequence[Body]], Any] | None = None,
) -> tuple[list[Line], list[Line]]:
    """Both parts of a Program; ``states`` are the random operators whose state is kept.

    ``leaves`` are the leaves that it sends to the host; those beyond the graph are optimiser state. ``loops``
    makes the function that runs a Loop, from what its operator stands for.
    """
    place = {op: k for k, op in enumerate(states)}
    last = {line.tensor: k for k, line in enumerate(program.instructions) if isinstance(line, Fetch)}
    seen: set[int] = set()
    out: set[int] = set()
    coming: set[int] = set()
    """Tensors under way to the device, or from others; who reads anything on their storages waits."""
    kinds: dict[str, type[Summing | Exchanging]] = {SUM: Summing, EXCHANGE: Exchanging}
    talks = {op: kinds[one.kind] for op, one in enumerate(joint.graph.ops) if one.kind in kinds}
    storages = joint.graph.storages() if last or talks else []
    storages += range(len(storages), max(leaves, default=-1) + 1)
    lines: list[Line] = []

    def line_of(position: int, line: Instruction) -> Line:
        if isinstance(line, Send):
            if line.tensor in leaves:
                return SendingLeaf(line.tensor)
            out.add(line.tensor)
            return Sending(line.tensor)
        if isinstance(line, Fetch):
            coming.add(line.tensor)
            if line.tensor in leaves:
                return FetchingLeaf(line.tensor)
            return Fetching(line.tensor, last[line.tensor] == position)
        if isinstance(line, Drop):
            travelling = tuple(t for t in line.tensors if t in out or t in coming)
            out.difference_update(travelling)
            coming.difference_update(travelling)
            return Dropping(line.tensors, travelling, leaves)
        first = line.op not in seen
        seen.add(line.op)
        joined = _joined(joint, program.instructions, position) if line.short else ()
        inputs = [t for op in (line.op, *joined) for t in joint.graph.ops[op].inputs]
        read = {storages[t] for t in inputs} if coming else set()
        awaited = tuple(t for t in sorted(coming) if storages[t] in read)
        coming.difference_update(awaited)
        if line.short and joint.graph.ops[line.op].kind in JOINED:
            return AlreadyRun(joint, Run(line.op), None, first, ())
        if isinstance(line, Loop):
            assert loops is not None
            turning = loops(joint.calls[line.op].target, line, program.bodies)
            return Running(joint, line, None, first, awaited, turning)
        if joint.graph.ops[line.op].kind == LOOP:
            raise PlanError(f"the program runs the loop {line.op} without its tiles; plan again")
        if line.op in talks:
            coming.update(joint.calls[line.op].results)
            return talks[line.op](joint, line, None, first, awaited)
        return Running(joint, line, place.get(line.op), first, awaited, joined=joined)

    lines = [line_of(k, line) for k, line in enumerate(program.instructions)]
    cut = len(program.forward)
    return lines[:cut], lines[cut:]


def random_again(joint: Joint, program: Program) -> tuple[int, ...]:
    """Random operators that run more than once: the state before their first run is kept."""
    seen: set[int] = set()
    again: set[int] = set()
    for line in program.instructions:
        if isinstance(line, Run):
            (again if line.op in seen else seen).add(line.op)
    return tuple(op for op in sorted(again) if joint.graph.ops[op].random)


def _joined(joint: Joint, lines: Sequence[Instruction], position: int) -> tuple[int, ...]:
    """Operators whose runs are part of the short run at this position."""
    found: list[int] = []
    for line in lines[position + 1 :]:
        if isinstance(line, Run) and line.short and joint.graph.ops[line.op].kind in JOINED:
            found.append(line.op)
        elif not isinstance(line, Drop):
            break
    return tuple(found)
