"""Which exchange is on its way, and until when it takes memory."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph import EXCHANGE, SUM, Graph
from lowtide.plan.program.instructions import Drop, Instruction, Run

__all__ = ["UnderWay", "ends_before"]


class UnderWay:
    """The exchange that goes on beside the instructions, if there is one."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._storages: list[int] = []
        self._op = -1
        self._bytes = 0

    def begin(self, line: Run) -> int:
        """An operator has run; if it is an exchange that goes on, the bytes that this takes."""
        if line.beside:
            self._storages = self._storages or self._graph.storages()
            self._op, self._bytes = line.op, line.beside
        return line.beside

    def ended_before(self, line: Instruction) -> int:
        """The bytes that it gives back before an instruction."""
        if self._op >= 0 and ends_before(self._graph, self._storages, line, self._op):
            return self.end()
        return 0

    def end(self) -> int:
        """Wait for it; the bytes that it gives back."""
        given, self._op, self._bytes = self._bytes, -1, 0
        return given


def ends_before(graph: Graph, storages: Sequence[int], line: Instruction, exchange: int) -> bool:
    """Whether an exchange on its way must have ended before this instruction."""
    mine = {storages[t] for t in graph.ops[exchange].outputs}
    if isinstance(line, Run):
        op = graph.ops[line.op]
        touched: Sequence[int] = (*op.inputs, *op.outputs)
        if op.kind in (EXCHANGE, SUM):
            return True
    else:
        touched = line.tensors if isinstance(line, Drop) else (line.tensor,)
    return any(storages[t] in mine for t in touched if 0 <= t < len(storages))
