"""Finds a place in one arena for every allocation: the best of greedy placement and OmniMalloc's search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from lowtide.cores import usable_cores
from lowtide.errors import PlanError
from lowtide.plan.address.boxes import Boxes, Ints, boxes_of, peak_bytes
from lowtide.plan.address.first_fit import ORDERS, first_fit
from lowtide.plan.address.large_first import search_large
from lowtide.plan.address.noisy_skyline import raise_highest, search_around
from lowtide.plan.address.omnimalloc_search import ORDERS as SEARCHED
from lowtide.plan.address.omnimalloc_search import preparation_seconds, search, seconds_per_node, solver_of
from lowtide.plan.address.restarts import search_again
from lowtide.plan.address.skyline import KEYS, skyline, weights
from lowtide.plan.address.types import AddressPlan, Allocation, EventClock, Placed

__all__ = ["TIME_LIMIT", "place"]

TIME_LIMIT = 3.0
"""Seconds of a search, where nobody says more."""
_MANY = 20_000
"""So many boxes take greedy placement seconds: with another result at hand it can often end early."""
_FEW = 500
"""So few are placed by OmniMalloc alone, and in other orders in no time where it cannot."""
_MOST_LARGE = 2_000
"""So many large boxes are placed on their own at most."""
_MOST_RAISED = 1_500
"""Of so many boxes at most the keys are raised; of more, what lies too high is found too slowly."""
_STARTS = 2
"""Keys that skylines are searched around."""
_RAISING_SHARE = 0.25
"""Of the time left, for keys that are raised."""
_LARGE_SHARE = 0.6
"""Of the time left, for large boxes on their own, where boxes are not few."""
_SEARCH_SHARE = 0.4
"""Of the time left, for OmniMalloc, where boxes are not few; it may take longer. The rest is for skylines."""
_GREEDY_SHARE = 0.5
"""Of OmniMalloc's time at most, for its own greedy placements."""
_MARGIN = 0.05
"""Of the time limit: a search ends so much before it, and what comes after it inside."""
_MOST_BYTES = 1 << 62


