"""OmniMalloc behind a small interface of our own: boxes in, places out.

SuperMalloc, its branch and bound over several orders, keeps to a time limit but for its preparation, which
grows with the pairs of boxes that overlap in time. It takes no pinned boxes; annealing over first fit does.
"""

from __future__ import annotations

import numpy as np

from lowtide.plan.address.boxes import FREE, Boxes, Ints

__all__ = ["BETTER", "OPTIMAL", "preparation_seconds", "search"]

_SECONDS_PER_CONFLICT = 4e-7
"""Measured on two cores of aarch64 (benchmarks/addresses.py), with room for a slower machine."""
OPTIMAL, BETTER = 6, 12
"""Threads, on however few cores: SuperMalloc searches in three orders, each below the best so far, with 6 at
the lower bound too, and with 12 also at two heights between, where the bound cannot be reached."""
_SECONDS_PER_BOX = 5e-6


def preparation_seconds(boxes: Boxes) -> float:
    """What a search takes before it looks at the clock, roughly."""
    return boxes.conflicts * _SECONDS_PER_CONFLICT + len(boxes) * _SECONDS_PER_BOX


def search(boxes: Boxes, seconds: float, threads: int = OPTIMAL) -> tuple[Ints, bool]:
    """A placement found within about so many seconds, and whether it is proven to be the lowest."""
    from omnimalloc import Allocation
    from omnimalloc.allocators import SimulatedAnnealingAllocator, SupermallocAllocator

    end = boxes.start + boxes.lifetime
    columns = (boxes.size.tolist(), boxes.start.tolist(), end.tolist(), boxes.pinned.tolist())
    asked = tuple(
        Allocation(k, size, birth, death, None if place == FREE else place)
        for k, (size, birth, death, place) in enumerate(zip(*columns, strict=True))
    )
    proven = False
    if boxes.has_pins:
        found = SimulatedAnnealingAllocator(timeout=seconds, max_iterations=1_000_000).allocate(asked)
    else:
        result = SupermallocAllocator(timeout=seconds, num_threads=threads).solve(asked)
        found, proven = result.allocations, result.proved_optimal
    places = {one.id: one.offset for one in found}
    return np.array([places[k] for k in range(len(boxes))], np.int64), proven
