"""The optimum of a small problem: the shortest path over what is held.

A state is the next mandatory operator and the storages held. Letting go is free, so holding more at the same
cost is never worse, and storages are let go of only where a run needs the room. Any operator may run again in
any order and number. Charges are left out, which makes the result a lower bound where there are some.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowtide.plan.problem import Problem

__all__ = ["Exact", "exact"]

_State = tuple[int, int]
_SETS = 200
"""What may be held is looked for in so many steps a state, all states together."""


@dataclass(frozen=True, slots=True)
class Exact:
    """How an exact search ended."""

    finished: bool
    """False: too many states; nothing is known then but the bound."""
    bound: int
    """No schedule costs less."""
    runs: tuple[int, ...] | None
    """All runs in order, mandatory ones among them; None: there are none cheaper than what was known."""


def exact(
    problem: Problem,
    budget: int,
    *,
    known: int | None = None,
    states: int = 20_000,
    deadline: float | None = None,
) -> Exact:
    """The cheapest line of runs inside the budget, if it costs less than ``known``."""
    return _Paths(problem, budget).shortest(known, states, deadline)


class _Paths:
    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.reads = [_mask(row) for row in problem.reads]
        self.writes = [_mask(row) for row in problem.writes]
        self.kept = _mask(s for s, keep in enumerate(problem.kept) if keep)
        self.wanted = self._wanted()
        self._known: dict[int, int] = {0: 0}
        self._left = 0
        self._deadline: float | None = None

    def shortest(self, known: int | None, states: int, deadline: float | None) -> Exact:
        problem = self.problem
        self._left, self._deadline = states * _SETS, deadline
        end = len(problem.ops)
        start = 0, _mask(s for s, p in enumerate(problem.producer) if p < 0 and problem.readers[s])
        costs: dict[_State, int] = {start: 0}
        came: dict[_State, tuple[_State, int]] = {}
        queue = [(0, 0, start[1])]
        done: dict[int, list[int]] = {}
        count = 0
        while queue:
            cost, negative, live = heapq.heappop(queue)
            state = -negative, live
            if known is not None and cost >= known:
                return Exact(True, known, None)
            if state[0] == end:
                return Exact(True, cost, self._line(came, state))
            seen = done.setdefault(state[0], [])
            if costs[state] < cost or any(other & live == live for other in seen):
                continue
            seen.append(live)
            count += 1
            if count > states or (not count & 127 and self._late()):
                return Exact(False, cost, None)
            steps = list(self._steps(cost, *state))
            if self._left < 0:
                return Exact(False, cost, None)
            for price, then, op in steps:
                if price < costs.get(then, price + 1):
                    costs[then] = price
                    came[then] = state, op
                    heapq.heappush(queue, (price, -then[0], then[1]))
        return Exact(True, 0 if known is None else known, None)

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _steps(self, cost: int, instant: int, live: int) -> Iterator[tuple[int, _State, int]]:
        problem, wanted = self.problem, self.wanted
        if not self.reads[instant] & ~live:
            for held in self._held_after(instant, live, instant):
                yield cost, (instant + 1, held & (wanted[instant + 1] | self.kept)), instant
        for op in range(instant):
            new = self.writes[op] & ~live & ~self.kept & wanted[instant]
            if problem.again[op] and new and not self.reads[op] & ~live:
                for held in self._held_after(instant, live, op):
                    yield cost + problem.repeat[op], (instant, held & (wanted[instant] | self.kept)), op

    def _held_after(self, instant: int, live: int, op: int) -> Iterator[int]:
        """What can be held after a run: the largest sets that leave it enough room."""
        problem = self.problem
        again = op != instant
        own = (live & self.kept) | self.reads[op] | self.writes[op]
        need = problem.fixed[instant] + problem.workspace[op] + self._bytes(own)
        if again:
            need += self._bytes(self.writes[op] & self.kept)
        source = problem.over[op]
        taken = [0]
        if source >= 0 and not (again and problem.kept[problem.writes[op][0]]):
            taken.append(1 << source)
        for gone in taken:
            room = self.budget - need + self._bytes(gone)
            if room >= 0:
                for held in self._largest(live & ~own, room):
                    yield (own | held) & ~gone

    def _largest(self, free: int, room: int) -> list[int]:
        """The largest subsets of ``free`` that take at most ``room``; not all of them once work is up."""
        if self._bytes(free) <= room:
            return [free]
        sizes = self.problem.bytes
        items = sorted((s for s in range(free.bit_length()) if free >> s & 1), key=lambda s: -sizes[s])
        found: list[int] = []
        stack = [(0, 0, room, room + 1)]
        while stack and self._left >= 0:
            self._left = -1 if not self._left & 4095 and self._late() else self._left - 1
            k, chosen, left, skipped = stack.pop()
            if k == len(items):
                if skipped > left:
                    found.append(chosen)
                continue
            size = sizes[items[k]]
            if size:
                stack.append((k + 1, chosen, left, min(skipped, size)))
            if size <= left:
                stack.append((k + 1, chosen | 1 << items[k], left - size, skipped))
        return found

    def _bytes(self, mask: int) -> int:
        found = self._known.get(mask)
        if found is None:
            low = mask & -mask
            rest = self._bytes(mask ^ low)
            found = self._known[mask] = rest + self.problem.bytes[low.bit_length() - 1]
        return found

    def _wanted(self) -> list[int]:
        """For each instant the storages that what comes may read, directly or by running again."""
        problem = self.problem
        found: list[int] = [0]
        held = 0
        for op in reversed(range(len(problem.ops))):
            stack = list(problem.reads[op])
            while stack:
                s = stack.pop()
                if not held >> s & 1:
                    held |= 1 << s
                    producer = problem.producer[s]
                    if producer >= 0 and problem.again[producer]:
                        stack += problem.reads[producer]
            found.append(held)
        return found[::-1]

    def _line(self, came: dict[_State, tuple[_State, int]], state: _State) -> tuple[int, ...]:
        runs: list[int] = []
        while state in came:
            state, op = came[state]
            runs.append(op)
        return tuple(reversed(runs))


def _mask(storages: Iterable[int]) -> int:
    total = 0
    for s in storages:
        total |= 1 << s
    return total
