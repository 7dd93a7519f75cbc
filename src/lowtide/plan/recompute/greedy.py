"""Greedy by next use: walk through the step, and where memory is short let go of what costs least.

What costs least is the time of making a storage again, with those of its ancestors that are gone too, for
its bytes and the distance to its next use. Quick, and feasible at nearly every budget: the fallback.
"""

from __future__ import annotations

from bisect import bisect_right

from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event

__all__ = ["greedy"]

_ANCESTORS = 200
"""So many operators are looked at to find out what making a storage again takes."""
_MANY = 200
"""Where so many storages could be let go of, they are put in order anew only when some of them are gone."""
_SHARE = 16
"""Of that order, one in so many is used before it is made anew."""


def greedy(problem: Problem, budget: int) -> frozenset[Event]:
    """A schedule that aims at the budget; ``evaluate`` says whether it keeps it."""
    walk = _Walk(problem, budget)
    for op in range(len(problem.ops)):
        walk.mandatory(op)
    return frozenset(walk.events)


class _Walk:
    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.events: set[Event] = set()
        self.live: set[int] = set()
        self.bytes = 0
        self.now = 0
        self.touched: set[int] = set()
        """Storages read or made at this instant: only they can be of no more use after it."""
        self.times: dict[int, int] = {}
        """What it takes to make storages again, as long as that is known."""
        self.rests_on: list[set[int]] = [set() for _ in problem.bytes]
        """By storage, whose times depend on whether it is there."""
        self.cheapest: list[int] = []
        """What is to be let go of next, where there are many, the last one first."""
        for s, readers in enumerate(problem.readers):
            if problem.producer[s] < 0 and readers:
                self._hold(s)

    def mandatory(self, op: int) -> None:
        """Run an operator for the first time, with what it needs made again before."""
        self.now = op
        self.touched.clear()
        self._ensure(op)
        self._run(op)
        for s in self.touched & self.live:
            if not self.problem.kept[s] and not self._wanted_later(s):
                self._release(s)

    def _wanted_later(self, s: int) -> bool:
        """Whether a mandatory operator still to come reads it, before it comes from the host."""
        readers, back = self.problem.readers[s], self.problem.back[s]
        if back > self.now:
            place = bisect_right(readers, self.now)
            return place < len(readers) and readers[place] < back
        return bool(readers) and readers[-1] > self.now

    def _ensure(self, op: int) -> None:
        """Make every input of an operator live."""
        problem = self.problem
        pending = [op]
        while pending:
            head = pending[-1]
            missing = [s for s in problem.reads[head] if s not in self.live]
            if missing:
                producer = min(problem.producer[s] for s in missing)
                if producer < 0 or not problem.again[producer]:
                    return  # gone for good: the schedule will hold it longer instead
                pending.append(producer)
                continue
            pending.pop()
            if head != op:
                self.events.add((self.now, head))
                waiting = {s for other in pending for s in problem.reads[other]}
                self._run(head, waiting)

    def _run(self, op: int, waiting: set[int] | None = None) -> None:
        problem = self.problem
        own = {*problem.reads[op], *problem.writes[op]}
        self.touched |= own
        need = problem.workspace[op] + sum(problem.bytes[s] for s in problem.writes[op] if s not in self.live)
        room = self.budget - problem.fixed[self.now]
        self._make_room(room - need, own, waiting or set())
        for s in problem.writes[op]:
            if s not in self.live:
                self._hold(s)
        if waiting is not None:
            for s in problem.writes[op]:
                if s not in waiting and not self._wanted_later(s) and not problem.kept[s]:
                    self._release(s)
            for s in problem.reads[op]:
                gone = s not in waiting and not self._wanted_later(s) and not problem.kept[s]
                if (
                    s in self.live
                    and gone
                    and self.now not in problem.readers[s]
                    and problem.producer[s] >= 0
                ):
                    self._release(s)

    def _make_room(self, room: int, own: set[int], waiting: set[int]) -> None:
        busy = own | waiting
        while self.bytes > room and self.cheapest:  # by an order from before
            s = self.cheapest.pop()
            if s in self.live and s not in busy:
                self._release(s)
        if self.bytes <= room:
            return
        problem = self.problem
        free = [
            s
            for s in self.live
            if s not in busy and not problem.kept[s] and problem.producer[s] >= 0
            and problem.again[problem.producer[s]] and problem.producer[s] < problem.split
            and problem.bytes[s]
        ]  # fmt: skip
        free.sort(key=lambda s: (self._score(s), s))
        used = 0
        while used < len(free) and self.bytes > room:
            self._release(free[used])
            used += 1
        if len(free) > _MANY:
            self.cheapest = free[used : len(free) // _SHARE][::-1]

    def _score(self, s: int) -> float:
        problem = self.problem
        readers = problem.readers[s]
        place = bisect_right(readers, self.now)
        distance = (readers[place] if place < len(readers) else 2 * len(problem.ops)) - self.now
        return self._again(s) / (problem.bytes[s] * max(1, distance))

    def _again(self, s: int) -> int:
        """The time of making a storage again, with those of its ancestors that are gone."""
        time = self.times.get(s)
        if time is not None:
            return time
        live, producer, reads, repeat = (
            self.live,
            self.problem.producer,
            self.problem.reads,
            self.problem.repeat,
        )
        time, stack, seen = 0, [producer[s]], set[int]()
        while stack and len(seen) < _ANCESTORS:
            op = stack.pop()
            if op in seen:
                continue
            seen.add(op)
            time += repeat[op] + 1
            for u in reads[op]:
                self.rests_on[u].add(s)
                if u not in live:
                    stack.append(producer[u])
        self.times[s] = time
        return time

    def _hold(self, s: int) -> None:
        self.live.add(s)
        self.bytes += self.problem.bytes[s]
        self._forget(s)

    def _release(self, s: int) -> None:
        self.live.discard(s)
        self.bytes -= self.problem.bytes[s]
        self._forget(s)

    def _forget(self, s: int) -> None:
        """Forget times of what is made from a storage, which has come or gone."""
        for other in self.rests_on[s]:
            self.times.pop(other, None)
        self.rests_on[s].clear()
