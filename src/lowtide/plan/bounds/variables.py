"""The variables and rows of a cut program: what is held at each cut, and what runs again after it.

Each row holds for every schedule of the problem, and with a relaxation for every valid program: who has run
at a cut is a variable then, where orders differ (:mod:`lowtide.plan.bounds.first_runs`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

import numpy as np

from lowtide.plan.bounds.copies import add_lanes
from lowtide.plan.bounds.first_runs import Done, Sum
from lowtide.plan.bounds.model import Rows
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event, held_at
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.short_reruns import JOINED

__all__ = ["CutProgram"]

_ONCE: Sum = (1.0, ())


class CutProgram:
    """A cut program of a problem, or of its relaxation, for some cuts."""

    def __init__(
        self,
        problem: Problem,
        budget: int,
        cuts: Sequence[int],
        heavy: Collection[int],
        link: Link | None = None,
        relaxation: Relaxation | None = None,
        early: Collection[int] = (),
    ) -> None:
        self.problem = problem
        self.early = early
        self.relaxation = relaxation
        self.link = link
        self.budget = budget
        self.cuts = list(cuts)
        self.rows = Rows()
        self.done = Done(self.rows, problem, self.cuts, relaxation)
        self.keep: list[dict[int, int]] = []
        self.redo: list[dict[int, int]] = []
        self.off: list[dict[int, int]] = []
        self.across: list[dict[int, int]] = []
        self.impossible = False
        self.unit = max(1, problem.total_time) / 1e4
        for window in range(len(self.cuts)):
            self._memory(window)
        for window in range(len(self.cuts)):
            self._window(window)
            self._heavy(window, heavy)
        if link is not None:
            add_lanes(self, link)

    def _memory(self, window: int) -> None:
        """What is held at a cut fits beside what the cut's own operator takes."""
        problem, cut, done, rows = self.problem, self.cuts[window], self.done, self.rows
        reads = set(problem.reads[cut])
        room = self.budget - problem.fixed[cut] - problem.workspace[cut]
        room -= sum(problem.bytes[s] for s in problem.writes[cut])
        if problem.over[cut] >= 0:
            room += problem.bytes[problem.over[cut]]
        keep: dict[int, int] = {}
        terms: list[tuple[int, float]] = []
        for s, producer in enumerate(problem.producer):
            size = problem.bytes[s]
            if producer < 0:
                room -= size if s in reads or self._given(window, s) else 0
                continue
            if producer == cut or done.never(window, producer) or problem.back[s] == cut:
                continue
            made, variables = done.at(window, producer)
            if problem.kept[s]:
                room -= int(made) * size
                terms += [(c, x * size / self.budget) for c, x in variables]
                continue
            keep[s] = rows.variable(at_least=float(s in reads))
            if s in reads:
                room -= size
            elif size:
                terms.append((keep[s], size / self.budget))
            if variables:
                rows.row([*variables, (keep[s], -1.0)], 0.0)
        self.keep.append(keep)
        if room < 0:
            self.impossible = True
        rows.row(terms, -inf, room / self.budget * (1 + 1e-12))

    def end(self, window: int) -> int:
        """The next cut, or the number of operators."""
        return self.cuts[window + 1] if window + 1 < len(self.cuts) else len(self.problem.ops)

    def _given(self, window: int, s: int) -> bool:
        """Whether a storage from outside is there at a cut, since somebody reads it later in any order."""
        if self.relaxation is not None and self.link is not None:
            return False  # it may be on the host
        return any(self.done.never(window, r) for r in self.problem.readers[s])

    def _readers(self, window: int) -> list[tuple[int, Sum]]:
        """Operators whose first run may be in a window, and whether it is; the next cut's own is the last."""
        last = window + 1 == len(self.cuts)
        if self.relaxation is None:
            end = len(self.problem.ops) - 1 if last else self.cuts[window + 1]
            return [(t, _ONCE) for t in range(self.cuts[window] + 1, end + 1)]
        found = []
        following = -1 if last else self.cuts[window + 1]
        for v in range(len(self.problem.ops)):
            first = _ONCE if v == following else self.done.first(window, v)
            if v != self.cuts[window] and first != (0.0, ()):
                found.append((v, first))
        return found

    def _window(self, window: int) -> None:
        """Whatever is read between two cuts and was made before the first is held there, or made again."""
        problem, cut, rows = self.problem, self.cuts[window], self.rows
        last = window + 1 == len(self.cuts)
        end = len(problem.ops) - 1 if last else self.cuts[window + 1]
        keep = self.keep[window]
        redo: dict[int, int] = {}
        off: dict[int, int] = {}
        self.redo.append(redo)
        self.off.append(off)
        needs: list[tuple[int, Sum]] = []
        """A storage, and whether it is needed."""
        for t, first in self._readers(window):
            needs += [(s, first) for s in problem.reads[t] if not cut < problem.back[s] < t]
        if not last:
            following = self.keep[window + 1].items()
            needs += [(s, (0.0, ((c, 1.0),))) for s, c in following if not cut < problem.back[s] < end]
        elif self.relaxation is not None:
            needs += [(s, _ONCE) for s in self.relaxation.at_end]
        seen: set[int] = set()
        while needs:
            s, needed = needs.pop()
            if s not in keep or (needed == _ONCE and s in seen):
                continue
            if needed == _ONCE:
                seen.add(s)
            producer = problem.producer[s]
            made, variables = self.done.first(window, producer)
            terms = [(keep[s], 1.0), *variables]
            if problem.again[producer]:
                if producer not in redo:
                    redo[producer] = rows.variable(problem.repeat[producer] / self.unit)
                    again = [u for u in problem.reads[producer] if not cut < problem.back[u] <= end]
                    needs += [(u, (0.0, ((redo[producer], 1.0),))) for u in again]
                terms.append((redo[producer], 1.0))
            if self.link is not None and problem.bytes[s]:
                if s not in off:
                    taken = self.copies * self.link.taken(problem.bytes[s])
                    off[s] = rows.variable(taken * problem.scale / self.unit)
                terms.append((off[s], 1.0))
            rows.row([*terms, *((c, -x) for c, x in needed[1])], needed[0] - made)

    @property
    def copies(self) -> int:
        """Copies of a storage that comes from the host: with more cuts, one out may serve several."""
        return 2 if len(self.cuts) == 1 else 1

    def _heavy(self, window: int, heavy: Collection[int]) -> None:
        """What is held through a window leaves room for each heavy operator that runs again in it."""
        across: dict[int, int] = {}
        self.across.append(across)
        if window + 1 == len(self.cuts) or not heavy:
            return
        problem, rows, done = self.problem, self.rows, self.done
        cut, keep, redo = self.cuts[window], self.keep[window], self.redo[window]
        for s, column in self.keep[window + 1].items():
            producer = problem.producer[s]
            fetched = cut <= problem.back[s] <= self.cuts[window + 1]
            made_here = producer == cut and not problem.again[cut]
            if fetched or not (s in keep or made_here) or not problem.bytes[s]:
                continue
            variables = () if made_here else done.first(window, producer)[1]
            if producer not in redo and not variables:
                across[s] = column
                continue
            across[s] = rows.variable()
            again = [(redo[producer], 1.0)] if producer in redo else []
            made = 0.0 if made_here else done.first(window, producer)[0]
            rows.row([(across[s], 1.0), (column, -1.0), *again, *variables], -made)
        staying: list[tuple[int, float]] = []
        room = self.budget - min(problem.fixed[cut : self.cuts[window + 1] + 1])
        for s, producer in enumerate(problem.producer):
            if problem.kept[s] and producer >= 0:
                made, variables = _ONCE if producer == cut else done.at(window, producer)
                room -= int(made) * problem.bytes[s]
                staying += [(c, x * problem.bytes[s] / self.budget) for c, x in variables]
        for op in sorted(set(heavy) & redo.keys()):
            own, need = self._again(op)
            terms = [(c, problem.bytes[s] / self.budget) for s, c in across.items() if s not in own]
            terms += [*staying, (redo[op], need / self.budget)]
            rows.row(terms, -inf, room / self.budget * (1 + 1e-12))

    def _again(self, op: int) -> tuple[set[int], int]:
        """What an operator touches when it runs again, and the bytes that takes at least."""
        problem = self.problem
        short = problem.ops[op] in problem.short
        made = problem.writes[op][:1] if short else problem.writes[op]
        own = {s for s in (*problem.reads[op], *made) if not problem.kept[s]}
        need = problem.workspace[op] + sum(problem.bytes[s] for s in own)
        joined = short and problem.graph.ops[problem.ops[op]].kind in JOINED
        if problem.over[op] >= 0 or joined:  # what is joined to a short run writes over its result
            need -= sum(problem.bytes[s] for s in made[:1])
        return own, need

    def start(self, events: Collection[Event]) -> np.ndarray:
        """The values that a schedule in the order of the problem gives the variables."""
        values = np.array(self.rows.lower)
        held = held_at(self.problem, events, self.cuts)
        for window, cut in enumerate(self.cuts):
            last = window + 1 == len(self.cuts)
            end = len(self.problem.ops) if last else self.cuts[window + 1]
            for v, column in self.done.columns[window].items():
                values[column] = float(v < cut)
            for s, column in self.keep[window].items():
                values[column] = max(values[column], float(s in held[window]))
            again = {op for t, op in events if cut < t <= end}
            for op, column in self.redo[window].items():
                values[column] = float(op in again)
            for s, column in self.across[window].items():
                kept_on = not last and s in held[window + 1]
                values[column] = max(values[column], float(kept_on and self.problem.producer[s] not in again))
        return values
