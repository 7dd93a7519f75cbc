"""Random allocations, and a check of places by looking at every pair."""

import random

from lowtide.plan.address.types import Allocation


def random_allocations(seed, most=12, *, pins=False):
    """A few allocations with small numbers, some of them empty."""
    draw = random.Random(seed)
    found = []
    for _ in range(draw.randint(0, most)):
        birth = draw.randrange(8)
        size = draw.choice([0, 1, 2, 3, 5, 8, draw.randint(1, 40)])
        found.append(Allocation(birth, birth + draw.randint(1, 6), size))
    if pins:
        found = [
            Allocation(one.birth, one.death, one.bytes, pinned=100 * k) if draw.random() < 0.3 else one
            for k, one in enumerate(found)
        ]
    return found


def live_at(rows, event):
    return [row for row in rows if row.birth <= event < row.death]


def most_live(rows):
    """The most bytes at one event, event by event."""
    return max((sum(row.bytes for row in live_at(rows, t)) for t in range(64)), default=0)


def overlaps(rows):
    """Whether two rows share a byte at some event, by looking at all pairs and every event."""
    return any(
        set(range(one.offset, one.offset + one.bytes)) & set(range(two.offset, two.offset + two.bytes))
        for t in range(64)
        for k, one in enumerate(live_at(rows, t))
        for two in live_at(rows, t)[:k]
    )


def least_arena(allocations):
    """The smallest arena there is, by trying every order of first fit: one of them is optimal."""
    from itertools import permutations

    boxes = [one for one in allocations if one.bytes]
    best = sum(one.bytes for one in boxes)
    for order in permutations(boxes):
        placed = []
        for one in order:
            beside = sorted(
                (at, at + two.bytes) for at, two in placed if one.birth < two.death and two.birth < one.death
            )
            at = 0
            for start, end in beside:
                if start - at >= one.bytes:
                    break
                at = max(at, end)
            placed.append((at, one))
        best = min(best, max((at + one.bytes for at, one in placed), default=0))
    return best
