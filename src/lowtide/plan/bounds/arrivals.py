"""Arrivals in a cut program: what is read up to an instant has come from the host by then.

Copies have the time until the storage is read first. That may be long before an operator reads it for the
first time: what runs again reads it as well. So at an instant behind the cut the program says again who is
held, made again or copied, up to there, and that these copies fit into the time until there:

    cut ─────── instant ─────────────── first reader of x
         copy x ──▶ x is read by what runs again

These rows are for programs that choose plans, where the plan would wait otherwise; bounds do without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.plan.bounds.variables import CutProgram

__all__ = ["add_arrivals"]


def add_arrivals(program: CutProgram, took: Sequence[float], time: Sequence[tuple[int, float]]) -> None:
    """Add the rows for the early instants of a program of one cut, in the order of its problem.

    ``took`` is the time that each storage takes to come back. ``time`` are the terms that copies have besides
    operators that run for the first time.
    """
    problem, cut = program.problem, program.cuts[0]
    for instant in program.early:
        until = sum(problem.time[cut + 1 : instant]) / program.unit
        _Arrivals(program).add(instant, until, took, time)


class _Arrivals:
    """Who has come from the host, and who has run again, before an instant."""

    def __init__(self, program: CutProgram) -> None:
        self.program, self.rows = program, program.rows
        self.off: dict[int, int] = {}
        self.redo: dict[int, int] = {}

    def add(
        self, instant: int, until: float, took: Sequence[float], time: Sequence[tuple[int, float]]
    ) -> None:
        """Rows for what is read up to an instant that begins so long after the cut."""
        problem, cut = self.program.problem, self.program.cuts[0]
        readers = range(cut + 1, instant + 1)
        needs = [(s, -1) for s in sorted({s for v in readers for s in problem.reads[v]})]
        while needs:
            s, needed = needs.pop()
            if s in self.program.keep[0]:
                terms = [(self.program.keep[0][s], 1.0), *self._again(problem.producer[s], needs)]
                terms += self._copied(s)
                self.rows.row([*terms, (needed, -1.0)] if needed >= 0 else terms, float(needed < 0))
        copies = [(c, took[s]) for s, c in self.off.items()]
        early = {self.program.redo[0][v]: c for v, c in self.redo.items()}
        besides = {c: early.get(c, -1) for c in self.program.redo[0].values()}
        terms = [(besides.get(c, c), x) for c, x in time]
        self.rows.row([*copies, *((c, x) for c, x in terms if c >= 0)], -inf, until)

    def _again(self, producer: int, needs: list[tuple[int, int]]) -> list[tuple[int, float]]:
        whole = self.program.redo[0].get(producer)
        if whole is None:
            return []
        if producer not in self.redo:
            self.redo[producer] = column = self._part_of(whole)
            needs += [(u, column) for u in self.program.problem.reads[producer]]
        return [(self.redo[producer], 1.0)]

    def _copied(self, s: int) -> list[tuple[int, float]]:
        if s not in self.program.off[0]:
            return []
        if s not in self.off:
            self.off[s] = self._part_of(self.program.off[0][s])
        return [(self.off[s], 1.0)]

    def _part_of(self, whole: int) -> int:
        """A variable that is at most another: what happens early does happen."""
        column = self.rows.variable()
        self.rows.row([(whole, 1.0), (column, -1.0)], 0.0)
        return column
