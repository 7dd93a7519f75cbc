"""OmniMalloc behind a small interface of our own: boxes in, places out.

SuperMalloc, its branch and bound over several orders, keeps to a time limit but for its preparation, which
grows with the pairs of boxes that overlap in time. It takes no pinned boxes; annealing over first fit does.
"""

from __future__ import annotations

import numpy as np

from lowtide.plan.address.boxes import FREE, Boxes, Ints

__all__ = ["preparation_seconds", "search"]

_SECONDS_PER_CONFLICT = 4e-7
"""Measured on two cores of aarch64 (benchmarks/addresses.py), with room for a slower machine."""
_THREADS = 6
"""So many, on however few cores, search in three orders both below the best so far and at the lower bound."""
_SECONDS_PER_BOX = 5e-6


def preparation_seconds(boxes: Boxes) -> float:
    """What a search takes before it looks at the clock, roughly."""
    return boxes.conflicts * _SECONDS_PER_CONFLICT + len(boxes) * _SECONDS_PER_BOX


def search(boxes: Boxes, seconds: float, *, backwards: bool = False) -> tuple[Ints, bool]:
    """A placement found within about so many seconds, and whether it is proven to be the lowest.

    ``backwards`` turns time round, which changes nothing but where the search looks first.
    """
    from omnimalloc import Allocation
    from omnimalloc.allocators import SimulatedAnnealingAllocator, SupermallocAllocator

    end = boxes.start + boxes.lifetime
    begin, end = (end.max() - end, end.max() - boxes.start) if backwards else (boxes.start, end)
    columns = (boxes.size.tolist(), begin.tolist(), end.tolist(), boxes.pinned.tolist())
    asked = tuple(
        Allocation(k, size, birth, death, None if place == FREE else place)
        for k, (size, birth, death, place) in enumerate(zip(*columns, strict=True))
    )
    proven = False
    if boxes.has_pins:
        found = SimulatedAnnealingAllocator(timeout=seconds, max_iterations=1_000_000).allocate(asked)
    else:
        result = SupermallocAllocator(timeout=seconds, num_threads=_THREADS).solve(asked)
        found, proven = result.allocations, result.proved_optimal
    places = {one.id: one.offset for one in found}
    return np.array([places[k] for k in range(len(boxes))], np.int64), proven