def place(
    allocations: Sequence[Allocation],
    *,
    alignment: int = 1,
    clock: EventClock = EventClock.OPERATOR,
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
    best = _Search(boxes, began + (1 - _MARGIN) * time_limit, progress or _silent)
    greedy = best.run()
    where = np.array([one.pinned or 0 for one in allocations], np.int64)
    if best.offsets is not None:
        where[boxes.source] = best.offsets * alignment
    placed = tuple(
        Placed(**msgspec.structs.asdict(one), offset=offset)
        for one, offset in zip(allocations, where.tolist(), strict=True)
    )
    return AddressPlan(
        allocations=placed,
        clock=clock,
        events=max((one.death for one in allocations), default=0),
        alignment=alignment,
        arena_bytes=(best.height or 0) * alignment,
        live_bytes=peak_bytes(allocations),
        greedy_bytes=greedy * alignment,
        method=best.method,
        optimal=best.proven,
        solve_seconds=time.perf_counter() - began,
    )


def _silent(_: str) -> None:
    pass


class _Search:
    """The lowest placement so far, and who found it."""

    def __init__(self, boxes: Boxes, deadline: float, progress: Callable[[str], None]) -> None:
        self.boxes, self.deadline, self.progress = boxes, deadline, progress
        self.offsets: Ints | None = None
        self.height: int | None = None
        self.by_key: dict[str, int] = {}
        """The height of the skyline by each key, where it was finished."""
        self.method = ""
        self.proven = False

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def take(self, offsets: Ints | None, method: str, proven: bool = False) -> None:
        """Keep a placement if it is lower."""
        if offsets is None:
            return
        height = self.boxes.height(offsets)
        if self.height is None or height < self.height:
            self.offsets, self.height, self.method = offsets, height, method
            self.proven = False
        if height == self.height:
            self.proven |= proven or height == self.boxes.bound

    def run(self) -> int:
        """All that there is time for; what greedy placement by size takes, or at least takes.

        Of few boxes greedy placement comes first, of very many last: then it can often be left early.
        """
        if len(self.boxes) <= _MANY:
            greedy = self.greedy()
            self.skylines(list(KEYS))
            if len(self.boxes) <= _FEW:
                if self.boxes.has_pins or self.left <= 0:
                    self.other_orders()
                self.omnimalloc(1.0)
            else:
                self.raised_skylines()
                self.large_first()
                self.omnimalloc(_SEARCH_SHARE)
                self.noisy_skylines()
            return greedy
        self.omnimalloc(1.0)
        self.skylines(list(KEYS)[:1], at_least=1)
        return self.height or 0 if self.proven else self.greedy()

    def greedy(self) -> int:
        """Always finished, or left when it is no better."""
        count = len(self.boxes)
        offsets = first_fit(
            self.boxes,
            "size",
            stop=self.height,
            progress=lambda placed: self.progress(f"greedy: {placed:,} of {count:,} placed"),
        )
        self.take(offsets, "greedy by size")
        return self.height or 0 if offsets is None else self.boxes.height(offsets)

    def skylines(self, keys: Sequence[str], at_least: int = 0) -> None:
        """By several keys, one after the other; some of them whatever time is left."""
        if self.boxes.has_pins:
            return
        for number, key in enumerate(keys):
            if self.proven or (self.left <= 0 and number >= at_least):
                break
            self.progress(f"from the ground up, by {key}")
            stop = self.height if len(self.boxes) > _MANY else None
            offsets = skyline(self.boxes, weights(self.boxes, key), stop)
            if offsets is not None:
                self.by_key[key] = self.boxes.height(offsets)
            self.take(offsets, f"skyline by {key}")

    def large_first(self) -> None:
        """Large boxes by a search of their own, and what is small between them."""
        seconds = _LARGE_SHARE * self.left
        if self.proven or self.boxes.has_pins or seconds <= 0 or self.height is None:
            return
        self.progress("large ones first")
        search_large(
            self.boxes,
            self._placed,
            lambda offsets: self._found(offsets, "large ones first"),
            self.height,
            deadline=time.perf_counter() + seconds,
            most=_MOST_LARGE,
        )

    def _placed(self, some: Boxes, seconds: float) -> Ints | None:
        """Where a search puts some of the boxes; None where it finds no place below the height."""
        search = _Search(some, time.perf_counter() + seconds, _silent)
        search.run()
        lower = self.height is None or search.height is None or search.height < self.height
        return search.offsets if lower else None

    def best_keys(self) -> list[str]:
        """Those to search around, the best one first; none where there is nothing to search for."""
        if self.proven or self.boxes.has_pins or self.left <= 0 or self.height is None:
            return []
        return sorted(self.by_key, key=self.by_key.__getitem__)[:_STARTS]

    def raised_skylines(self) -> None:
        """Skylines by the best key, raised for what lies too high, where boxes are not too many."""
        best = self.best_keys()[:1]
        if best and self.height is not None and len(self.boxes) <= _MOST_RAISED:
            self.progress(f"from the ground up, by {best[0]} and what lies too high")
            raise_highest(
                self.boxes,
                weights(self.boxes, best[0]),
                lambda offsets: self._found(offsets, f"skyline by raised {best[0]}"),
                self.height,
                deadline=time.perf_counter() + _RAISING_SHARE * self.left,
            )

    def noisy_skylines(self) -> None:
        """Skylines by the best keys, changed a little."""
        best = self.best_keys()
        if not best or self.height is None:
            return
        self.progress(f"from the ground up, by keys around {best[0]}")
        search_around(
            self.boxes,
            [weights(self.boxes, key) for key in best],
            lambda offsets: self._found(offsets, f"skyline around {best[0]}"),
            self.height,
            deadline=self.deadline,
        )

    def worth_searching(self, seconds: float) -> bool:
        """Whether OmniMalloc has time to place every box twice once it is prepared."""
        if self.boxes.has_pins:
            return seconds > 1.1 * preparation_seconds(self.boxes)
        return seconds > preparation_seconds(self.boxes) + 2 * len(self.boxes) * seconds_per_node(self.boxes)

    def omnimalloc(self, share: float) -> None:
        """OmniMalloc's search for a share of the time left, if that is long enough."""
        seconds = share * self.left
        if self.proven or not len(self.boxes) or not self.worth_searching(seconds):
            return
        deadline = time.perf_counter() + seconds
        self.progress(f"OmniMalloc: searching for {seconds:.1f} s")
        solver = None if self.boxes.has_pins else solver_of(self.boxes)
        if solver is None:
            offsets, proven = search(self.boxes, seconds - preparation_seconds(self.boxes))
            self.take(offsets, "OmniMalloc", proven)
            return
        few, cores = len(self.boxes) <= _FEW, min(usable_cores(), len(SEARCHED))
        self.take(solver.greedy(_GREEDY_SHARE * seconds, cores), "OmniMalloc")
        self.proven |= search_again(
            solver,
            [SEARCHED[k : k + cores] for k in range(0, len(SEARCHED), cores)],
            lambda offsets: self._found(offsets, "OmniMalloc"),
            (self.boxes.bound, self.height if self.height is not None else _MOST_BYTES),
            deadline=deadline,
            boxes=len(self.boxes),
            pace=0.0 if few else seconds_per_node(self.boxes),
        )

    def _found(self, offsets: Ints, method: str) -> int:
        self.take(offsets, method)
        self.progress(f"{method}: {self.boxes.bound / (self.height or 1):.2%}, {self.left:.1f} s left")
        return self.boxes.height(offsets)

    def other_orders(self) -> None:
        """Greedy placement in other orders."""
        for order in ORDERS:
            if order != "size" and not self.proven:
                self.take(first_fit(self.boxes, order, stop=self.height), f"greedy by {order}")


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
        raise PlanError(f"allocations of {total} bytes in all; at most 2^62 can be placed; check the sizes")
    _refuse_colliding(allocations)


def _refuse_colliding(allocations: Sequence[Allocation]) -> None:
    """Two that are pinned over each other have no placement."""
    pinned = [
        (one.pinned, k, one) for k, one in enumerate(allocations) if one.pinned is not None and one.bytes
    ]
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
