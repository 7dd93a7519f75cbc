"""Placement from the ground up: the lowest stretch of the skyline takes the box that matters most and fits.

    units │      ┌──┐        The skyline has an offset for every stretch of time. The lowest stretch takes,
          │ ┌────┘  │        of the boxes whose life lies within it, the one with the largest key; if there
          │─┘       └──      is none, it is lifted to its lower neighbour and what is below stays empty.
          └──────────── time

With lifetimes for keys this is the best-fit heuristic of Sekiyama et al., "Profile-guided memory optimization
for deep neural networks" (2018). It takes no pinned boxes.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from lowtide.plan.address.boxes import Boxes, Ints

__all__ = ["KEYS", "Weights", "skyline", "weights"]

KEYS: dict[str, tuple[float, float]] = {
    "lifetime": (1.0, 0.0),
    "area": (1.0, 1.0),
    "lifetime before size": (1.0, 0.5),
    "size before lifetime": (0.5, 1.0),
    "size": (0.0, 1.0),
}
"""What matters: powers of a box's lifetime and of its size."""

Weights = npt.NDArray[np.float64]


def weights(boxes: Boxes, key: str) -> Weights:
    """The key of every box; above zero."""
    life, size = KEYS[key]
    found: Weights = boxes.lifetime.astype(np.float64) ** life * boxes.size.astype(np.float64) ** size
    return found


class _Lines:
    """The skyline: stretches of time from left to right, each with its offset."""

    def __init__(self, instants: int) -> None:
        self.start, self.end, self.offset = [0], [instants], [0]
        self.before, self.behind = [-1], [-1]
        self.heap = [(0, 0, 0)]

    def lowest(self) -> int:
        """The lowest line, and of several the first."""
        while True:
            offset, start, k = self.heap[0]
            if self.offset[k] == offset and self.start[k] == start:
                return k
            heappop(self.heap)

    def _add(self, start: int, end: int, offset: int, before: int, behind: int) -> int:
        k = len(self.start)
        for column, value in zip(
            (self.start, self.end, self.offset, self.before, self.behind),
            (start, end, offset, before, behind),
            strict=True,
        ):
            column.append(value)
        heappush(self.heap, (offset, start, k))
        return k

    def _link(self, left: int, right: int) -> None:
        if left >= 0:
            self.behind[left] = right
        if right >= 0:
            self.before[right] = left

    def _joined(self, k: int) -> None:
        """Join a line with neighbours of the same offset."""
        for other in (self.before[k], self.behind[k]):
            if other >= 0 and self.offset[other] == self.offset[k]:
                self.start[k] = min(self.start[k], self.start[other])
                self.end[k] = max(self.end[k], self.end[other])
                left, right = self.before[k], self.behind[k]
                self._link(self.before[other] if other == left else left, k)
                self._link(k, self.behind[other] if other == right else right)
                self.offset[other] = -1
        heappush(self.heap, (self.offset[k], self.start[k], k))

    def put(self, k: int, birth: int, death: int, top: int) -> None:
        """Raise a part of a line."""
        start, end, offset = self.start[k], self.end[k], self.offset[k]
        left, right = self.before[k], self.behind[k]
        if start < birth:
            one = self._add(start, birth, offset, left, k)
            self._link(left, one)
            self._link(one, k)
        if death < end:
            one = self._add(death, end, offset, k, right)
            self._link(k, one)
            self._link(one, right)
        self.start[k], self.end[k], self.offset[k] = birth, death, top
        self._joined(k)

    def lift(self, k: int) -> None:
        """Raise a line to its lower neighbour."""
        neighbours = [self.offset[n] for n in (self.before[k], self.behind[k]) if n >= 0]
        self.offset[k] = min(neighbours)
        self._joined(k)


class _Rest:
    """Boxes without a place, and the most important that fits into a line."""

    def __init__(self, boxes: Boxes, keys: Weights) -> None:
        self.by_birth = np.argsort(boxes.birth, kind="stable")
        self.births = boxes.birth[self.by_birth].tolist()
        self.deaths, self.keys = boxes.death[self.by_birth], keys[self.by_birth].copy()
        self.by_key = np.argsort(-self.keys, kind="stable")
        """Positions in the order of births, the largest key first."""
        self.rank = np.empty(len(boxes), np.int64)
        self._sort(boxes.birth[self.by_birth].astype(np.int32))

    def _sort(self, births: npt.NDArray[np.int32]) -> None:
        """Births and deaths by key, without the boxes that have their place."""
        self.by_key = self.by_key[self.keys[self.by_key] > 0]
        self.rank[self.by_key] = np.arange(len(self.by_key))
        self.birth_by_position = births
        self.sorted_births = births[self.by_key]
        self.sorted_deaths = self.deaths[self.by_key].astype(np.int32)
        self.gone = 0

    def fitting(self, start: int, end: int) -> int:
        """The position of the box with the largest key whose life lies between; -1 for none."""
        first, last = bisect_left(self.births, start), bisect_left(self.births, end)
        if last - first > _WIDE:
            return self._from_the_largest(start, end)
        if first == last:
            return -1
        fits = np.where(self.deaths[first:last] <= end, self.keys[first:last], 0.0)
        best = int(fits.argmax())
        return first + best if fits[best] > 0 else -1

    def _from_the_largest(self, start: int, end: int) -> int:
        at, count = 0, _WIDE // 8
        while at < len(self.by_key):
            part = slice(at, at + count)
            fits = (self.sorted_births[part] >= start) & (self.sorted_deaths[part] <= end)
            best = int(fits.argmax())
            if fits[best]:
                return int(self.by_key[at + best])
            at, count = at + count, 2 * count
        return -1

    def take(self, position: int) -> None:
        """A box has its place."""
        self.keys[position] = 0.0
        self.sorted_births[self.rank[position]] = -1
        self.gone += 1
        if self.gone > 256 and 4 * self.gone > len(self.by_key):
            self._sort(self.birth_by_position)


_WIDE = 1024
"""With more boxes born within a line, one of the largest will fit: they are tried first."""


def skyline(boxes: Boxes, keys: Weights, stop: int | None = None) -> Ints | None:
    """The place of every box; None once the placement reaches ``stop``, and so is no better than that."""
    rest, lines = _Rest(boxes, keys), _Lines(boxes.instants)
    offsets = np.zeros(len(boxes), np.int64)
    left = len(boxes)
    while left:
        line = lines.lowest()
        offset = lines.offset[line]
        best = rest.fitting(lines.start[line], lines.end[line])
        if best < 0:
            lines.lift(line)
            continue
        k = int(rest.by_birth[best])
        top = offset + int(boxes.size[k])
        if stop is not None and top >= stop:
            return None
        offsets[k] = offset
        rest.take(best)
        left -= 1
        lines.put(line, rest.births[best], int(rest.deaths[best]), top)
    return offsets
