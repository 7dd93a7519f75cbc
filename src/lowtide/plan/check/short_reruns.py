"""What the checker asks of a short second run.

It follows a first one, and what that one saved is there; or it is part of the short run right before it,
whose result it writes over, with nothing but drops between.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from lowtide.graph import Graph, Op
from lowtide.plan.program.instructions import Drop, Instruction, Loop, Run

__all__ = ["wrong_short"]


_RELU, _ADD = "aten.relu", "aten.add"


def wrong_short(
    graph: Graph, line: Run, earlier: Sequence[Instruction], again: bool, there: Set[int]
) -> str | None:
    """What is wrong with a short run while these tensors are there; None where nothing is.

    ``earlier`` are the instructions of the same part before it, ``there`` the tensors that are held.
    """
    op = graph.ops[line.op]
    if again and op.kind in (_RELU, _ADD):
        before = next((one for one in reversed(earlier) if not isinstance(one, Drop)), None)
        follows = line.in_place == 0 and isinstance(before, Run) and not isinstance(before, Loop)
        if follows and isinstance(before, Run) and before.short and _is_part(graph, graph.ops[before.op], op):
            return None
        return f"runs {op.label!r} as part of a run before it, which it does not follow"
    saved = [op.outputs[k] for k in op.short]
    if not again or not saved or op.outputs[0] in saved or line.in_place is not None:
        return f"runs {op.label!r} from what it saved, which it cannot"
    missing = [graph.tensors[t].label for t in saved if t not in there]
    return f"{op.label!r} runs again from {missing[0]!r}, which is not there" if missing else None


def _is_part(graph: Graph, before: Op, op: Op) -> bool:
    """Whether an operator can be part of the short run before it: a sum as it is, then a ReLU."""
    if not op.inputs or before.outputs[0] != op.inputs[0]:
        return False
    first = bool(before.short)
    if op.kind == _RELU:
        return first or before.kind == _ADD
    if not first or len(op.inputs) != 2 or op.options:
        return False
    one, other = (graph.tensors[t] for t in op.inputs)
    lies = op.strides
    alike = not isinstance(lies, list | tuple) or len(lies) != 2 or lies[0] == lies[1]
    return one.shape == other.shape and one.dtype == other.dtype and alike
