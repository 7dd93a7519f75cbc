"""Storages that wait on the host: which, and when they leave and come back.

A storage that is moved lives twice: up to its last use before the gap, held until its copy has ended, and
from the start of its copy back. What is planned then is recomputation again, with two more kinds of operators
that take no time, one that reads the storage and one that makes it:

    make x ─ send x ... last early use ... [copy ended]      [fetch x] ... first late use
             └────────── x, first life ───────┘                  └──── x, second life
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import TypeVar

from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event, evaluate, order
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.memory import on_host

__all__ = ["Trip", "by_instant", "carried", "hurried", "prefix", "relaxed", "trips", "with_trips"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Trip:
    """One storage's way to the host and back, by instants of the problem."""

    storage: int
    gone: int
    """Its memory is free from this operator on."""
    back: int
    """Its copy back starts before this operator."""
    late: int
    """The first operator that reads it afterwards."""


def trips(
    problem: Problem,
    away: Mapping[int, int],
    link: Link,
    begins: Sequence[float] = (),
    events: Collection[Event] = (),
) -> list[Trip]:
    """When each storage is gone over the instant it is given with, lanes working first in, first out.

    Copies out start when a storage is made; copies back start as late as the first late use allows. What does
    not come out in time, or would have to come back before its instant, is waited for. ``begins`` says when
    each operator starts; without it, as in the plain step. ``events`` may read a storage late as well.
    """
    begins = begins or [0, *accumulate(problem.time)]
    ends = _copies_out(problem, away, link, begins)
    late = {s: _late(problem, s, away[s]) for s in ends}
    for t, v in events:
        for s in problem.reads[v]:
            if s in late and t > away[s] and (late[s] < 0 or t < late[s]):
                late[s] = t
    found: list[Trip] = []
    following = inf
    for s in sorted(late, key=lambda s: (-late[s], s)):
        early = max((r for r in problem.readers[s] if r <= away[s]), default=problem.producer[s])
        if late[s] < 0 or early >= away[s]:
            continue
        following = min(begins[late[s]], following) - problem.bytes[s] / link.to_device * problem.scale
        gone = max(early + 1, bisect_left(begins, ends[s]))
        back = bisect_right(begins, following) - 1
        found.append(Trip(s, min(gone, away[s]), max(back, away[s] + 1), late[s]))
    return found


def prefix(problem: Problem, cut: int, wanted: int) -> dict[int, int]:
    """The storages made first, to so many bytes, that are read again only after ``cut``: away over it.

    What is made first is read last: it has the longest way, and the lane to the host starts at once.
    """
    found: dict[int, int] = {}
    for s in sorted(range(len(problem.bytes)), key=lambda s: problem.producer[s]):
        able = 0 <= problem.producer[s] < cut and not problem.kept[s] and problem.bytes[s]
        if wanted > 0 and able and _late(problem, s, cut) > cut:
            found[s] = cut
            wanted -= problem.bytes[s]
    return found


def hurried(
    problem: Problem, taken: Sequence[Trip], away: Mapping[int, int], live: Sequence[int], budget: int
) -> list[Trip]:
    """The trips, with memory given up earlier and taken later wherever the budget is exceeded otherwise.

    ``live`` are the bytes at each instant with these trips. Whoever drops before a copy has ended, or reads
    before it has arrived, waits.
    """
    found = {trip.storage: trip for trip in taken}
    early = {
        s: max((r for r in problem.readers[s] if r <= away[s]), default=problem.producer[s]) for s in found
    }
    now = list(live)

    def free(storage: int, start: int, end: int) -> None:
        for t in range(start, end):
            now[t] -= problem.bytes[storage]

    by_birth = sorted(found, key=lambda s: problem.producer[s])
    for t in range(len(now)):
        for s in by_birth if now[t] > budget else ():
            if now[t] > budget and early[s] < t < found[s].gone:
                free(s, t, found[s].gone)
                found[s] = replace(found[s], gone=t)
    by_use = sorted(found, key=lambda s: -found[s].late)
    for t in reversed(range(len(now))):
        for s in by_use if now[t] > budget else ():
            if now[t] > budget and found[s].back <= t < found[s].late:
                free(s, found[s].back, t + 1)
                found[s] = replace(found[s], back=t + 1)
    return list(found.values())


def relaxed(
    problem: Problem, taken: Sequence[Trip], wished: Sequence[Trip], live: Sequence[int], budget: int
) -> list[Trip]:
    """The trips, each nearer to when it is wished to leave and come back, as far as the budget reaches.

    ``live`` are the bytes at each instant with the trips as they are.
    """
    found = {trip.storage: trip for trip in taken}
    aims = {**found, **{trip.storage: trip for trip in wished}}
    now = list(live)
    for s in sorted(found, key=lambda s: found[s].late):
        size, back = problem.bytes[s], found[s].back
        while back > aims[s].back and now[back - 1] + size <= budget:
            back -= 1
            now[back] += size
        found[s] = replace(found[s], back=back)
    for s in sorted(found, key=lambda s: problem.producer[s]):
        size, gone = problem.bytes[s], found[s].gone
        while gone < min(aims[s].gone, found[s].back) and now[gone] + size <= budget:
            now[gone] += size
            gone += 1
        found[s] = replace(found[s], gone=gone)
    return list(found.values())


