"""The annealing kernel without a compiler: the same moves as ``_anneal.c``, one for one, in plain Python."""

from __future__ import annotations

from array import array

from lowtide.plan.recompute.annealing.slots import NEVER, Slots

__all__ = ["anneal"]

_MASK = (1 << 64) - 1
_STACK = 4096


def anneal(problem: bytes, events: bytes, settings: bytes) -> tuple[bytes | None, bytes, bytes]:
    """Best events or None, last events, and figures; all as packed 64-bit numbers."""
    setting = array("q", settings).tolist()
    state = _State(array("q", problem).tolist(), setting[0], setting[2])
    for key in array("q", events):
        instant, op = divmod(key, state.n)
        if instant >= state.n or op >= instant or not state.again[op]:
            raise ValueError("the packed problem or its events contradict themselves")
        if instant not in state.runs[op]:
            state.insert(instant, op)
    state.drop_useless()
    best, figures = _search(state, setting)
    packed = None if best is None else array("q", best).tobytes()
    return packed, array("q", state.events).tobytes(), array("q", figures).tobytes()


def _search(state: _State, setting: list[int]) -> tuple[list[int] | None, list[int]]:
    moves, weight, shift, known = setting[1], setting[3], setting[4], setting[5]
    heats, logarithms = setting[6:70], setting[70:]
    best: list[int] | None = None
    accepted, least = 0, state.excess
    if state.excess == 0 and state.cost < known:
        best, known = list(state.events), state.cost
    for done in range(moves):
        if not state.candidates or known <= 0:
            break
        before = state.cost + state.penalty(weight, shift)
        state.log.clear()
        changed = state.move()
        luck = (heats[done * 64 // moves] * logarithms[state.below(1024)]) >> 16
        if changed and state.cost + state.penalty(weight, shift) - before <= luck:
            accepted += 1
            least = min(least, state.excess)
            if state.excess == 0 and state.cost < known:
                best, known = list(state.events), state.cost
        else:
            state.undo()
        if done & 127 == 127:
            weight += (weight >> 4) + 1 if state.excess > 0 else -(weight >> 5)
            weight = max(16, min(weight, 1 << 36))
    return best, [known, state.cost, state.excess, weight, accepted, least]


class _State(Slots):
    """A schedule and the ways to change it at random."""

    def __init__(self, packed: list[int], budget: int, seed: int) -> None:
        super().__init__(packed, budget)
        self.random = seed & _MASK
        self.log: list[tuple[int, bool]] = []

    def below(self, k: int) -> int:
        """The next random number, from 0 to k - 1."""
        self.random = x = (self.random + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((x ^ (x >> 31)) >> 11) % k

    def penalty(self, weight: int, shift: int) -> int:
        """What the bytes over the budget are worth."""
        return ((((self.excess - 1) >> shift) + 1) * weight) >> 16 if self.excess > 0 else 0

    def useless(self, x: int) -> bool:
        """Whether nobody reads what an event makes before it is made anew."""
        instant, v = divmod(x, self.n)
        if instant == v:
            return False
        return not any(
            not self.kept[s] and self.last_use(s, x, self.reborn(s, x)) > x for s in self.writes[v]
        )

    def put(self, t: int, v: int) -> None:
        """Insert an event, to be undone if need be."""
        self.insert(t, v)
        self.log.append((t * self.n + v, True))

    def drop(self, x: int) -> None:
        """Remove an event, and those that only it needed."""
        stack = [x]
        while stack:
            y = stack.pop()
            t, v = divmod(y, self.n)
            if t not in self.runs[v]:
                continue
            self.remove(t, v)
            self.log.append((y, False))
            for u in self.reads[v]:
                if not self.kept[u] and self.producer[u] >= 0:
                    a = self.born(u, y)
                    if self.useless(a) and len(stack) < _STACK:
                        stack.append(a)

    def drop_useless(self) -> None:
        """Remove every event that nobody needs."""
        repeat = True
        while repeat:
            repeat = False
            for k in reversed(range(len(self.events))):
                if k < len(self.events) and self.useless(self.events[k]):
                    self.drop(self.events[k])
                    repeat = True

    def undo(self) -> None:
        """Take back the move."""
        while self.log:
            x, inserted = self.log.pop()
            (self.remove if inserted else self.insert)(x // self.n, x % self.n)

    def remake(self, t: int, v: int, key: int, odds: int) -> None:
        """Run an operator again, with those of its ancestors that would be held over ``key`` otherwise."""
        found = [v]
        for w in found:
            x = t * self.n + w
            for u in self.reads[w]:
                p = self.producer[u]
                if p < 0 or self.kept[u] or not self.again[p] or p in found or t in self.runs[p]:
                    continue
                a = self.born(u, x)
                if a > key or self.last_use(u, a, self.reborn(u, x)) >= key:
                    continue
                if len(found) < _STACK // 2 and self.below(16) < odds:
                    found.append(p)
        for w in reversed(found):
            if t not in self.runs[w]:
                self.put(t, w)
        for w in reversed(found):
            a = self.prev_run(w, t * self.n + w)
            if a >= 0 and self.useless(a):
                self.drop(a)

    def evict(self, k: int) -> bool:
        """Let go of some storage that is held over a slot, and make it again for its next use."""
        key = self.key[k]
        w = key % self.n
        for tries in range(16):
            s = self.candidates[self.below(len(self.candidates))]
            if tries & 1:
                other = self.candidates[self.below(len(self.candidates))]
                s = other if self.bytes[other] > self.bytes[s] else s
            v = self.producer[s]
            a = self.born(s, key)
            if a < 0 or w in (v, self.back[s]) or s in self.reads[w]:
                continue
            if self.last_use(s, a, self.reborn(s, key)) <= key:
                continue
            t = self.first_use(s, key) // self.n
            if t * self.n + v > key:
                self.remake(t, v, key, 14 if self.below(4) else 16)
                return True
        return False

    def shift(self) -> bool:
        """Run some event earlier or later, where its results still come in time."""
        x = self.events[self.below(len(self.events))]
        t, v = divmod(x, self.n)
        first = min((self.first_use(s, x) for s in self.writes[v] if not self.kept[s]), default=NEVER)
        low = self.prev_run(v, x) // self.n + 1
        high = t if first == NEVER else first // self.n
        if high <= low:
            return False
        to = low + self.below(high - low + 1)
        if self.below(2):
            step = self.below(4) + 1
            to = t + step if self.below(2) else t - step
            if to < low or to > high:
                return False
        if to == t or to in self.runs[v]:
            return False
        self.put(to, v)
        self.drop(x)
        if to in self.runs[v] and self.useless(to * self.n + v):
            self.drop(to * self.n + v)
        return True

    def swap(self) -> bool:
        """Give up an event, then let go of other storages where memory is short for it."""
        x = self.events[self.below(len(self.events))]
        a = self.prev_run(x % self.n, x)
        self.drop(x)
        for _ in range(1 + self.below(3)):
            if self.excess <= 0:
                break
            start, end = self.place(a), self.place(x)
            k = max(range(start, max(end, start + 1)), key=self.mem.__getitem__)
            if self.mem[k] <= self.budget:
                k = self.below(len(self.key))
            self.evict(k)
        return True

    def move(self) -> bool:
        """Change something at random; whether anything was changed."""
        dice = self.below(100)
        if not self.events or dice < (55 if self.excess > 0 else 20):
            k = self.below(len(self.key))
            if self.excess > 0:
                for _ in range(24):
                    if self.mem[k] > self.budget:
                        break
                    k = self.below(len(self.key))
            return self.evict(k)
        if dice < 65:
            return self.shift()
        if dice < 80:
            self.drop(self.events[self.below(len(self.events))])
            return True
        if dice < 95:
            return self.swap()
        x = self.events[self.below(len(self.events))]
        self.remake(x // self.n, x % self.n, x - x % self.n, 8)
        return bool(self.log)
