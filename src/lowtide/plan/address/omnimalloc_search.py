"""OmniMalloc behind a small interface of our own: boxes in, places out.

Its branch and bound places boxes in a given order and looks for a placement below a given height. It takes no
pinned boxes; annealing over first fit does. ``Solver`` asks for one order and one height at a time, which
OmniMalloc's public interface does not offer: it takes private names, as they were seen in version 1.0.0. With
other versions than 1.0.x, and where a name is missing, ``search`` is what is left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lowtide.plan.address.boxes import FREE, Boxes, Ints

__all__ = ["ORDERS", "Solver", "preparation_seconds", "search", "seconds_per_node", "solver_of"]

ORDERS = ("TAW", "TWA", "TW", "WAT", "UW", "CT", "AW", "LW", "OT", "ZT")
"""What boxes are sorted by, in OmniMalloc's letters: the load of the stretches of time that they live in (T),
lifetime (W), area (A), death (U), the number of those stretches (C), birth (L), pairs (O) and size (Z).

Three are minimalloc's. In the others each of the keys comes first once, with another key for boxes that are
equal by it; what is left of ties keeps the order of the boxes, which matters as well."""
_SECONDS_PER_CONFLICT = 4e-7
"""Measured on two cores of aarch64 (benchmarks/addresses.py), with room for a slower machine."""
_VERSIONS = "1.0."
_THREADS = 6
"""Of ``search``, on however few cores: three orders, each below the best so far and at the bound."""
_SECONDS_PER_BOX = 5e-6
_PREPARATIONS_PER_NODE = 0.005
"""Measured there too, of 800 to 4,300 boxes."""


def preparation_seconds(boxes: Boxes) -> float:
    """What a search takes before it looks at the clock, roughly."""
    return boxes.conflicts * _SECONDS_PER_CONFLICT + len(boxes) * _SECONDS_PER_BOX


def seconds_per_node(boxes: Boxes) -> float:
    """What one node of a search takes of many boxes, roughly; between a fifth of it and twice as long."""
    return preparation_seconds(boxes) * _PREPARATIONS_PER_NODE


def _asked(boxes: Boxes) -> tuple[Any, ...]:
    from omnimalloc import Allocation

    end = boxes.start + boxes.lifetime
    columns = (boxes.size.tolist(), boxes.start.tolist(), end.tolist(), boxes.pinned.tolist())
    return tuple(
        Allocation(k, size, birth, death, None if place == FREE else place)
        for k, (size, birth, death, place) in enumerate(zip(*columns, strict=True))
    )


def _places(found: Sequence[Any]) -> Ints:
    places = {one.id: one.offset for one in found}
    return np.array([places[k] for k in range(len(places))], np.int64)


class Solver:
    """Boxes prepared once, for any number of searches. It takes no pinned boxes."""

    def __init__(self, boxes: Boxes, internals: Any) -> None:
        self._internals = internals
        self._base = internals.Partition.from_allocations(_asked(boxes))
        self._sorted: dict[str, Any] = {}

    def _by(self, order: str) -> Any:
        if order not in self._sorted:
            self._sorted[order] = self._base.reorder(order)
        return self._sorted[order]

    def greedy(self, seconds: float, threads: int) -> Ints:
        """A placement without a search: the best of all orders that there is time for."""
        found = self._internals.greedy_pack_portfolio(self._base, [*ORDERS, ""], seconds, threads)
        return _places(found.allocations)

    def below(
        self, height: int, orders: Sequence[str], seconds: float, nodes: int | None = None
    ) -> tuple[Ints | None, bool]:
        """A placement lower than ``height``, if one is found, with a thread for each order.

        Also whether there is none lower: than what was found, or than ``height``. With a limit on the nodes
        of each search nobody knows why it has ended, and nothing is proven.
        """
        members = [self._by(order).with_bound(height) for order in orders]
        deadline = time.perf_counter() + seconds
        found = self._internals.try_solve_many(
            members,
            height,
            nodes,
            canonical=True,
            dominance=True,
            floor_inference=True,
            monotonic_floor=True,
            decompose=True,
            timeout=seconds,
            num_threads=len(members),
        )
        proven = nodes is None and time.perf_counter() < deadline
        return (None if found is None else _places(found.allocations)), proven


def solver_of(boxes: Boxes) -> Solver | None:
    """None where this version of OmniMalloc lacks what it takes, or may mean something else by it."""
    from omnimalloc import __version__, _cpp

    there = all(hasattr(_cpp, name) for name in ("Partition", "greedy_pack_portfolio", "try_solve_many"))
    return Solver(boxes, _cpp) if there and __version__.startswith(_VERSIONS) else None


def search(boxes: Boxes, seconds: float) -> tuple[Ints, bool]:
    """A placement found within about so many seconds, and whether it is proven to be the lowest."""
    from omnimalloc.allocators import SimulatedAnnealingAllocator, SupermallocAllocator

    if boxes.has_pins:
        annealing = SimulatedAnnealingAllocator(timeout=seconds, max_iterations=1_000_000)
        return _places(annealing.allocate(_asked(boxes))), False
    result = SupermallocAllocator(timeout=seconds, num_threads=_THREADS).solve(_asked(boxes))
    return _places(result.allocations), bool(result.proved_optimal)
