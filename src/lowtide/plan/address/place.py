"""Finds a place in one arena for every allocation: the best of greedy placement and OmniMalloc's search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from lowtide.errors import PlanError
from lowtide.plan.address.boxes import FREE, Boxes, Ints, boxes_of, peak_bytes
from lowtide.plan.address.first_fit import first_fit
from lowtide.plan.address.omnimalloc_search import preparation_seconds, search
from lowtide.plan.address.types import AddressPlan, Allocation, Clock, Placed

__all__ = ["TIME_LIMIT", "place"]

TIME_LIMIT = 3.0
"""Seconds of a search, where nobody says more."""
_MANY = 20_000
"""So many boxes take greedy placement seconds: with a search's result at hand it can often end early."""
_MOST_BYTES = 1 << 62


def place(
    allocations: Sequence[Allocation],
    *,
    alignment: int = 1,
    clock: Clock = Clock.OPERATOR,
    time_limit: float = TIME_LIMIT,
    progress: Callable[[str], None] | None = None,
) -> AddressPlan:
    """An arena for all allocations, never larger than that of greedy placement by size.

    The time limit is that of the search; greedy placement is always finished, or left when it is no better.
    A PlanError names an allocation that cannot be placed as it is asked for.
    """
    began = time.perf_counter()
    _refuse(allocations, alignment)
    boxes = boxes_of(allocations, alignment)
    offsets, greedy, method, proven = _best(boxes, began + time_limit, progress or _silent)
    height = boxes.height(offsets)
    where = np.array([one.pinned or 0 for one in allocations], np.int64)
    where[boxes.source] = offsets * alignment
    placed = tuple(
        Placed(**msgspec.structs.asdict(one), offset=offset)
        for one, offset in zip(allocations, where.tolist(), strict=True)
    )
    return AddressPlan(
        allocations=placed,
        clock=clock,
        events=max((one.death for one in allocations), default=0),
        alignment=alignment,
        arena_bytes=max((one.offset + one.bytes for one in placed), default=0),
        live_bytes=peak_bytes(allocations),
        greedy_bytes=greedy * alignment,
        method=method,
        optimal=proven or height == boxes.bound,
        solve_seconds=time.perf_counter() - began,
    )


def _silent(_: str) -> None:
    pass


def _best(boxes: Boxes, deadline: float, progress: Callable[[str], None]) -> tuple[Ints, int, str, bool]:
    """The lowest placement found, what greedy by size takes, the method, and whether it is proven lowest."""
    if not len(boxes):
        return boxes.size, 0, "greedy", True
    best: tuple[Ints, int, str, bool] | None = None
    if len(boxes) > _MANY:
        best = _searched(boxes, deadline, progress)
    offsets = first_fit(
        boxes, "size", stop=None if best is None else best[1], progress=partial(_told, progress, len(boxes))
    )
    if offsets is None:
        assert best is not None
        return best
    greedy = boxes.height(offsets)
    best = offsets, greedy, "greedy", greedy == boxes.bound
    if len(boxes) <= _MANY and not best[3]:
        found = _searched(boxes, deadline, progress)
        if found is not None and found[1] < greedy:
            best = found
    if best[2] == "greedy" and not best[3]:
        best = _other_orders(boxes, best, deadline)
    return best[0], greedy, best[2], best[3]


def _told(progress: Callable[[str], None], boxes: int, placed: int) -> None:
    progress(f"greedy: {placed:,} of {boxes:,} placed")


def _searched(
    boxes: Boxes, deadline: float, progress: Callable[[str], None]
) -> tuple[Ints, int, str, bool] | None:
    """What OmniMalloc finds; None where it would not be done with its preparation in time."""
    left = deadline - time.perf_counter()
    if left <= 0 or preparation_seconds(boxes) > left / 2:
        return None
    progress(f"OmniMalloc: searching for {left:.1f} s")
    offsets, proven = search(boxes, left)
    return offsets, boxes.height(offsets), "OmniMalloc", proven


def _other_orders(
    boxes: Boxes, best: tuple[Ints, int, str, bool], deadline: float
) -> tuple[Ints, int, str, bool]:
    for order in ("area", "lifetime"):
        if time.perf_counter() >= deadline:
            break
        offsets = first_fit(boxes, order, stop=best[1])
        if offsets is not None:
            height = boxes.height(offsets)
            best = offsets, height, f"greedy by {order}", height == boxes.bound
    return best


def _refuse(allocations: Sequence[Allocation], alignment: int) -> None:
    if alignment < 1:
        raise PlanError(f"an alignment of {alignment} bytes; give a whole number of at least 1")
    total = 0
    for k, one in enumerate(allocations):
        if one.birth >= one.death or one.bytes < 0:
            raise PlanError(
                f"allocation {k} takes {one.bytes} bytes from event {one.birth} to {one.death}; it must be "
                "born before it dies, and take no less than nothing"
            )
        if one.pinned is not None and (one.pinned < 0 or one.pinned % alignment):
            raise PlanError(
                f"allocation {k} is pinned at {one.pinned}, which is no multiple of the alignment "
                f"{alignment}; give another alignment"
            )
        total += -(-one.bytes // alignment) * alignment + (one.pinned or 0)
    if total > _MOST_BYTES:
        raise PlanError(f"allocations of {total} bytes in all; at most 2^62 can be placed")
    _refuse_colliding(allocations)


def _refuse_colliding(allocations: Sequence[Allocation]) -> None:
    """Two that are pinned over each other have no placement."""
    pinned = [(one.pinned, k, one) for k, one in enumerate(allocations) if one.pinned is not None and one.bytes]
    pinned.sort(key=lambda row: row[:2])
    for n, (start, k, one) in enumerate(pinned):
        for other_start, other, two in pinned[n + 1 :]:
            if other_start >= start + one.bytes:
                break
            if one.birth < two.death and two.birth < one.death:
                raise PlanError(
                    f"allocations {k} and {other} are pinned at {start} and {other_start}, where they "
                    "overlap while both are live; pin one elsewhere"
                )
