"""Which exchanges may go on beside what follows them: the peak has room for what is on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lowtide.graph import EXCHANGE, SUM, Graph
from lowtide.plan.program.instructions import Drop, Fetch, Instruction, Program, Run, Send
from lowtide.plan.program.simulate import simulate

__all__ = ["exchanges_beside"]


def exchanges_beside(
    graph: Graph, program: Program, workspace_bytes: Sequence[int], parts: Mapping[int, int]
) -> frozenset[int]:
    """The exchanges that may be on their way while others run, without a byte more at the peak.

    ``parts`` are the bytes of what each of them sends and receives, by operator. An exchange ends before
    whatever reads, sends or drops its result, before the next communication, and with its part of the step.
    """
    timeline = simulate(graph, program, workspace_bytes=workspace_bytes)
    storages = graph.storages()
    runs = Counter(line.op for line in program.instructions if isinstance(line, Run))
    ran = 0
    found = set()
    for part in (program.forward, program.backward):
        for position, line in enumerate(part):
            if not isinstance(line, Run):
                continue
            if line.op in parts and runs[line.op] == 1 and graph.ops[line.op].kind == EXCHANGE:
                mine = workspace_bytes[line.op] if workspace_bytes else 0
                beside = _beside(graph, storages, part[position + 1 :], graph.ops[line.op].outputs)
                most = max(
                    (timeline.live_bytes[ran] - mine, *timeline.live_bytes[ran + 1 : ran + 1 + beside])
                )
                if beside and most + parts[line.op] <= timeline.peak_bytes:
                    found.add(line.op)
            ran += 1
    return frozenset(found)


def _beside(
    graph: Graph, storages: Sequence[int], lines: Sequence[Instruction], results: Sequence[int]
) -> int:
    """How many operators run before an exchange must have ended."""
    mine = {storages[t] for t in results}
    count = 0
    for line in lines:
        if isinstance(line, Run):
            op = graph.ops[line.op]
            touched = (*op.inputs, *op.outputs)
            if op.kind in (EXCHANGE, SUM) or mine.intersection(storages[t] for t in touched):
                break
            count += 1
        elif isinstance(line, Drop):
            if mine.intersection(storages[t] for t in line.tensors if t < len(storages)):
                break
        elif isinstance(line, Send | Fetch) and line.tensor < len(storages) and storages[line.tensor] in mine:
            break
    return count
