"""The cut program: a lower bound on the time that any schedule inside a budget spends on running again.

At some instants, the cuts, the storages that are held must fit the budget beside what the instant's own
operator takes. Between two cuts, whatever is read and was made before is held at the first, or made again:

    cut 0            window 0             cut 1          window 1
    keep[s,0] ──┬── keep + redo >= 1 ──── keep[s,1] ──┬── keep + redo >= 1 ────
                └── redo[v,0] needs its own inputs held or made again

Every schedule of the problem gives a solution, so the optimum is a valid bound, and so is every dual bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf

import numpy as np

from lowtide.plan.lanes import Link
from lowtide.plan.problem import Problem
from lowtide.plan.rows import Rows, Solution
from lowtide.plan.schedule import Event, held_at

__all__ = ["CutResult", "Ties", "solve_cuts"]

_TOLERANCE = 1e-6
_PLACES = 24
"""At so many places of a window a lane's work is held against the time there was for it."""


@dataclass(frozen=True, slots=True)
class CutResult:
    """The outcome of a cut program."""

    bound: int
    """No schedule inside the budget spends less; only meaningful if ``feasible``."""
    feasible: bool
    """False: no schedule fits the budget at all."""
    solved: bool
    """Whether the program was solved to its optimum."""
    events: frozenset[Event] | None
    """The solution as a schedule, each operator made again where first read; it may exceed the budget."""
    away: Mapping[int, int] = field(default_factory=dict)
    """Storages that the solution keeps on the host, each with a cut that it is away over."""


@dataclass(frozen=True, slots=True)
class Ties:
    """What makes a cut program smaller: one choice for several operators."""

    alike: Sequence[int]
    """A number for each operator; those with the same get the same choice."""
    held: Collection[tuple[int, int]] = ()
    """Storages, each with an operator that runs again only where the storage is held."""


