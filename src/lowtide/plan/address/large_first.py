"""Placement of large boxes by a search, and of small ones in what they leave.

Of hundreds of boxes branch and bound often finds nothing in seconds, as it goes back and forth over small
ones that would fit in many places. Large boxes alone are few, and their best placement is found soon. The
others fit between them, or nearly, by first fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from lowtide.plan.address.boxes import FREE, Boxes, Ints, largest_load
from lowtide.plan.address.first_fit import first_fit

__all__ = ["search_large"]

_LEAST = tuple(0.05 * 0.7**k for k in range(14))
"""Sizes from which on boxes are large, as shares of the lower bound."""
_COVERED = 0.9
"""They take so much of the lower bound at least; less says little of where the others fit."""
_MORE = 1.15
"""So many times as many as of the size before, or it is left out."""


def search_large(
    boxes: Boxes,
    search: Callable[[Boxes, float], Ints | None],
    take: Callable[[Ints], int],
    height: int,
    *,
    deadline: float,
    most: int,
) -> int:
    """Place until the deadline, or until the bound is reached; the lowest height.

    ``search`` places boxes in so many seconds, or does not; it gets so many at ``most``. ``height`` is that
    of the best placement so far; ``take`` gets each that is lower, and gives its height. No box is pinned.
    """
    sets = list(_sets(boxes, most))
    for number, (large, some) in enumerate(sets):
        left = deadline - time.perf_counter()
        if left <= 0 or height <= boxes.bound:
            break
        found = search(some, left / (len(sets) - number))
        if found is None:
            continue
        places = np.full(len(boxes), FREE)
        places[large] = found
        pinned = replace(boxes, pinned=places)
        offsets = first_fit(pinned, "size", stop=height)
        if offsets is not None:
            height = take(offsets)
    return height


def _sets(boxes: Boxes, most: int) -> Iterator[tuple[Ints, Boxes]]:
    """The boxes that are large, by one size after the other."""
    before = 1.0
    for share in _LEAST:
        large = np.flatnonzero(boxes.size >= share * boxes.bound)
        if not _MORE * before <= len(large) <= min(most, len(boxes) - 1):
            continue
        some = _only(boxes, large)
        if some.bound >= _COVERED * boxes.bound:
            before = len(large)
            yield large, some


def _only(boxes: Boxes, large: Ints) -> Boxes:
    columns = ("source", "birth", "death", "lifetime", "start", "size", "pinned")
    some = {name: getattr(boxes, name)[large] for name in columns}
    bound = largest_load(some["birth"], some["death"], some["size"], boxes.instants)
    return replace(boxes, **some, bound=bound)
