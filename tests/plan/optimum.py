"""The true optimum of a small problem: shortest path over what is held, every order of runs allowed.

A state is the next mandatory operator and the set of storages held. Whoever holds more at the same cost is
better off, since letting go is free; so storages are let go of only where a run needs the room.
Charges (random states, copied leaves) are left out: use steps without them.
"""

import heapq


def optimum(problem, budget, limit=400_000):  # noqa: C901
    """The least time spent on running again inside the budget; None: infeasible. Raises OverflowError beyond the limit."""
    assert not problem.charges
    n = len(problem.ops)
    size = problem.bytes
    reads = [sum(1 << s for s in row) for row in problem.reads]
    writes = [sum(1 << s for s in row) for row in problem.writes]
    kept = sum(1 << s for s, keep in enumerate(problem.kept) if keep)
    given = sum(1 << s for s, p in enumerate(problem.producer) if p < 0 and problem.readers[s])
    useful = [_useful(problem, t) for t in range(n + 1)]

    def weight(mask):
        total = 0
        while mask:
            low = mask & -mask
            total += size[low.bit_length() - 1]
            mask ^= low
        return total

    def after(t, live, v, again):
        """What may be held after running v with this held before: the largest sets that fit."""
        kept_now = live & kept
        passing = weight(writes[v] & kept) if again else 0
        need = problem.fixed[t] + problem.workspace[v] + weight(kept_now | reads[v] | writes[v]) + passing
        if again and passing:
            need -= weight(writes[v] & kept & ~kept_now)
        free = live & ~kept & ~reads[v] & ~writes[v]
        source = problem.over[v]
        for taken in {False, source >= 0 and not (again and problem.kept[problem.writes[v][0]])}:
            room = budget - need + (size[source] if taken else 0)
            if room < 0:
                continue
            gone = 1 << source if taken else 0
            for held in _largest(free, room, size, weight):
                yield (kept_now | held | reads[v] | writes[v]) & ~gone

    best = {(0, given): 0}
    queue = [(0, 0, given)]
    finished = {}
    while queue:
        cost, t, live = heapq.heappop(queue)
        t = -t
        if best.get((t, live), cost) < cost:
            continue
        if t == n:
            return cost
        seen = finished.setdefault(t, [])
        if any(other & live == live for other in seen):
            continue
        seen.append(live)
        if sum(map(len, finished.values())) > limit:
            raise OverflowError("too many states")
        steps = [(t, True)] if reads[t] & ~live == 0 else []
        steps += [
            (v, False) for v in range(t)
            if problem.again[v] and reads[v] & ~live == 0 and writes[v] & ~live & ~kept & useful[t]
        ]  # fmt: skip
        for v, mandatory in steps:
            then = t + 1 if mandatory else t
            price = cost + (0 if mandatory else problem.repeat[v])
            for held in after(t, live, v, not mandatory):
                state = then, held & (useful[then] | kept)
                if price < best.get(state, price + 1):
                    best[state] = price
                    heapq.heappush(queue, (price, -then, state[1]))
    return None


def _useful(problem, t):
    """Storages that a mandatory operator from t on, or what may run again for one, reads."""
    found, stack = set(), [s for v in range(t, len(problem.ops)) for s in problem.reads[v]]
    while stack:
        s = stack.pop()
        if s not in found:
            found.add(s)
            if problem.producer[s] >= 0 and problem.again[problem.producer[s]]:
                stack += problem.reads[problem.producer[s]]
    return sum(1 << s for s in found)


def _largest(free, room, size, weight):
    """The largest subsets of ``free`` that take at most ``room``."""
    if weight(free) <= room:
        return [free]
    items = [s for s in range(free.bit_length()) if free >> s & 1]
    found = []

    def choose(k, chosen, left, skipped):
        if k == len(items):
            if skipped is None or skipped > left:
                found.append(chosen)
            return
        s = items[k]
        if size[s] <= left:
            choose(k + 1, chosen | 1 << s, left - size[s], skipped)
        smallest = size[s] if skipped is None else min(skipped, size[s])
        if size[s] > 0:
            choose(k + 1, chosen, left, smallest)

    choose(0, 0, room, None)
    return found
