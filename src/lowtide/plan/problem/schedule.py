"""Schedules of recomputation: a set of events, each "run this operator again before that instant".

Instant ``t`` is the mandatory operator ``t`` of a Problem. What runs again before it, runs in program
order: its block.

    block of t-1   t-1 │ v  v'  block of t   t │ ...

Any set of events is valid: one pass backward finds what each run is needed for, and what nobody needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.plan.problem.problem import Problem

__all__ = ["Event", "Outcome", "evaluate", "held_at", "order"]

Event = tuple[int, int]
"""Instant and operator: the operator runs again before the instant's own."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a schedule takes."""

    events: frozenset[Event]
    """The events that somebody needs; the others are left out."""
    cost: int
    """Time spent on running operators again."""
    peak: int
    live: tuple[int, ...]
    """Bytes while each run of :func:`order` runs."""

    @property
    def peak_at(self) -> int:
        """The run at which most is live."""
        return max(range(len(self.live)), key=self.live.__getitem__)


def order(problem: Problem, events: Iterable[Event]) -> list[Event]:
    """All runs in order, as instant and operator; a mandatory one has both the same."""
    blocks: dict[int, set[int]] = {}
    for instant, op in events:
        blocks.setdefault(instant, set()).add(op)
    runs: list[Event] = []
    for instant in range(len(problem.ops)):
        runs += [(instant, op) for op in sorted(blocks.get(instant, ()))]
        runs.append((instant, instant))
    return runs


def evaluate(problem: Problem, events: Iterable[Event]) -> Outcome:
    """Cost and bytes of a schedule, without the events that nobody needs."""
    runs, ends = _needed(problem, order(problem, events))
    live = [problem.fixed[instant] + problem.workspace[op] for instant, op in runs]
    change = [0] * (len(runs) + 1)
    for storage, first, last in ends:
        change[first] += problem.bytes[storage]
        change[last + 1] -= problem.bytes[storage]
        if first < last < len(runs):
            instant, op = runs[last]
            if problem.over[op] == storage:
                made = problem.writes[op][0]
                if instant == op or not problem.kept[made]:
                    live[last] -= problem.bytes[storage]
    for charge, start in _charged(problem, runs):
        change[start] += problem.charges[charge].bytes
    live = [own + across for own, across in zip(live, accumulate(change[:-1]), strict=True)]
    again = [run for run in runs if run[0] != run[1]]
    cost = sum(problem.repeat[op] for _, op in again)
    return Outcome(frozenset(again), cost, max(live, default=problem.resident), tuple(live))


def held_at(problem: Problem, events: Iterable[Event], instants: Sequence[int]) -> list[set[int]]:
    """The storages that are live while the mandatory operators of these instants run."""
    runs, lives = _needed(problem, order(problem, events))
    place = {run: k for k, run in enumerate(runs)}
    at = [place[t, t] for t in instants]
    return [{s for s, first, last in lives if first <= k <= last} for k in at]


def _needed(problem: Problem, runs: list[Event]) -> tuple[list[Event], list[tuple[int, int, int]]]:
    """The runs that matter, and for each life of a storage its first and last run among them."""
    last_use: dict[int, Event] = {}
    useful: list[Event] = []
    lives: list[tuple[int, Event | None, Event | None]] = []
    for run in reversed(runs):
        instant, op = run
        made = problem.writes[op]
        if instant != op and not any(s in last_use for s in made if not problem.kept[s]):
            continue
        useful.append(run)
        for s in made:
            if not problem.kept[s]:
                lives.append((s, run, last_use.pop(s, run)))
            elif instant == op:
                lives.append((s, run, None))
            else:
                lives.append((s, run, run))
        for s in problem.reads[op]:
            if not problem.kept[s]:
                last_use.setdefault(s, run)
    lives += [(s, None, run) for s, run in last_use.items()]
    useful.reverse()
    place = {run: k for k, run in enumerate(useful)}
    end = len(useful) - 1
    return useful, [
        (s, place[first] if first else 0, place[last] if last else end) for s, first, last in lives
    ]


def _charged(problem: Problem, runs: list[Event]) -> list[tuple[int, int]]:
    """Charges that the runs bring, each with the position it counts from."""
    brought = {
        charge
        for instant, op in runs
        if instant != op
        for charge in problem.charged[op]
        if instant >= problem.charges[charge].when
    }
    if not brought:
        return []
    starts = {}
    wanted = {(problem.charges[c].instant, problem.charges[c].op): 0 for c in brought}
    for start in wanted:
        starts[start] = next(k for k, run in enumerate(runs) if run >= start)
    return [(c, starts[problem.charges[c].instant, problem.charges[c].op]) for c in sorted(brought)]
