"""The cut program: a lower bound on the time that any schedule inside a budget spends on running again.

At some instants, the cuts, the storages that are held must fit the budget beside what the instant's own
operator takes. Between two cuts, whatever is read and was made before is held at the first, or made again:

    cut 0            window 0             cut 1          window 1
    keep[s,0] ──┬── keep + redo >= 1 ──── keep[s,1] ──┬── keep + redo >= 1 ────
                └── redo[v,0] needs its own inputs held or made again

Every schedule of the problem gives a solution, so the optimum is a valid bound, and so is every dual bound.
With a relaxation every valid program gives one, in whichever order its operators run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

import numpy as np

from lowtide.plan.bounds.model import Solution
from lowtide.plan.bounds.relaxation import Relaxation
from lowtide.plan.bounds.variables import CutProgram
from lowtide.plan.problem.precedence import by_rank
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event
from lowtide.plan.program.copy_lanes import Link

__all__ = ["CutProblem", "CutResult", "Effort", "Ties", "solve_cuts"]

_TOLERANCE = 1e-6


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
    order: Sequence[int] | None = None
    """The order of the operators that the schedule is for, where it is not that of the problem."""


@dataclass(frozen=True, slots=True)
class Ties:
    """What makes a cut program smaller: one choice for several operators."""

    alike: Sequence[int]
    """A number for each operator; those with the same get the same choice."""
    held: Collection[tuple[int, int]] = ()
    """Storages, each with an operator that runs again only where the storage is held."""


@dataclass(frozen=True, slots=True)
class CutProblem:
    """A problem inside a budget, looked at from some cuts."""

    problem: Problem
    budget: int
    cuts: Collection[int]
    heavy: Collection[int] = ()
    """Operators that, where they run again, must find room beside what is held through the window."""
    link: Link | None = None
    """With a link, storages may come from the host too, as far as its lanes reach; waiting counts as time."""
    relaxation: Relaxation | None = None
    """With it the bound holds for every valid program, and one of any two cuts must run before the other in
    every order; without, it holds for schedules that keep the problem's order."""
    early: Collection[int] = ()
    """Instants behind the only cut by which what is read before them has come from the host, also where what
    runs again reads it; without a relaxation alone."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard the solver tries."""

    nodes: int = 100_000
    """With none, what is solved is the linear program: that gives a bound, soon, and no schedule."""
    seconds: float = 10.0
    """A deadline."""
    slack: float = 0.0
    """It stops once bound and solution differ by no more than this share of the time of the whole step."""


def solve_cuts(
    asked: CutProblem, effort: Effort, *, start: Collection[Event] | None = None, ties: Ties | None = None
) -> CutResult:
    """A lower bound on the time any schedule inside the budget spends on running again, from the cuts.

    ``start`` is a schedule inside the budget to begin with. With ``ties`` the program is smaller and sooner
    solved, and no bound comes of it.
    """
    problem, link, relaxation = asked.problem, asked.link, asked.relaxation
    nodes, seconds = effort.nodes, effort.seconds
    there = problem if relaxation is None else relaxation.problem
    cuts = sorted(set(asked.cuts))
    program = CutProgram(there, asked.budget, cuts, asked.heavy, link, relaxation, asked.early)
    if program.impossible:
        return CutResult(0, feasible=False, solved=True, events=None)
    gap = max(_TOLERANCE / 2, effort.slack * 1e4)
    if ties is not None:
        solution = _solve_tied(program, ties, nodes, seconds, gap)
    else:
        solution = program.rows.solve(nodes, seconds, gap, None if start is None else program.start(start))
    values = solution.values
    if solution.status == "infeasible":
        return CutResult(0, feasible=ties is not None, solved=ties is None, events=None)
    dual = max(0.0, solution.dual if solution.dual > -1e29 else 0.0) * program.unit
    dual -= max(_TOLERANCE * program.unit, 1e-7 * dual)
    bound = max(0, ceil(dual) if link is None else floor(dual))  # waiting is no whole number of units
    order = None if values is None else _order(program, values)
    events = None if values is None or order is None else _events(problem, program, values, order)
    away: dict[int, int] = {}
    for cut, off in zip(program.cuts, program.off, strict=True):
        for s, c in off.items():
            if values is not None and values[c] > 0.5:
                away.setdefault(s, cut)
    if order == list(range(len(problem.ops))):
        order = None
    return CutResult(bound, True, solution.status == "optimal", events, away, order)


def _solve_tied(program: CutProgram, ties: Ties, nodes: int, seconds: float, gap: float) -> Solution:
    """A solution in which operators with the same number share their choices, and so their storages."""
    problem, alike = program.problem, ties.alike
    for keep, redo in zip(program.keep, program.redo, strict=True):
        for s, op in ties.held:
            if s in keep and op in redo:
                program.rows.row([(keep[s], 1.0), (redo[op], -1.0)], 0.0)
    same = list(range(len(program.rows.costs)))
    number: dict[tuple[int, ...], int] = {}

    def tie(column: int, *key: int) -> None:
        if not program.rows.lower[column]:  # else it is no choice
            same[column] = number.setdefault(key, column)

    for window, (keep, redo, off) in enumerate(zip(program.keep, program.redo, program.off, strict=True)):
        for kind, columns in enumerate((keep, off)):
            for s, column in columns.items():
                op = problem.producer[s]
                tie(column, kind, window, alike[op], problem.writes[op].index(s))
        for op, column in redo.items():
            tie(column, 2, window, alike[op])
    rows, place = program.rows.tied(same)
    found = rows.solve(nodes, seconds, gap)
    values = None if found.values is None else found.values[place]
    return Solution(found.status, 0.0, values)


def _order(program: CutProgram, values: np.ndarray) -> list[int]:
    """The operators in an order in which they have run at the cuts as the solution says."""
    size = len(program.problem.ops)
    if program.relaxation is None:
        return list(range(size))
    rank = [0] * size
    for window, cut in enumerate(program.cuts):
        columns = program.done.columns[window]
        for v in range(size):
            if v in columns:
                had = values[columns[v]] > 0.5
            else:
                had = v < cut if program.done.idle >> v & 1 else program.done.surely(window, v)
            rank[v] += 2 * (not had)
        rank[cut] -= 1  # alone between what has run before it and what has not
    return by_rank(program.relaxation.precedence.planned, rank)


def _events(
    problem: Problem, program: CutProgram, values: np.ndarray, order: Sequence[int]
) -> frozenset[Event]:
    """What the solution does not keep is made again where it is first read."""
    events: set[Event] = set()
    places = [order.index(cut) for cut in program.cuts]
    for window, place in enumerate(places):
        cut, keep = program.cuts[window], program.keep[window]
        live = {s for s, column in keep.items() if values[column] > 0.5}
        live |= {s for s, column in program.off[window].items() if values[column] > 0.5}
        last = window + 1 == len(places)
        end = len(order) - 1 if last else places[window + 1]
        live.update(problem.writes[cut])
        for t in order[place + 1 : end + 1]:
            events |= _made_again(problem, t, problem.reads[t], live, keep)
            live.update(problem.writes[t])
        if not last:
            wanted = [s for s, column in program.keep[window + 1].items() if values[column] > 0.5]
            events |= _made_again(problem, order[end], wanted, live, keep)
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
