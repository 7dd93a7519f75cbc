"""The optimum of a small problem: the shortest path over what has run and what is held.

A state is the set of operators that have run and the storages held. Any operator may run next whose
predecessors have run, and any may run again, in any order and number. Letting go is free, so holding more at
the same cost is never worse, and storages are let go of only where a run needs the room. Charges are left
out, which makes the result a lower bound where there are some.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lowtide.plan.problem.precedence import bits
from lowtide.plan.problem.problem import Problem

__all__ = ["Exact", "exact"]

_State = tuple[int, int]
"""Operators that have run, and storages held, as bit masks."""
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
    before: Sequence[int],
    *,
    at_end: Collection[int] = (),
    known: int | None = None,
    states: int = 20_000,
    deadline: float | None = None,
) -> Exact:
    """The cheapest line of runs inside the budget, if it costs less than ``known``.

    ``before`` are for each operator those that must have run before its first run, as a bit mask; ``at_end``
    are storages that must be there in the end.
    """
    return _Paths(problem, budget, before, at_end).shortest(known, states, deadline)


class _Paths:
    def __init__(self, problem: Problem, budget: int, before: Sequence[int], at_end: Collection[int]) -> None:
        self.problem = problem
        self.budget = budget
        self.before = before
        self.at_end = _mask(at_end)
        self.everything = (1 << len(problem.ops)) - 1
        self.forward = (1 << problem.split) - 1
        self.reads = [_mask(row) for row in problem.reads]
        self.writes = [_mask(row) for row in problem.writes]
        self.kept = _mask(s for s, keep in enumerate(problem.kept) if keep)
        self.again = _mask(v for v, again in enumerate(problem.again) if again)
        self._wanted: dict[int, int] = {}
        self._known: dict[int, int] = {0: 0}
        self._left = 0
        self._deadline: float | None = None

    def shortest(self, known: int | None, states: int, deadline: float | None) -> Exact:
        problem = self.problem
        self._left, self._deadline = states * _SETS, deadline
        start = 0, _mask(s for s, p in enumerate(problem.producer) if p < 0 and problem.readers[s])
        costs: dict[_State, int] = {start: 0}
        came: dict[_State, tuple[_State, int]] = {}
        queue = [(0, 0, *start)]
        seen: dict[int, list[int]] = {}
        count = 0
        while queue:
            cost, _, done, live = heapq.heappop(queue)
            state = done, live
            if known is not None and cost >= known:
                return Exact(True, known, None)
            if done == self.everything and not self.at_end & ~live:
                return Exact(True, cost, self._line(came, state))
            others = seen.setdefault(done, [])
            if costs[state] < cost or any(other & live == live for other in others):
                continue
            others.append(live)
            count += 1
            if count > states or (not count & 127 and self._late()):
                return Exact(False, cost, None)
            steps = list(self._steps(cost, done, live))
            if self._left < 0:
                return Exact(False, cost, None)
            for price, then, op in steps:
                if price < costs.get(then, price + 1):
                    costs[then] = price
                    came[then] = state, op
                    heapq.heappush(queue, (price, -then[0].bit_count(), *then))
        return Exact(True, 0 if known is None else known, None)

    def _late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _steps(self, cost: int, done: int, live: int) -> Iterator[tuple[int, _State, int]]:
        ready = [
            op
            for op in bits(self.everything & ~done)
            if not self.before[op] & ~done and not self.reads[op] & ~live
        ]
        for op in ready:
            then = done | 1 << op
            keep = self.wanted(then) | self.kept
            following = [(cost, (then, held & keep), op) for held in self._held_after(done, live, op)]
            yield from following
        wanted = self.wanted(done)
        for op in bits(done & self.again):
            new = self.writes[op] & ~live & ~self.kept & wanted
            if new and not self.reads[op] & ~live:
                price = cost + self.problem.repeat[op]
                for held in self._held_after(done, live, op):
                    yield price, (done, held & (wanted | self.kept)), op

    def _held_after(self, done: int, live: int, op: int) -> Iterator[int]:
        """What can be held after a run: the largest sets that leave it enough room."""
        problem = self.problem
        again = done >> op & 1
        own = (live & self.kept) | self.reads[op] | self.writes[op]
        part = -1 if not self.forward & ~done else 0
        need = problem.fixed[part] + problem.workspace[op] + self._bytes(own)
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

    def wanted(self, done: int) -> int:
        """The storages that what comes may read, directly or by running again."""
        found = self._wanted.get(done)
        if found is None:
            found = self.at_end
            for op in bits(self.everything & ~done):
                found |= self.reads[op]
            stack = list(bits(found))
            while stack:
                producer = self.problem.producer[stack.pop()]
                if producer >= 0 and self.again >> producer & 1:
                    new = self.reads[producer] & ~found
                    found |= new
                    stack += bits(new)
            self._wanted[done] = found
        return found

    def _line(self, came: dict[_State, tuple[_State, int]], state: _State) -> tuple[int, ...]:
        runs: list[int] = []
        while state in came:
            state, op = came[state]
            runs.append(op)
        return tuple(reversed(runs))


def _mask(items: Iterable[int]) -> int:
    total = 0
    for item in items:
        total |= 1 << item
    return total
