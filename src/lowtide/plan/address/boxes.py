"""Allocations as boxes of time and memory, in numbers: what the placements work on.

units │   ┌────┐          A box is as wide as its allocation lives and as high as its bytes, in units
      │ ┌─┴──┐ │          of the alignment. Boxes that overlap in time must not overlap in memory.
      │ │ A  ├─┘ B        The load of an instant is the height of all boxes over it; the largest is a
      └─┴────┴──── time   lower bound of the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.plan.address.types import Allocation

__all__ = ["FREE", "Boxes", "Ints", "boxes_of", "largest_load", "peak_bytes"]

Ints = npt.NDArray[np.int64]

FREE = -1
"""The place of a box that may lie anywhere."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes with a height, in units; times are numbered densely."""

    source: Ints
    """The allocation that each box stands for."""
    birth: Ints
    death: Ints
    lifetime: Ints
    """In events; births and deaths are numbered without gaps, which changes how long a life seems."""
    start: Ints
    """The event at which a box begins."""
    size: Ints
    pinned: Ints
    """The unit at which a box must begin, or FREE."""
    instants: int
    bound: int
    """No placement is lower: the largest load, or the end of the highest pinned box."""

    def __len__(self) -> int:
        return len(self.size)

    @property
    def conflicts(self) -> int:
        """How many pairs of boxes overlap in time."""
        begun = np.searchsorted(np.sort(self.birth), self.death, side="left")
        ended = np.searchsorted(np.sort(self.death), self.birth, side="right")
        return int((begun - ended).sum() - len(self)) // 2

    @property
    def has_pins(self) -> bool:
        """Whether some box has its place already."""
        return bool((self.pinned != FREE).any())

    def height(self, offsets: Ints) -> int:
        """The arena that a placement needs."""
        return int((offsets + self.size).max(initial=0))


def boxes_of(allocations: Sequence[Allocation], alignment: int) -> Boxes:
    """Boxes of all allocations that take memory, rounded up to whole units."""
    rows = [
        (k, one.birth, one.death, one.bytes, FREE if one.pinned is None else one.pinned)
        for k, one in enumerate(allocations)
        if one.bytes
    ]
    table = np.array(rows, np.int64).reshape(-1, 5)
    source, birth, death, size, place = (np.ascontiguousarray(column) for column in table.T)
    lifetime, start = death - birth, birth
    times, numbers = np.unique(np.concatenate([birth, death]), return_inverse=True)
    birth, death = numbers[: len(rows)].astype(np.int64), numbers[len(rows) :].astype(np.int64)
    free = place == FREE
    first = np.where(free, 0, place // alignment)
    units = np.where(free, -(-size // alignment), -(-(place + size) // alignment) - first)
    pinned = np.where(free, FREE, first)
    load = largest_load(birth, death, units, len(times))
    bound = max(load, int((first + units)[~free].max(initial=0)))
    return Boxes(source, birth, death, lifetime, start, units, pinned, len(times), bound)


def peak_bytes(allocations: Sequence[Allocation]) -> int:
    """The most bytes that are live at once, without rounding."""
    return boxes_of([_unpinned(one) for one in allocations], 1).bound


def _unpinned(one: Allocation) -> Allocation:
    return one if one.pinned is None else Allocation(one.birth, one.death, one.bytes)


def largest_load(birth: Ints, death: Ints, size: Ints, instants: int) -> int:
    """The most that lies over one instant."""
    change = np.zeros(instants + 1, np.int64)
    np.add.at(change, birth, size)
    np.subtract.at(change, death, size)
    return int(np.cumsum(change).max(initial=0))
