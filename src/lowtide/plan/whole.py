"""Whether a Program that comes from outside is one of this graph: nothing missing, nothing made up."""

from __future__ import annotations

from lowtide.errors import PlanError
from lowtide.graph import Graph, Phase
from lowtide.plan.plain import kept_throughout
from lowtide.plan.program import Drop, Program
from lowtide.plan.simulate import simulate

__all__ = ["refuse_unfit"]


def refuse_unfit(graph: Graph, program: Program) -> None:
    """A PlanError says what the Program lacks to run every operator of the step and leave its results."""
    ran: set[int] = set()
    for place, line in enumerate(program.instructions):
        if isinstance(line, Drop):
            _refuse_drop(graph, line, place)
            continue
        if not 0 <= line.op < len(graph.ops):
            raise PlanError(f"instruction {place} runs operator {line.op}; the step has {len(graph.ops)}")
        op = graph.ops[line.op]
        if line.in_place is not None and not 0 <= line.in_place < len(op.inputs):
            raise PlanError(f"instruction {place} writes over input {line.in_place} of {op.label!r}")
        if op.phase is not Phase.FORWARD and place < len(program.forward):
            raise PlanError(f"instruction {place} runs {op.label!r} of backward in the forward part")
        if line.op in ran and set(op.inputs) & set(op.outputs):
            raise PlanError(f"instruction {place} runs {op.label!r} again, which changes its input")
        ran.add(line.op)
    missing = [op.label for k, op in enumerate(graph.ops) if k not in ran]
    if missing:
        raise PlanError(f"the program never runs {len(missing)} operators of the step, {missing[0]!r} first")
    first = {line.op for line in program.forward if not isinstance(line, Drop)}
    late = [op.label for k, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and k not in first]
    if late:
        raise PlanError(f"the program runs {late[0]!r} of forward in the backward part alone")
    simulate(graph, program)


def _refuse_drop(graph: Graph, line: Drop, place: int) -> None:
    kept = set(kept_throughout(graph))
    for tensor in line.tensors:
        if not 0 <= tensor < len(graph.tensors):
            raise PlanError(f"instruction {place} drops tensor {tensor}; the step has {len(graph.tensors)}")
        if tensor in kept:
            raise PlanError(f"instruction {place} drops {graph.tensors[tensor].label!r}, which must stay")
