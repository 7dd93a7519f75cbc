"""A search that starts over: in another order, below another height, with more nodes in every round.

    height │ best so far ─────        Branch and bound in one order mostly finds a placement at once or not
           │ 1/8 below   ─ ─ ─        at all, and which order does is not known before. So each order gets few
           │ 1/4 below   ─ ─ ─        nodes, then each gets more. The lower the height that is asked for, the
           │ lower bound ─────        more is pruned: some placements are found from below alone.
           └───────────────────

Nodes are counted instead of seconds: on a slower or busier machine the search does the same, only later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lowtide.plan.address.boxes import Ints

__all__ = ["SearchBelow", "search_again"]

_SHARES = (4, 8)
"""Heights between the lower bound and the best so far: lower by the gap over each of these."""
_FIRST_NODES = 500
_GROWTH = 8
"""Nodes of a round over those of the one before."""
_ALL_NODES = 1_000_000
"""A round with more has no limit, so that it can prove something."""
_FEW = 100
_PROOF_SHARE = 0.02
"""Of the time, for a search of few boxes without a limit at first: often it proves all there is to prove."""


class SearchBelow(Protocol):
    """A search below a height."""

    def below(
        self, height: int, orders: Sequence[str], seconds: float, nodes: int | None = None
    ) -> tuple[Ints | None, bool]:
        """A placement lower than that, or None; and whether there is none lower."""


class _Again:
    """The gap between the best height so far and what no placement is lower than."""

    def __init__(
        self,
        solver: SearchBelow,
        take: Callable[[Ints], int],
        heights: tuple[int, int],
        deadline: float,
        pace: float,
    ) -> None:
        self.solver, self.take, self.deadline = solver, take, deadline
        self.low, self.best = heights
        self.failed: set[tuple[Sequence[str], int, int | None]] = set()
        """Searches that found nothing: they would find nothing again."""
        self.late = 0.0
        """Seconds by which the latest search ended too late: it looks at the clock now and then only."""
        self.pace = pace
        """Seconds that a node took at most, or 0 where that is not worth to know."""

    @property
    def over(self) -> bool:
        return self.best <= self.low or time.perf_counter() + self.late >= self.deadline

    def tried(self, height: int, orders: Sequence[str], nodes: int | None, seconds: float = 1e9) -> bool:
        """Whether a search found something; what it found or proved is kept."""
        key = orders, height, nodes
        began = time.perf_counter()
        seconds = min(seconds, self.deadline - self.late - began)
        if self.over or key in self.failed or seconds <= 0:
            return False
        if nodes is not None and nodes * self.pace > seconds:
            nodes = int(seconds / self.pace) + 1
        found, proven = self.solver.below(height, orders, seconds, nodes)
        took = time.perf_counter() - began
        self.late = max(self.late, took - seconds)
        if self.pace and nodes:
            self.pace = max(self.pace, took / nodes)
        if found is None:
            self.failed.add(key)
            if proven:
                self.low = max(self.low, height)
            return False
        self.best = min(self.best, self.take(found))
        if proven:
            self.low = self.best
        return True

    def between(self, orders: Sequence[str], nodes: int | None) -> None:
        """At heights between, as long as one is found."""
        for share in _SHARES:
            while self.tried(max(self.low + 1, self.best - (self.best - self.low) // share), orders, nodes):
                pass


def search_again(
    solver: SearchBelow,
    orders: Sequence[Sequence[str]],
    take: Callable[[Ints], int],
    heights: tuple[int, int],
    *,
    deadline: float,
    boxes: int = 0,
    pace: float = 0.0,
) -> bool:
    """Search until the deadline; whether the lowest height that was taken is proven to be the lowest.

    ``orders`` are those that are tried at once, group after group. ``heights`` are the lower bound and the
    best height so far; ``take`` gets each placement and gives its height. ``deadline`` is that of
    perf_counter; ``pace`` is what a node takes in seconds, roughly, where there are so many boxes that
    a search may look at the clock too late.
    """
    state = _Again(solver, take, heights, deadline, pace)
    if boxes <= _FEW:
        state.tried(state.best, tuple(orders[0]), None, _PROOF_SHARE * (deadline - time.perf_counter()))
    for at_bound, between in _rounds(max(_FIRST_NODES, 2 * boxes if pace else boxes * 5 // 4)):
        for group in orders:
            state.tried(state.low + 1, tuple(group), at_bound)
            if at_bound != between:  # no longer quick: neither waits for the other's whole round
                state.between(tuple(group), between)
        for group in orders:
            state.between(tuple(group), between)
        if state.over:
            break
    return state.best <= state.low


def _rounds(first: int) -> Iterator[tuple[int | None, int | None]]:
    """Nodes at the lower bound and between, in each round: between they grow one round later."""
    nodes, before = first, first
    while nodes < _ALL_NODES:
        yield nodes, before
        nodes, before = nodes * _GROWTH, nodes
    while True:
        yield None, None
