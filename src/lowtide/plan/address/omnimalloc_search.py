"""OmniMalloc behind a small interface of our own: boxes in, places out.

SuperMalloc, its branch and bound over several orders, keeps to a time limit but for its preparation, which
grows with the pairs of boxes that overlap in time. It takes no pinned boxes; annealing over first fit does.
"""

from __future__ import annotations

import numpy as np

from lowtide.plan.address.boxes import FREE, Boxes, Ints

__all__ = ["preparation_seconds", "search"]

_SECONDS_PER_CONFLICT = 1.2e-7
"""Measured on two cores of aarch64 (benchmarks/addresses.py), with room for a slower machine."""
_SECONDS_PER_BOX = 5e-6


def preparation_seconds(boxes: Boxes) -> float:
    """What a search takes before it looks at the clock, roughly."""
    return boxes.conflicts * _SECONDS_PER_CONFLICT + len(boxes) * _SECONDS_PER_BOX


def search(boxes: Boxes, seconds: float) -> tuple[Ints, bool]:
    """A placement found within about so many seconds, and whether it is proven to be the lowest."""
    from omnimalloc import Allocation
    from omnimalloc.allocators import SimulatedAnnealingAllocator, SupermallocAllocator

    pinned = bool((boxes.pinned != FREE).any())
    columns = (boxes.size.tolist(), boxes.birth.tolist(), boxes.death.tolist(), boxes.pinned.tolist())
    asked = tuple(
        Allocation(k, size, birth, death, None if place == FREE else place)
        for k, (size, birth, death, place) in enumerate(zip(*columns, strict=True))
    )
    proven = False
    if pinned:
        found = SimulatedAnnealingAllocator(timeout=seconds, max_iterations=1_000_000).allocate(asked)
    else:
        result = SupermallocAllocator(timeout=seconds).solve(asked)
        found, proven = result.allocations, result.proved_optimal
    offsets = np.empty(len(boxes), np.int64)
    for one in found:
        offsets[one.id] = one.offset
    return offsets, proven
