"""Pauses: mandatory operators that do nothing, so that an operator may run twice before an instant.

A block of events runs in program order and each operator at most once. With pauses in front of an instant
there are several blocks, hence any order and any number of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event

__all__ = ["as_events", "with_pauses"]

_T = TypeVar("_T")


def with_pauses(problem: Problem, counts: Sequence[int]) -> Problem:
    """The problem with so many pauses before each of its operators."""
    if not any(counts):
        return problem
    source: list[int] = []
    """For each operator of the new problem the old one, or the old one that a pause stands before."""
    pause: list[bool] = []
    for op, count in enumerate(counts):
        source += [op] * (count + 1)
        pause += [True] * count + [False]
    place = {old: new for new, old in enumerate(source) if not pause[new]}

    def spread(values: Sequence[_T], nothing: _T) -> tuple[_T, ...]:
        return tuple(nothing if idle else values[old] for old, idle in zip(source, pause, strict=True))

    return replace(
        problem,
        ops=spread(problem.ops, -1),
        split=sum(old < problem.split for old in source),
        time=spread(problem.time, 0),
        repeat=spread(problem.repeat, 0),
        workspace=spread(problem.workspace, 0),
        asked=spread(problem.asked, False),
        again=spread(problem.again, False),
        reads=spread(problem.reads, ()),
        writes=spread(problem.writes, ()),
        over=spread(problem.over, -1),
        producer=tuple(place.get(op, -1) for op in problem.producer),
        fixed=tuple(problem.fixed[old] for old in source),
        charges=tuple(
            replace(
                charge,
                instant=_first(source, charge.instant) if charge.op == 0 else place[charge.instant],
                op=0 if charge.op == 0 else place[charge.op],
                when=_first(source, charge.when) if charge.when < len(problem.ops) else len(source),
            )
            for charge in problem.charges
        ),
        charged=spread(problem.charged, ()),
        fetched=tuple((place[op], tensor) for op, tensor in problem.fetched),
    )


def _first(source: Sequence[int], op: int) -> int:
    """The first pause before an operator, or the operator itself."""
    return source.index(op)


def as_events(problem: Problem, runs: Sequence[int]) -> tuple[Problem, frozenset[Event]]:
    """A line of runs, each operator's first one mandatory, as a schedule; with pauses where it needs them."""
    counts = [0] * len(problem.ops)
    blocks: list[list[list[int]]] = [[]]
    instant = 0
    for op in runs:
        if op == instant:
            counts[instant] = max(0, len(blocks[-1]) - 1)
            blocks.append([])
            instant += 1
        elif not blocks[-1] or op <= blocks[-1][-1][-1]:
            blocks[-1].append([op])
        else:
            blocks[-1][-1].append(op)
    paused = with_pauses(problem, counts)
    real = [k + pauses for k, pauses in enumerate(accumulate(counts))]
    events: set[Event] = set()
    for instant, parts in enumerate(blocks[: len(problem.ops)]):
        for back, part in enumerate(reversed(parts)):
            events.update((real[instant] - back, real[op]) for op in part)
    return paused, frozenset(events)
