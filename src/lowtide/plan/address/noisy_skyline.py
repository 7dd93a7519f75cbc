"""Placement from the ground up with keys that are changed a little, again and again.

Of thousands of boxes branch and bound finds nothing in seconds, while the skyline is close to the bound at
once. What it wastes depends on which of a few boxes comes first. Either the keys of one in ten are drawn anew
around those of the best placement so far, which is good for thousands of boxes. Or the keys of all boxes that
end above the bound are raised, so that they come earlier, which is good for hundreds ("squeaky wheel"
optimization, Joslin and Clements 1999).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from lowtide.plan.address.boxes import Boxes, Ints
from lowtide.plan.address.skyline import Weights, skyline

__all__ = ["raise_highest", "search_around"]

_SHARE, _SPREAD = 0.1, 0.3
"""How many keys are changed, and by how much: the deviation of their logarithms."""
_RAISED, _NOISE = 0.5, 0.02
"""The logarithm of a key is raised by so much at most; the deviation of what is added to those of all."""
_PATIENCE = 10
"""After so many placements that are no better, keys are those of the best one again."""


def search_around(
    boxes: Boxes,
    starts: Sequence[Weights],
    take: Callable[[Ints], int],
    height: int,
    *,
    deadline: float,
    most: int | None = None,
) -> int:
    """Place until the deadline, ``most`` times at most, or until the bound is reached; the lowest height.

    ``starts`` are keys whose placements are good, and ``height`` is that of the best; ``take`` gets each
    placement that is lower, and gives its height. A placement is begun only if there seems to be time for it.
    """
    draw = np.random.default_rng(0)
    keys, longest, count = list(starts), 0.0, 0
    while keys and height > boxes.bound and (most is None or count < most):
        began = time.perf_counter()
        if began + longest >= deadline:
            break
        which = count % len(keys)
        changed = draw.random(len(boxes)) < _SHARE
        around = keys[which] * np.exp(_SPREAD * draw.standard_normal(len(boxes)) * changed)
        offsets = skyline(boxes, around, height)
        if offsets is not None:
            height, keys[which] = take(offsets), around
        longest = max(longest, time.perf_counter() - began)
        count += 1
    return height


def raise_highest(
    boxes: Boxes, keys: Weights, take: Callable[[Ints], int], height: int, *, deadline: float
) -> int:
    """Place until the deadline, or until the bound is reached; the lowest height.

    The first placement is by the ``keys``. ``take`` and ``height`` are as for ``search_around``; placements
    that are higher than that count too, as the search has to come down first.
    """
    draw = np.random.default_rng(0)
    best, lowest, failed, longest = keys, None, 0, 0.0
    while height > boxes.bound:
        began = time.perf_counter()
        if began + longest >= deadline:
            break
        offsets = skyline(boxes, keys)
        assert offsets is not None  # as it may be of any height
        found = boxes.height(offsets)
        height = take(offsets) if found < height else height
        if lowest is None or found < lowest:
            best, lowest, failed = keys, found, 0
        elif failed == _PATIENCE:
            keys, failed = best, 0
        else:
            failed += 1
        above = offsets + boxes.size > boxes.bound
        raised = _RAISED * draw.random(len(boxes)) * above + _NOISE * draw.standard_normal(len(boxes))
        keys = keys * np.exp(raised)
        longest = max(longest, time.perf_counter() - began)
    return height
