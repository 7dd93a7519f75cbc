"""First fit: boxes in some order, each as low as the boxes placed before leave room.

In order of falling size this is the greedy placement that other planners are measured by.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lowtide.plan.address.boxes import FREE, Boxes, Ints

__all__ = ["ORDERS", "first_fit"]

ORDERS: dict[str, Callable[[Boxes], tuple[Ints, ...]]] = {
    "size": lambda boxes: (-boxes.size,),
    "size and lifetime": lambda boxes: (-boxes.size, boxes.birth - boxes.death),
    "size and death": lambda boxes: (-boxes.size, -boxes.death),
    "area": lambda boxes: (-boxes.size * (boxes.death - boxes.birth),),
    "lifetime": lambda boxes: (boxes.birth - boxes.death, -boxes.size),
}
"""What boxes are sorted by, the first key first and smallest first; boxes that are equal keep their order."""

_SAID_EVERY = 2048


class _Placed:
    """Boxes that have their place, sorted by it; the load and the highest end at every instant."""

    def __init__(self, boxes: Boxes) -> None:
        count = len(boxes)
        self.birth, self.death = np.empty(count, np.int32), np.empty(count, np.int32)
        self.start, self.end = np.empty(count, np.int64), np.empty(count, np.int64)
        self.count = 0
        self.load, self.top = np.zeros(boxes.instants, np.int64), np.zeros(boxes.instants, np.int64)

    def put(self, birth: int, death: int, start: int, size: int) -> None:
        n = self.count
        at = int(np.searchsorted(self.start[:n], start))
        row = ((self.birth, birth), (self.death, death), (self.start, start), (self.end, start + size))
        for column, value in row:
            column[at + 1 : n + 1] = column[at:n]
            column[at] = value
        self.count += 1
        self.load[birth:death] += size
        top = self.top[birth:death]
        np.maximum(top, start + size, out=top)

    def lowest(self, birth: int, death: int, size: int) -> int:
        """The lowest place at which a box overlaps none of those that live while it does."""
        top = int(self.top[birth:death].max())
        if top - int(self.load[birth:death].max()) < size:
            return top  # at one instant there is less free below the top than it needs
        n = self.count
        beside = np.flatnonzero((self.birth[:n] < death) & (self.death[:n] > birth))
        start, end = self.start[beside], self.end[beside]
        if not len(beside) or start[0] >= size:
            return 0
        np.maximum.accumulate(end, out=end)
        fits = start[1:] - end[:-1] >= size
        first = int(fits.argmax()) if len(fits) else 0
        return int(end[first]) if len(fits) and fits[first] else top


def first_fit(
    boxes: Boxes,
    order: str,
    *,
    stop: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Ints | None:
    """The place of every box; None once the placement reaches ``stop``, and so is no better than that.

    ``progress`` is told now and then how many boxes are placed.
    """
    offsets: Ints = boxes.pinned.copy()
    placed = _Placed(boxes)
    ranks = np.lexsort((np.arange(len(boxes)), *reversed(ORDERS[order](boxes))))
    fixed = boxes.pinned[ranks] != FREE
    for number, k in enumerate([*ranks[fixed].tolist(), *ranks[~fixed].tolist()]):
        birth, death, size = int(boxes.birth[k]), int(boxes.death[k]), int(boxes.size[k])
        if boxes.pinned[k] == FREE:
            offsets[k] = placed.lowest(birth, death, size)
        start = int(offsets[k])
        if stop is not None and start + size >= stop:
            return None
        placed.put(birth, death, start, size)
        if progress is not None and number % _SAID_EVERY == _SAID_EVERY - 1:
            progress(number + 1)
    return offsets