class _Program:
    def __init__(
        self,
        problem: Problem,
        budget: int,
        cuts: Sequence[int],
        heavy: Collection[int],
        link: Link | None = None,
    ) -> None:
        self.problem = problem
        self.link = link
        self.off: list[dict[int, int]] = []
        self.budget = budget
        self.cuts = list(cuts)
        self.rows = Rows()
        self.keep: list[dict[int, int]] = []
        self.redo: list[dict[int, int]] = []
        self.impossible = False
        self.unit = max(1, problem.total_time) / 1e4
        self.read_after = self._read_after()
        for window in range(len(self.cuts)):
            self._memory(window, budget)
        self.across: list[dict[int, int]] = []
        for window in range(len(self.cuts)):
            self._window(window)
            self._heavy(window, heavy)
        if link is not None:
            self._lanes(link)

    def _read_after(self) -> list[int]:
        """For each storage the last mandatory operator that reads it or a descendant that may be redone."""
        return [max(readers, default=-1) for readers in self.problem.readers]

    def _memory(self, window: int, budget: int) -> None:
        problem, cut = self.problem, self.cuts[window]
        reads = set(problem.reads[cut])
        room = budget - problem.fixed[cut] - problem.workspace[cut]
        room -= sum(problem.bytes[s] for s in problem.writes[cut])
        if problem.over[cut] >= 0:
            room += problem.bytes[problem.over[cut]]
        keep: dict[int, int] = {}
        terms = []
        for s, producer in enumerate(problem.producer):
            if producer >= cut or problem.back[s] == cut:
                continue
            must = problem.kept[s] or s in reads or (producer < 0 and self.read_after[s] >= cut)
            if must:
                room -= problem.bytes[s]
            if problem.kept[s] or producer < 0:
                continue
            keep[s] = self.rows.variable(at_least=float(must))
            if problem.bytes[s] and not must:
                terms.append((keep[s], problem.bytes[s] / budget))
        self.keep.append(keep)
        if room < 0:
            self.impossible = True
        self.rows.row(terms, -inf, room / budget * (1 + 1e-12))

    def _window(self, window: int) -> None:
        problem, cut, rows = self.problem, self.cuts[window], self.rows
        last = window + 1 == len(self.cuts)
        end = len(problem.ops) - 1 if last else self.cuts[window + 1]
        keep = self.keep[window]
        redo: dict[int, int] = {}
        off: dict[int, int] = {}
        self.redo.append(redo)
        self.off.append(off)
        needs: list[tuple[int, int | None]] = []
        """A storage, and what needs it: None for a mandatory operator, else a variable."""
        for t in range(cut + 1, end + 1):
            needs += [(s, None) for s in problem.reads[t] if not cut < problem.back[s] < t]
        if not last:
            needs += [(s, c) for s, c in self.keep[window + 1].items() if not cut < problem.back[s] < end]
        done: set[int] = set()
        while needs:
            s, who = needs.pop()
            producer = problem.producer[s]
            if s not in keep or (who is None and s in done):
                continue
            if who is None:
                done.add(s)
            terms = [(keep[s], 1.0)]
            if problem.again[producer]:
                if producer not in redo:
                    redo[producer] = rows.variable(problem.repeat[producer] / self.unit)
                    again = [u for u in problem.reads[producer] if not cut < problem.back[u] <= end]
                    needs += [(u, redo[producer]) for u in again]
                terms.append((redo[producer], 1.0))
            if self.link is not None and problem.bytes[s]:
                if s not in off:
                    copies = 2 if len(self.cuts) == 1 else 1  # with more cuts, one copy out may serve several
                    taken = copies * self.link.taken(problem.bytes[s])
                    off[s] = rows.variable(taken * problem.scale / self.unit)
                terms.append((off[s], 1.0))
            if who is None:
                rows.row(terms, 1.0)
            else:
                rows.row([*terms, (who, -1.0)], 0.0)

    def _heavy(self, window: int, heavy: Collection[int]) -> None:
        """What is held through a window leaves room for each heavy operator that runs again in it."""
        across: dict[int, int] = {}
        self.across.append(across)
        if window + 1 == len(self.cuts) or not heavy:
            return
        problem, rows = self.problem, self.rows
        cut, keep, redo = self.cuts[window], self.keep[window], self.redo[window]
        for s, column in self.keep[window + 1].items():
            producer = problem.producer[s]
            fetched = cut <= problem.back[s] <= self.cuts[window + 1]
            made_here = producer == cut and not problem.again[cut]
            if fetched or not (s in keep or made_here) or not problem.bytes[s]:
                continue
            if producer not in redo:
                across[s] = column
                continue
            across[s] = rows.variable()
            rows.row([(across[s], 1.0), (column, -1.0), (redo[producer], 1.0)], 0.0)
        staying = sum(
            size for size, kept, p in zip(problem.bytes, problem.kept, problem.producer, strict=True)
            if kept and p <= cut
        )  # fmt: skip
        room = self.budget - min(problem.fixed[cut : self.cuts[window + 1] + 1]) - staying
        for op in sorted(set(heavy) & redo.keys()):
            own = {s for s in (*problem.reads[op], *problem.writes[op]) if not problem.kept[s]}
            need = problem.workspace[op] + sum(problem.bytes[s] for s in own)
            if problem.over[op] >= 0:
                need -= problem.bytes[problem.over[op]]
            terms = [(c, problem.bytes[s] / self.budget) for s, c in across.items() if s not in own]
            rows.row([*terms, (redo[op], need / self.budget)], -inf, room / self.budget * (1 + 1e-12))

    def _lanes(self, link: Link) -> None:
        """What a window takes from the host was made and copied before its cut, and comes before it is read.

        Copies have the time of the mandatory operators, that of what runs again (``here``, in all windows so
        far ``extra``), and any time of waiting, which costs.
        """
        problem, rows = self.problem, self.rows
        second = problem.scale / self.unit
        clock = [0.0, *accumulate(t / self.unit for t in problem.time)]
        extra = [(rows.variable(1.0, at_most=inf), -1.0)]
        for window, (cut, off) in enumerate(zip(self.cuts, self.off, strict=True)):
            end = self.cuts[window + 1] if window + 1 < len(self.cuts) else len(problem.ops)
            out = [
                (problem.producer[s], c, problem.bytes[s] / link.to_host * second)
                for s, c in self._away(window).items()
            ]
            out.sort(reverse=True)
            for k in _marks(len(out)):
                room = clock[cut] - clock[out[k][0] + 1]
                rows.row([*((c, took) for _, c, took in out[: k + 1]), *extra], -inf, room * (1 + 1e-9))
            here = [(rows.variable(1.0, at_most=inf), -1.0)]
            here += [(c, -problem.repeat[op] / self.unit) for op, c in self.redo[window].items()]
            into = [
                (min(self._read_next(s, cut), end), c, problem.bytes[s] / link.to_device * second)
                for s, c in off.items()
            ]
            into.sort()
            for k in _marks(len(into)):
                room = clock[into[k][0]] - clock[cut + 1]
                rows.row([*((c, took) for _, c, took in into[: k + 1]), *here], -inf, room * (1 + 1e-9))
            extra += here

    def _away(self, window: int) -> dict[int, int]:
        """For each storage the variable that says whether it must be on the host at the cut of a window.

        It must if it comes from there later, and is neither held at the cut nor made again in between.
        """
        found = dict(self.off[window])
        rows, problem = self.rows, self.problem
        alone = set(found)
        for later in range(window + 1, len(self.off)):
            for s, column in self.off[later].items():
                if s not in self.keep[window]:
                    continue
                if s not in found:
                    found[s] = rows.variable()
                elif s in alone:
                    either = rows.variable()
                    rows.row([(either, 1.0), (found[s], -1.0)], 0.0)
                    found[s] = either
                    alone.discard(s)
                again = [redo.get(problem.producer[s]) for redo in self.redo[window : later + 1]]
                terms = [(found[s], 1.0), (column, -1.0), (self.keep[window][s], 1.0)]
                rows.row([*terms, *((c, 1.0) for c in again if c is not None)], 0.0)
        return found

    def _read_next(self, s: int, cut: int) -> int:
        """The first mandatory operator after a cut that reads a storage."""
        readers = self.problem.readers[s]
        place = bisect_right(readers, cut)
        return readers[place] if place < len(readers) else len(self.problem.ops)

    def start(self, events: Collection[Event]) -> np.ndarray:
        """The values that a schedule gives the variables."""
        values = np.array(self.rows.lower)
        held = held_at(self.problem, events, self.cuts)
        for window, cut in enumerate(self.cuts):
            last = window + 1 == len(self.cuts)
            end = len(self.problem.ops) if last else self.cuts[window + 1]
            for s, column in self.keep[window].items():
                values[column] = max(values[column], float(s in held[window]))
            again = {op for t, op in events if cut < t <= end}
            for op, column in self.redo[window].items():
                values[column] = float(op in again)
            for s, column in self.across[window].items():
                kept_on = not last and s in held[window + 1]
                values[column] = max(values[column], float(kept_on and self.problem.producer[s] not in again))
        return values

    def solve(self, nodes: int, seconds: float, slack: float, start: Collection[Event] | None) -> Solution:
        """The solution of the whole program."""
        gap = max(_TOLERANCE / 2, slack * 1e4)
        return self.rows.solve(nodes, seconds, gap, None if start is None else self.start(start))

    def solve_tied(self, ties: Ties, nodes: int, seconds: float, slack: float) -> Solution:
        """A solution in which operators with the same number share their choices, and so their storages."""
        problem, alike = self.problem, ties.alike
        for keep, redo in zip(self.keep, self.redo, strict=True):
            for s, op in ties.held:
                if s in keep and op in redo:
                    self.rows.row([(keep[s], 1.0), (redo[op], -1.0)], 0.0)
        same = list(range(len(self.rows.costs)))
        number: dict[tuple[int, ...], int] = {}

        def tie(column: int, *key: int) -> None:
            if not self.rows.lower[column]:  # else it is no choice
                same[column] = number.setdefault(key, column)

        for window, (keep, redo, off) in enumerate(zip(self.keep, self.redo, self.off, strict=True)):
            for kind, columns in enumerate((keep, off)):
                for s, column in columns.items():
                    op = problem.producer[s]
                    tie(column, kind, window, alike[op], problem.writes[op].index(s))
            for op, column in redo.items():
                tie(column, 2, window, alike[op])
        rows, place = self.rows.tied(same)
        found = rows.solve(nodes, seconds, max(_TOLERANCE / 2, slack * 1e4))
        values = None if found.values is None else found.values[place]
        return Solution(found.status, 0.0, values)


