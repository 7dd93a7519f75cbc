"""What a Program decides: what is kept, run again, sent to the host, run in place."""

from __future__ import annotations

from lowtide.graph import RESIDENT_ROLES, Graph, Phase
from lowtide.plan.program.instructions import Program, Run, Send
from lowtide.plan.program.simple import kept_throughout
from lowtide.plan.result.plan import Decisions

__all__ = ["decisions_of"]


def decisions_of(graph: Graph, program: Program) -> Decisions:
    """What became of the storages that forward makes and backward reads, and of leaves that may leave."""
    storage = graph.storages()
    leaves = {k for k, tensor in enumerate(graph.tensors) if tensor.role in RESIDENT_ROLES}
    kept = {storage[t] for t in kept_throughout(graph)}
    forward = {storage[t] for op in graph.ops if op.phase is Phase.FORWARD for t in op.outputs}
    later = {storage[t] for op in graph.ops if op.phase is not Phase.FORWARD for t in op.reads}
    asked = (forward & later) - kept
    again = {
        storage[t]
        for line in program.backward
        if isinstance(line, Run) and graph.ops[line.op].phase is Phase.FORWARD
        for t in graph.ops[line.op].outputs
    }
    sent = {storage[line.tensor] for line in program.instructions if isinstance(line, Send)}
    in_place = sum(isinstance(line, Run) and line.in_place is not None for line in program.instructions)
    return Decisions(
        kept=len(asked - again - sent),
        recomputed=len((asked & again) - sent),
        offloaded=len(asked & sent) + len(leaves & sent),
        in_place=in_place,
    )