def _copies_out(
    problem: Problem, away: Mapping[int, int], link: Link, begins: Sequence[float]
) -> dict[int, float]:
    """When the copy of each storage that can leave has ended."""
    free = 0.0
    ends: dict[int, float] = {}
    for s in sorted(away, key=lambda s: problem.producer[s]):
        made = problem.producer[s]
        if made < 0 or problem.kept[s] or problem.graph.tensors[problem.owner[s]].alias is not None:
            continue
        if on_host(problem.graph, problem.owner[s]):
            continue
        free = max(free, begins[made + 1]) + problem.bytes[s] / link.to_host * problem.scale
        ends[s] = free
    return ends


def _late(problem: Problem, s: int, cut: int) -> int:
    """The first operator after the cut that reads a storage, or -1."""
    return next((r for r in problem.readers[s] if r > cut), -1)


def with_trips(problem: Problem, taken: Sequence[Trip]) -> Problem:
    """The problem in which these storages are away for a while: the rest is recomputation."""
    if not taken:
        return problem
    before: dict[int, list[tuple[int, Trip]]] = {}
    for trip in sorted(taken, key=lambda trip: (trip.late, trip.storage)):
        before.setdefault(trip.gone, []).append((0, trip))
        before.setdefault(trip.back, []).append((1, trip))
    line: list[tuple[int, int, Trip | None]] = []
    """For each operator of the new problem its old one, or what stands before it: 0 copied out, 1 fetched."""
    for op in range(len(problem.ops)):
        line += [(op, kind, trip) for kind, trip in sorted(before.get(op, ()), key=lambda one: one[0])]
        line.append((op, -1, None))
    place = {op: k for k, (op, kind, _) in enumerate(line) if kind < 0}
    moved = {trip.storage for trip in taken}

    def spread(values: Sequence[_T], nothing: _T) -> tuple[_T, ...]:
        return tuple(values[op] if kind < 0 else nothing for op, kind, _ in line)

    reads, writes = list(spread(problem.reads, ())), list(spread(problem.writes, ()))
    fetched: list[tuple[int, int]] = []
    for k, (_, kind, on_way) in enumerate(line):
        if on_way is not None and kind == 0:
            reads[k] = (on_way.storage,)
        elif on_way is not None:
            writes[k] = (on_way.storage,)
            fetched.append((k, problem.owner[on_way.storage]))

    def since(op: int) -> int:
        """The first operator of the new problem that stands at or before this one."""
        return sum(other < op for other, _, _ in line)

    return replace(
        problem,
        ops=spread(problem.ops, -1),
        split=since(problem.split),
        time=spread(problem.time, 0),
        repeat=spread(problem.repeat, 0),
        workspace=spread(problem.workspace, 0),
        asked=spread(problem.asked, False),
        again=spread(problem.again, False),
        reads=tuple(reads),
        writes=tuple(writes),
        over=spread([-1 if source in moved else source for source in problem.over], -1),
        producer=tuple(place.get(op, -1) for op in problem.producer),
        fixed=tuple(problem.fixed[op] for op, _, _ in line),
        charges=tuple(
            replace(c, instant=place[c.instant], op=place[c.op], when=since(c.when))
            if c.op
            else replace(c, instant=since(c.instant), when=since(c.when))
            for c in problem.charges
        ),
        charged=spread(problem.charged, ()),
        sent=tuple(sorted(moved)),
        fetched=tuple(fetched),
    )


def carried(source: Problem, target: Problem, events: Iterable[Event]) -> frozenset[Event]:
    """A schedule of a problem as one of the same problem with other storages away."""
    place = _places(source, target)
    return frozenset((place[t], place[v]) for t, v in events)


def by_instant(source: Problem, problem: Problem, events: Iterable[Event]) -> list[int]:
    """The most bytes that are live before or while each operator of ``source`` runs."""
    outcome = evaluate(problem, events)
    place = _places(problem, source)
    found = [0] * len(source.ops)
    for (instant, _), live in zip(order(problem, outcome.events), outcome.live, strict=True):
        found[place[instant]] = max(found[place[instant]], live)
    return found


def _places(source: Problem, target: Problem) -> list[int]:
    """For each operator of a problem its place in another; for a copy that of the operator after it."""
    known = {op: k for k, op in enumerate(target.ops) if op >= 0}
    found, at = [0] * len(source.ops), len(target.ops) - 1
    for k in reversed(range(len(source.ops))):
        found[k] = at = known.get(source.ops[k], at)
    return found