def _marks(count: int) -> list[int]:
    """Where sums over a sorted list are limited: at a few places, and at its end."""
    return sorted({count - 1, *(k * count // _PLACES for k in range(_PLACES))}) if count else []


def solve_cuts(
    problem: Problem,
    budget: int,
    cuts: Sequence[int],
    *,
    nodes: int = 100_000,
    seconds: float = 10.0,
    slack: float = 0.0,
    heavy: Collection[int] = (),
    start: Collection[Event] | None = None,
    link: Link | None = None,
    ties: Ties | None = None,
) -> CutResult:
    """A lower bound on the time any schedule inside ``budget`` spends on running again, from these cuts.

    The solver stops after so many nodes, or once bound and solution differ by no more than ``slack`` of the
    time of the whole step; ``seconds`` is a deadline. ``heavy`` operators, where they run again, must find
    room beside what is held through the window. ``start`` is a schedule inside the budget to begin with. With
    a ``link``, storages may come from the host too, as far as its lanes reach; waiting counts as time then.
    With ``ties`` the program is smaller and sooner solved, and no bound comes of it.
    """
    program = _Program(problem, budget, sorted(set(cuts)), heavy, link)
    if program.impossible:
        return CutResult(0, feasible=False, solved=True, events=None)
    if ties is not None:
        solution = program.solve_tied(ties, nodes, seconds, slack)
    else:
        solution = program.solve(nodes, seconds, slack, start)
    values = solution.values
    if solution.status == "infeasible":
        return CutResult(0, feasible=ties is not None, solved=ties is None, events=None)
    dual = max(0.0, solution.dual if solution.dual > -1e29 else 0.0)
    bound = max(0, ceil(dual * program.unit - max(_TOLERANCE * program.unit, 1e-7 * dual * program.unit)))
    events = None if values is None else _events(problem, program, values)
    away: dict[int, int] = {}
    for cut, off in zip(program.cuts, program.off, strict=True):
        for s, c in off.items():
            if values is not None and values[c] > 0.5:
                away.setdefault(s, cut)
    return CutResult(bound, True, solution.status == "optimal", events, away)


def _events(problem: Problem, program: _Program, values: np.ndarray) -> frozenset[Event]:
    """What the solution does not keep is made again where it is first read."""
    events: set[Event] = set()
    live: set[int] = set()
    for window, cut in enumerate(program.cuts):
        keep = program.keep[window]
        live = {s for s, column in keep.items() if values[column] > 0.5}
        live |= {s for s, column in program.off[window].items() if values[column] > 0.5}
        last = window + 1 == len(program.cuts)
        end = len(problem.ops) - 1 if last else program.cuts[window + 1]
        live.update(problem.writes[cut])
        for t in range(cut + 1, end + 1):
            events |= _made_again(problem, t, problem.reads[t], live, keep)
            live.update(problem.writes[t])
        if not last:
            wanted = [s for s, column in program.keep[window + 1].items() if values[column] > 0.5]
            events |= _made_again(problem, end, wanted, live, keep)
    return frozenset(events)


def _made_again(
    problem: Problem, instant: int, wanted: Sequence[int], live: set[int], keep: dict[int, int]
) -> set[Event]:
    found: set[Event] = set()
    stack = [s for s in wanted if s in keep and s not in live]
    while stack:
        s = stack.pop()
        producer = problem.producer[s]
        if s in live or not problem.again[producer]:
            continue
        found.add((instant, producer))
        live.update(problem.writes[producer])
        stack += [u for u in problem.reads[producer] if u in keep and u not in live]
    return found
