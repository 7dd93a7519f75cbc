"""Whether the tiles of a loop cover its axes, each part once. Serves the checker alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lowtide.plan.program import Tile

__all__ = ["wrong_tiles"]


def wrong_tiles(tiles: Sequence[Tile], axes: Sequence[int], bodies: int) -> str | None:
    """What is wrong with the tiles, in words; None where nothing is. There are so many ``bodies``."""
    size = 0
    for k, tile in enumerate(tiles):
        box = tile.over
        if len(box.lo) != len(axes) or not all(
            0 <= lo < hi <= n for lo, hi, n in zip(box.lo, box.hi, axes, strict=True)
        ):
            return f"turns for {box}, which is no part of axes of {tuple(axes)}"
        if not 0 <= tile.body < bodies:
            return f"turns body {tile.body}; the program has {bodies}"
        for other in tiles[:k]:
            pairs = zip(box.lo, box.hi, other.over.lo, other.over.hi, strict=True)
            if all(lo < end and start < hi for lo, hi, start, end in pairs):
                return f"turns twice for what {box} and {other.over} share"
        size += math.prod(hi - lo for lo, hi in zip(box.lo, box.hi, strict=True))
    return None if size == math.prod(axes) else f"leaves out parts of axes of {tuple(axes)}"
