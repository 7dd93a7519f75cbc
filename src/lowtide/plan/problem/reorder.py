"""Operators in another order: one that holds less, or one that a search has found.

In the lean order whoever lets go of more than it makes runs as soon as it can, so that gradients and
activations are released early; whoever makes more than it reads runs as late as it can, such as the gradient
of a large weight. Operators whose order shows in the result stay in their order
(:mod:`lowtide.plan.problem.precedence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from lowtide.plan.problem.precedence import precedence
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event

__all__ = ["in_order", "lean_order", "moved"]

_T = TypeVar("_T")


def lean_order(problem: Problem) -> list[int]:
    """The operators of a problem in an order that releases storages early and takes them late."""
    planned = precedence(problem).planned
    readers, sizes = problem.readers, problem.bytes
    made = [sum(sizes[s] for s in writes) for writes in problem.writes]
    line = _Line(len(problem.ops))
    for v in range(1, len(problem.ops)):
        dying = {s for s in problem.reads[v] if not problem.kept[s] and readers[s][-1] == v}
        if sum(sizes[s] for s in dying) <= made[v] + problem.workspace[v]:
            continue
        after = planned[v]
        for r in (r for s in dying for r in readers[s] if r != v):
            after |= 1 << r
        line.hoist(v, after)
    for v in reversed(range(len(problem.ops))):
        if made[v] > sum(sizes[s] for s in problem.reads[v] if not problem.kept[s]):
            line.put_off(v, planned, problem.split)
    return line.members()


class _Line:
    """Operators one after the other, each of which can be moved in no time; -1 stands for either end."""

    def __init__(self, size: int) -> None:
        self.before = list(range(-1, size))
        self.behind = [*range(1, size), -1, 0] if size else [-1]

    def members(self) -> list[int]:
        found, v = [], self.behind[-1]
        while v >= 0:
            found.append(v)
            v = self.behind[v]
        return found

    def hoist(self, v: int, after: int) -> None:
        """Move an operator to right after the last of those it must follow."""
        to = self.before[v]
        while to >= 0 and not after >> to & 1:
            to = self.before[to]
        self._move(v, to)

    def put_off(self, v: int, planned: Sequence[int], split: int) -> None:
        """Move an operator to right before the first that must follow it, in its part of the step."""
        to, follows = v, self.behind[v]
        while follows >= 0 and not planned[follows] >> v & 1 and (follows < split) == (v < split):
            to, follows = follows, self.behind[follows]
        self._move(v, to)

    def _move(self, v: int, to: int) -> None:
        """To right behind another, or to the front."""
        if to in (v, self.before[v]):
            return
        first, last = self.before[v], self.behind[v]
        self.behind[first], self.before[last] = last, first
        follows = self.behind[to]
        self.behind[to], self.before[v] = v, to
        self.behind[v], self.before[follows] = follows, v


def in_order(problem: Problem, order: Sequence[int]) -> Problem:
    """The problem with its operators in another order, which keeps forward before backward."""
    place = [0] * len(order)
    for new, old in enumerate(order):
        place[old] = new

    def sorted_as(values: Sequence[_T]) -> tuple[_T, ...]:
        return tuple(values[old] for old in order)

    return replace(
        problem,
        ops=sorted_as(problem.ops),
        time=sorted_as(problem.time),
        repeat=sorted_as(problem.repeat),
        workspace=sorted_as(problem.workspace),
        asked=sorted_as(problem.asked),
        again=sorted_as(problem.again),
        reads=sorted_as(problem.reads),
        writes=sorted_as(problem.writes),
        over=sorted_as(problem.over),
        producer=tuple(place[v] if v >= 0 else -1 for v in problem.producer),
        charges=tuple(
            replace(c, instant=place[c.instant], op=place[c.op]) if c.op else c for c in problem.charges
        ),
        charged=sorted_as(problem.charged),
    )


def moved(order: Sequence[int], events: Iterable[Event]) -> frozenset[Event]:
    """The events of a problem as those of the same problem in another order.

    A second run that would come before the first one there is left out.
    """
    place = {old: new for new, old in enumerate(order)}
    return frozenset((place[t], place[v]) for t, v in events if place[v] < place[t])
