"""Placement from the ground up with keys that are changed a little, again and again.

Of thousands of boxes branch and bound finds nothing in seconds, while the skyline is close to the bound at
once. What it wastes depends on which of a few boxes comes first: the keys of one in ten are drawn anew around
those of the best placement so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from lowtide.plan.address.boxes import Boxes, Ints
from lowtide.plan.address.skyline import Weights, skyline

__all__ = ["search_around"]

_SHARE, _SPREAD = 0.1, 0.3
"""How many keys are changed, and by how much: the deviation of their logarithms."""


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
