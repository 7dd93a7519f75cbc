"""Exchanges that go on beside what follows them, as far as the peak has room for what is on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from lowtide.graph import EXCHANGE, Graph
from lowtide.plan.program.instructions import Fetch, Instruction, Program, Run
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.simulate import simulate
from lowtide.plan.program.under_way import ends_before

__all__ = ["with_beside"]


def with_beside(
    graph: Graph, program: Program, workspace_bytes: Sequence[int], parts: Mapping[int, int]
) -> Program:
    """The Program whose exchanges go on beside others wherever that takes no byte more at the peak.

    ``parts`` are the bytes of what each of them sends and receives, by operator. One that runs more than once
    waits, and one that nobody knows the bytes of.
    """
    if not parts:
        return program
    program = _waiting(program)
    timeline = simulate(graph, program, workspace_bytes=workspace_bytes)
    storages = graph.storages()
    runs = Counter(line.op for line in program.instructions if isinstance(line, Run))
    ran = 0
    marked = []
    for part in (program.forward, program.backward):
        lines = list(part)
        for position, line in enumerate(part):
            if not isinstance(line, Run):
                continue
            size = parts.get(line.op, 0)
            if size and runs[line.op] == 1 and graph.ops[line.op].kind == EXCHANGE:
                own = timeline.live_bytes[ran] - (workspace_bytes[line.op] if workspace_bytes else 0)
                count, fetched = _beside(graph, storages, part[position + 1 :], line.op)
                lives = timeline.live_bytes[ran + 1 : ran + 1 + count]
                most = max(own, *lives, lives[-1] + fetched) if count else 0
                if count and most + size <= timeline.peak_bytes:
                    lines[position] = msgspec.structs.replace(line, beside=size)
            ran += 1
        marked.append(tuple(lines))
    return msgspec.structs.replace(program, forward=marked[0], backward=marked[1])


def _waiting(program: Program) -> Program:
    """The same where every exchange is waited for."""
    forward, backward = (
        tuple(
            msgspec.structs.replace(line, beside=0) if isinstance(line, Run) and line.beside else line
            for line in part
        )
        for part in (program.forward, program.backward)
    )
    return msgspec.structs.replace(program, forward=forward, backward=backward)


def _beside(
    graph: Graph, storages: Sequence[int], lines: Sequence[Instruction], exchange: int
) -> tuple[int, int]:
    """How many operators run before an exchange must have ended, and the bytes fetched behind the last."""
    count = fetched = 0
    for line in lines:
        if ends_before(graph, storages, line, exchange):
            break
        if isinstance(line, Run):
            count, fetched = count + 1, 0
        elif isinstance(line, Fetch):
            fetched += allocated_bytes(graph.tensors[line.tensor])
    return count, fetched
