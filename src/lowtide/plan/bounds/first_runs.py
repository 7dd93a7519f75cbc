"""Done: which operators have run for the first time at each cut of a cut program.

With the operators in one order that is known. Where any valid order counts, it is known for those that must
run before or after the cut's own operator; for the others it is a variable, 1 where they have run:

    before[c] ──▶ c ──▶ after[c]          d[v] for v in neither, with d[u] >= d[v] where u runs before v
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.plan.bounds.model import Rows
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.problem.precedence import bits
from lowtide.plan.problem.problem import Problem

__all__ = ["Done", "Sum"]

Sum = tuple[float, tuple[tuple[int, float], ...]]
"""A number, and variables with their factors."""

_NO, _YES, _OPEN = 0, 1, 2


class Done:
    """What has run at each cut, as numbers or as variables of a program."""

    def __init__(
        self, rows: Rows, problem: Problem, cuts: Sequence[int], relaxation: Relaxation | None
    ) -> None:
        self.cuts = cuts
        self.size = len(problem.ops)
        self.columns: list[dict[int, int]] = []
        """For each cut the variables of operators that may have run before it or not."""
        self._known: list[bytearray] = []
        idle = 0
        if relaxation is not None:
            pairs = enumerate(zip(problem.reads, problem.writes, strict=True))
            idle = sum(1 << v for v, (reads, writes) in pairs if not reads and not writes)
            idle |= relaxation.optional
        self.idle = idle
        """Operators that are not told apart: they take and hold nothing."""
        for cut in cuts:
            known = bytearray(self.size)
            open_ops = 0
            if relaxation is None:
                known[:cut] = bytes([_YES]) * cut
            else:
                for v in bits(relaxation.precedence.before[cut]):
                    known[v] = _YES
                fixed = relaxation.precedence.before[cut] | relaxation.precedence.after[cut] | 1 << cut | idle
                open_ops = (1 << self.size) - 1 & ~fixed
            columns = {v: rows.variable() for v in bits(open_ops)}
            for v in columns:
                known[v] = _OPEN
            if relaxation is not None:
                self._in_order(rows, columns, open_ops, relaxation)
            if self.columns:
                for v, column in columns.items():
                    if v in self.columns[-1]:
                        rows.row([(column, 1.0), (self.columns[-1][v], -1.0)], 0.0)
            self.columns.append(columns)
            self._known.append(known)

    def _in_order(self, rows: Rows, columns: dict[int, int], among: int, relaxation: Relaxation) -> None:
        """Who has run, has run after those it follows."""
        for v, column in columns.items():
            left = relaxation.precedence.before[v] & among
            while left:
                u = left.bit_length() - 1
                rows.row([(columns[u], 1.0), (column, -1.0)], 0.0)
                left &= ~(relaxation.precedence.before[u] | 1 << u)

    def surely(self, cut: int, op: int) -> bool:
        """Whether an operator has run before a cut in every order."""
        return self._known[cut][op] == _YES

    def never(self, cut: int, op: int) -> bool:
        """Whether an operator has not run before a cut in any order."""
        return self._known[cut][op] == _NO

    def at(self, cut: int, op: int) -> Sum:
        """Whether an operator has run before a cut; behind the last cut, all have."""
        if cut == len(self.cuts):
            return 1.0, ()
        state = self._known[cut][op]
        return (0.0, ((self.columns[cut][op], 1.0),)) if state == _OPEN else (float(state), ())

    def first(self, window: int, op: int) -> Sum:
        """Whether an operator runs for the first time after a cut and before the next."""
        before, after = self.at(window, op), self.at(window + 1, op)
        return after[0] - before[0], after[1] + tuple((c, -x) for c, x in before[1])
