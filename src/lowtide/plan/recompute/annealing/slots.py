"""Runs in their order with the bytes live during each, kept up to date run by run.

A slot is a run: ``key = instant * n + operator``. Slots lie in order in ``key``, the bytes live during each
in ``mem``. Inserting or removing a run changes the lives of what it writes and reads, nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

__all__ = ["NEVER", "Slots"]

NEVER = (1 << 63) - 1


class Slots:
    """A schedule with its bytes; a packed problem as :mod:`.kernel` makes it."""

    def __init__(self, packed: list[int], budget: int) -> None:
        self.budget = budget
        n, m, reads, writes, charges, charged, self.split = packed[:7]
        self.n = n
        at = 7

        def take(count: int) -> list[int]:
            nonlocal at
            at += count
            return packed[at - count : at]

        def rows(count: int) -> list[list[int]]:
            starts = take(n + 1)
            flat = take(count)
            return [flat[a:b] for a, b in pairwise(starts)]

        self.time, self.workspace, self.fixed, self.again, self.over = (take(n) for _ in range(5))
        self.reads, self.writes = rows(reads), rows(writes)
        self.bytes, self.producer, self.kept, self.back = take(m), take(m), take(m), take(m)
        self.charged = rows(charged)
        self.charge_bytes, self.charge_key, self.charge_when = take(charges), take(charges), take(charges)
        self.counts = [0] * charges
        self.copied = 0
        self.readers: list[list[int]] = [[] for _ in range(m)]
        for v, row in enumerate(self.reads):
            for s in row:
                self.readers[s].append(v)
        self.candidates = [
            s for s in range(m)
            if self.producer[s] >= 0 and not self.kept[s] and self.again[self.producer[s]]
            and self.bytes[s] > 0 and self.readers[s]
        ]  # fmt: skip
        self.runs = [[v] for v in range(n)]
        self.key = [v * n + v for v in range(n)]
        self.mem = [fixed + extra for fixed, extra in zip(self.fixed, self.workspace, strict=True)]
        for s in range(m):
            starts = [-1 if self.producer[s] < 0 else self.producer[s] * (n + 1)]
            starts += [self.back[s] * (n + 1)] if self.back[s] >= 0 else []
            for a, end in pairwise([*starts, NEVER]):
                e = n * n if self.kept[s] else self.last_use(s, a, end)
                for v in range(max(a, 0) // n, n):
                    if v * n + v > e:
                        break
                    self.mem[v] += self.bytes[s]
                if not self.kept[s] and e >= 0 and self.takes(s, a, e):
                    self.mem[e // n] -= self.bytes[s]
        self.excess = sum(x - budget for x in self.mem if x > budget)
        self.cost = 0
        self.events: list[int] = []

    def place(self, key: int) -> int:
        """The first slot with a key not below this one."""
        return bisect_left(self.key, key)

    def add(self, start: int, end: int, change: int) -> None:
        """Change the bytes of slots ``start <= k < end``."""
        budget, mem = self.budget, self.mem
        for k in range(start, end):
            before = mem[k]
            mem[k] = after = before + change
            self.excess += (after - budget if after > budget else 0) - (
                before - budget if before > budget else 0
            )

    def prev_run(self, v: int, key: int) -> int:
        """Key of the last run of an operator before ``key``, or -1."""
        for t in reversed(self.runs[v]):
            if t * self.n + v < key:
                return t * self.n + v
        return -1

    def next_run(self, v: int, key: int) -> int:
        """Key of the first run of an operator after ``key``."""
        found = NEVER
        for t in reversed(self.runs[v]):
            if t * self.n + v <= key:
                break
            found = t * self.n + v
        return found

    def last_use(self, s: int, a: int, b: int) -> int:
        """Key of the last run between ``a`` and ``b`` that reads a storage, or ``a``."""
        return max(a, max((self.prev_run(v, b) for v in self.readers[s]), default=a))

    def first_use(self, s: int, key: int) -> int:
        """Key of the first run after ``key`` that reads a storage."""
        return min((self.next_run(v, key) for v in self.readers[s]), default=NEVER)

    def born(self, s: int, key: int) -> int:
        """Key of the run that made what is there of a storage before ``key``; -1: it was given.

        A fetch from the host makes it too.
        """
        a = -1 if self.producer[s] < 0 else self.prev_run(self.producer[s], key)
        back = self.back[s] * (self.n + 1)
        return back if self.back[s] >= 0 and a < back < key else a

    def reborn(self, s: int, key: int) -> int:
        """Key of the run that makes a storage anew after ``key``."""
        b = NEVER if self.producer[s] < 0 else self.next_run(self.producer[s], key)
        back = self.back[s] * (self.n + 1)
        return back if self.back[s] >= 0 and key < back < b else b

    def takes(self, s: int, a: int, e: int) -> bool:
        """Whether the run at ``e`` takes over a storage, born at ``a``, which dies there."""
        instant, w = divmod(e, self.n)
        return e > a and self.over[w] == s and (instant == w or not self.kept[self.writes[w][0]])

    def taking(self, s: int, a: int, e: int, sign: int) -> None:
        """Account for a takeover that begins or ceases to happen at ``e``."""
        if e > a and e >= 0 and self.takes(s, a, e):
            k = self.place(e)
            self.add(k, k + 1, -sign * self.bytes[s])

    def passing(self, k: int) -> int:
        """Bytes that are gone right after a slot."""
        x = self.key[k]
        instant, v = divmod(x, self.n)
        gone = self.workspace[v]
        for u in self.reads[v]:
            if not self.kept[u]:
                a = self.born(u, x)
                if self.last_use(u, a, self.reborn(u, x)) == x and not self.takes(u, a, x):
                    gone += self.bytes[u]
        for s in self.writes[v]:
            if self.kept[s]:
                gone += self.bytes[s] if instant != v else 0
            elif self.last_use(s, x, self.reborn(s, x)) == x:
                gone += self.bytes[s]
        return gone

    def charge(self, t: int, v: int, sign: int) -> None:
        """Count what running an operator again brings besides."""
        for c in self.charged[v]:
            if t < self.charge_when[c]:
                continue
            before = self.counts[c]
            self.counts[c] += sign
            if (before == 0) if sign > 0 else (self.counts[c] == 0):
                self.add(self.place(self.charge_key[c]), len(self.key), sign * self.charge_bytes[c])
                if self.charge_key[c] == self.split * self.n:
                    self.copied += sign * self.charge_bytes[c]

    def insert(self, t: int, v: int) -> None:
        """Run an operator again before instant ``t``."""
        x = t * self.n + v
        k = self.place(x)
        before = self.key[k - 1] // self.n
        live = self.mem[k - 1] - self.passing(k - 1) + self.fixed[t] - self.fixed[before]
        if t == self.split and before < t:
            live += self.copied
        live += self.workspace[v]
        self.key.insert(k, x)
        self.mem.insert(k, live)
        self.excess += max(0, live - self.budget)
        for u in self.reads[v]:
            if self.kept[u]:
                continue
            a = self.born(u, x)
            e = self.last_use(u, a, self.reborn(u, x))
            if e < x:
                self.taking(u, a, e, -1)
                self.add(0 if e < 0 else self.place(e + 1), k + 1, self.bytes[u])
                self.taking(u, a, x, 1)
        for s in self.writes[v]:
            a = self.born(s, x)
            if not self.kept[s] and self.last_use(s, a, self.reborn(s, x)) > x:
                e = self.last_use(s, a, x)
                self.add(self.place(e + 1), k, -self.bytes[s])
                self.taking(s, a, e, 1)
            else:
                self.add(k, k + 1, self.bytes[s])
        insort(self.runs[v], t)
        self.charge(t, v, 1)
        self.events.append(x)
        self.cost += self.time[v]

    def remove(self, t: int, v: int) -> None:
        """Take back an insertion."""
        x = t * self.n + v
        k = self.place(x)
        self.charge(t, v, -1)
        self.runs[v].remove(t)
        for u in self.reads[v]:
            if self.kept[u]:
                continue
            a = self.born(u, x)
            e = self.last_use(u, a, self.reborn(u, x))
            if e < x:
                self.add(0 if e < 0 else self.place(e + 1), k + 1, -self.bytes[u])
                self.taking(u, a, e, 1)
        for s in self.writes[v]:
            a = self.born(s, x)
            if not self.kept[s] and self.last_use(s, a, self.reborn(s, x)) > x:
                e = self.last_use(s, a, x)
                self.taking(s, a, e, -1)
                self.add(self.place(e + 1), k, self.bytes[s])
        self.excess -= max(0, self.mem[k] - self.budget)
        del self.key[k], self.mem[k]
        self.events[self.events.index(x)] = self.events[-1]
        self.events.pop()
        self.cost -= self.time[v]
