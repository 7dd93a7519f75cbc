"""In which order operators must run for the first time though no tensor passes between them.

Random operators draw from the generator of their device one after the other. Of operators that may run once
alone nobody knows what they do: they keep their place among each other and among random ones. Serves the
checker alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph import Graph
from lowtide.plan.check.graph import only_names
from lowtide.plan.program.instructions import Body, Loop, Run

__all__ = ["Order"]

_UNKNOWN = "any"
"""Where an operator draws that may run once alone: nobody knows, so from every generator."""


class Order:
    """First runs so far."""

    def __init__(self, graph: Graph, bodies: Sequence[Body]) -> None:
        self.graph, self.bodies = graph, bodies
        self.ran: set[int] = set()
        self._last: dict[str, int] = {}
        """By generator the operator in program order that drew from it last."""

    def wrong(self, line: Run) -> str | None:
        """What is wrong with a run now, in words; None where nothing is, and it counts as run then."""
        op = self.graph.ops[line.op]
        drawn = _generators(self.graph, line.op)
        inside = _inside(self.bodies, line) if isinstance(line, Loop) else set()
        if line.op in self.ran:
            return f"runs {op.label!r} again, whose tiles draw random numbers" if inside else None
        for other in op.after:
            missing = other < line.op and other not in self.ran
            if missing and not only_names(self.graph, self.graph.ops[other]):
                return f"runs {op.label!r} before {self.graph.ops[other].label!r}, which it waits for"
        for generator in drawn | inside:
            before = self._last.items() if generator == _UNKNOWN else self._of(generator)
            late = max((last for _, last in before), default=-1)
            if late > line.op:
                label = self.graph.ops[late].label
                return f"runs {op.label!r} after {label!r}, whose order shows in the result"
        for generator in drawn | inside:
            self._last[generator] = max(line.op, self._last.get(generator, -1))
        self.ran.add(line.op)
        return None

    def _of(self, generator: str) -> list[tuple[str, int]]:
        return [(name, last) for name, last in self._last.items() if name in (generator, _UNKNOWN)]


def _generators(graph: Graph, op: int) -> set[str]:
    """Where an operator draws from."""
    one = graph.ops[op]
    found = {one.device or "cpu"} if one.random else set()
    return found | ({_UNKNOWN} if one.once else set())


def _inside(bodies: Sequence[Body], line: Loop) -> set[str]:
    """Where the tiles of a loop draw from."""
    found: set[str] = set()
    for k in {tile.body for tile in line.tiles}:
        if not 0 <= k < len(bodies):
            continue  # refused where that program is played
        graph, program = bodies[k].graph, bodies[k].program
        for op in range(len(graph.ops)):
            found |= _generators(graph, op)
        for one in program.instructions:
            found |= _inside(program.bodies, one) if isinstance(one, Loop) else set()
    return found
