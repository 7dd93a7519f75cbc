"""Copies in a cut program: what a window takes from the host fits into the time there was to copy it.

What comes after a cut was made and copied before it, and arrives before it is read: maybe only behind the
next cut, at which it has its memory already. Copies have the time of the operators in between, whichever
order they run in; that of what runs again; what copies themselves take from the computation; and any time of
waiting, which costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from lowtide.plan.bounds.arrivals import add_arrivals
from lowtide.plan.program.copy_lanes import Link

if TYPE_CHECKING:
    from lowtide.plan.bounds.variables import CutProgram

__all__ = ["add_lanes"]

_PLACES = 24
"""At so many places of a window a lane's work is held against the time there was for it."""

_Terms = list[tuple[int, float]]


def add_lanes(program: CutProgram, link: Link) -> None:
    """Add the rows of the two lanes to a cut program."""
    _Lanes(program, link).add()


class _Lanes:
    def __init__(self, program: CutProgram, link: Link) -> None:
        self.program, self.link = program, link
        self.problem, self.rows, self.done = program.problem, program.rows, program.done
        # a time is rounded down to whole units: the true one is less than one above
        self.clock = np.array([(t + 1) / program.unit for t in self.problem.time])
        self.ends = np.concatenate(([0.0], np.cumsum(self.clock)))
        self.order = program.relaxation.precedence if program.relaxation is not None else None
        self.second = self.problem.scale / program.unit
        self.windows: list[tuple[int, _Terms]] = []
        """For each window the operators that surely run in it, and what else there is time for."""

    def add(self) -> None:
        program, rows = self.program, self.rows
        extra: _Terms = [(rows.variable(1.0, at_most=inf), -1.0)]
        if program.copies == 2:  # the copy out is counted too, and is before the cut
            extra += self._taken(program.off[0])
        for window, off in enumerate(program.off):
            out = [
                (self._since(window, self.problem.producer[s]), c, self._took(s, self.link.to_host))
                for s, c in self._away(window).items()
            ]
            open_time: _Terms = [(c, -self.clock[v]) for v, c in self.done.columns[window].items()]
            self._limit(out, [*extra, *open_time], self._anywhere(window))
            here: _Terms = [(rows.variable(1.0, at_most=inf), -1.0), *self._taken(off)]
            here += [(c, -self.problem.repeat[op] / program.unit) for op, c in program.redo[window].items()]
            surely, perhaps = self._between(window)
            self.windows.append((surely, [*here, *perhaps]))
            extra += here
        for window in range(len(program.off)):
            self._arrive(window)
        if program.early:
            time = self.windows[0][1]
            add_arrivals(
                program, [self._took(s, self.link.to_device) for s in range(len(self.problem.bytes))], time
            )

    def _arrive(self, window: int) -> None:
        """What a window takes from the host arrives before it is read, there or in a later window.

        Who is not read there has memory from then on, and may still be copied while the next cut is run.
        """
        arriving: dict[int, list[tuple[float, int, float]]] = {}
        for s, c in self.program.off[window].items():
            last, until = self._deadline(window, s)
            arriving.setdefault(last, []).append((until, c, self._took(s, self.link.to_device)))
        time: _Terms = []
        besides, together = 0.0, list[tuple[float, int, float]]()
        for later in range(window, max(arriving, default=window) + 1):
            time += self.windows[later][1]
            besides += self._anywhere(later + 1)
            together += arriving.get(later, [])
            if later == window:
                self._limit(together, time, besides)
            elif later in arriving:  # all together: who has less time has none of the later windows
                self._limit(together, time, besides, marks=0)

    def _deadline(self, window: int, s: int) -> tuple[int, float]:
        """The window in which what this one takes from the host is surely read, and the time until then."""
        cuts, readers, passed = self.program.cuts, self.problem.readers[s], 0.0
        for later in range(window, len(self.program.off)):
            if later > window:
                if cuts[later] in readers:
                    return later - 1, passed
                passed += float(self.clock[cuts[later]])
            surely = self.windows[later][0]
            if later == len(self.program.off) - 1 or self._certain(later, s, surely):
                return later, passed + self._until(later, s, surely)
            passed += self._sum(surely)
        raise AssertionError("the last window is the end")

    def _certain(self, window: int, s: int, surely: int) -> list[int]:
        """Who surely reads a storage between a cut and the next."""
        readers = [r for r in self.problem.readers[s] if surely >> r & 1]
        return readers if self.order is None else [r for r in readers if not self.done.first(window, r)[1]]

    def _limit(
        self, copies: list[tuple[float, int, float]], time: _Terms, besides: float, marks: int = _PLACES
    ) -> None:
        """Copies that have so much time at most, and ``besides``, take no more than that."""
        copies.sort()
        for k in _marks(len(copies), marks):
            terms = [(c, took) for _, c, took in copies[: k + 1]]
            self.rows.row([*terms, *time], -inf, (copies[k][0] + besides) * (1 + 1e-9))

    def _taken(self, off: dict[int, int]) -> _Terms:
        """Copies go on while the computation hands over another; schedules do not rely on that."""
        if self.order is None:
            return []
        taken = [(c, self.link.taken(self.problem.bytes[s]) * self.second) for s, c in off.items()]
        if not any(spent for _, spent in taken):
            return []
        together = self.rows.variable(at_most=inf)  # one for many rows
        self.rows.row([*taken, (together, -1.0)], 0.0)
        return [(together, -1.0)]

    def _took(self, s: int, rate: float) -> float:
        return self.problem.bytes[s] / rate * self.second

    def _anywhere(self, cut: int) -> float:
        """The time of views, and of operators that hold nothing and may run on either side of a cut."""
        cuts = self.program.cuts
        time = (self.problem.views + 1) / self.program.unit
        if self.order is not None:
            known = self.order.before[cuts[cut]] | self.order.after[cuts[cut]] if cut < len(cuts) else 0
            time += self._sum(self.done.idle & ~known)
        return time

    def _since(self, window: int, producer: int) -> float:
        """The time of operators that run before a cut and after one that has made a storage."""
        cut = self.program.cuts[window]
        if self.order is None:
            return float(self.ends[cut] - self.ends[producer + 1])
        return self._sum(self.order.before[cut] & ~(self.order.before[producer] | 1 << producer))

    def _between(self, window: int) -> tuple[int, _Terms]:
        """Operators that run between a cut and the next, unless they ran before; the time of what is open."""
        surely = 0
        perhaps: _Terms = []
        for v in range(len(self.problem.ops)):
            if v != self.program.cuts[window]:
                known, variables = self.done.first(window, v)
                surely |= (1 << v) if known else 0
                perhaps += [(c, -x * self.clock[v]) for c, x in variables]
        return surely, perhaps

    def _until(self, window: int, s: int, surely: int) -> float:
        """The time of operators that run after a cut and before whoever reads a storage first."""
        certain = self._certain(window, s, surely)
        if self.order is None:
            end = min(certain, default=self.program.end(window))
            return float(self.ends[end] - self.ends[self.program.cuts[window] + 1])
        behind = (self.order.after[r] | 1 << r for r in certain)
        return min((self._sum(surely & ~mask) for mask in behind), default=self._sum(surely))

    def _sum(self, mask: int) -> float:
        size = len(self.clock)
        packed = np.frombuffer(mask.to_bytes(size // 8 + 1, "little"), dtype=np.uint8)
        return float(np.unpackbits(packed, bitorder="little", count=size) @ self.clock)

    def _away(self, window: int) -> dict[int, int]:
        """For each storage the variable that says whether it must be on the host at the cut of a window.

        It must if it comes from there later, and is neither held at the cut nor made in between.
        """
        program, rows, problem = self.program, self.rows, self.problem
        found = dict(program.off[window])
        alone = set(found)
        for later in range(window + 1, len(program.off)):
            for s, column in program.off[later].items():
                if s not in program.keep[window]:
                    continue
                if s not in found:
                    found[s] = rows.variable()
                elif s in alone:
                    either = rows.variable()
                    rows.row([(either, 1.0), (found[s], -1.0)], 0.0)
                    found[s] = either
                    alone.discard(s)
                producer = problem.producer[s]
                again = [redo.get(producer) for redo in program.redo[window : later + 1]]
                terms = [(found[s], 1.0), (column, -1.0), (program.keep[window][s], 1.0)]
                terms += [(c, 1.0) for c in again if c is not None]
                (now, made), (then, had) = self.done.at(later, producer), self.done.at(window, producer)
                terms += [*made, *((c, -x) for c, x in had)]
                rows.row(terms, then - now)
        return found


def _marks(count: int, places: int) -> Iterable[int]:
    """Where sums over a sorted list are limited: at a few places, and at its end."""
    return sorted({count - 1, *(k * count // places for k in range(places))}) if count else []
