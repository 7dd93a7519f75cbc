"""Which rows of a large table are kept, so that the page opens whatever the size of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "MOST_BLOCKS",
    "MOST_MOMENTS",
    "MOST_NODES",
    "MOST_OPERATORS",
    "MOST_SPANS",
    "Ints",
    "extremes",
    "rounded_seconds",
]

Ints = npt.NDArray[np.int64]

MOST_MOMENTS = 8_000
MOST_BLOCKS = 10_000
MOST_OPERATORS = 20_000
MOST_SPANS = 12_000
MOST_NODES = 6_000


def extremes(values: Ints, most: int) -> Ints:
    """Positions of at most ``most`` values in order: the largest and the smallest of each run of neighbours.

    The largest of all is among them.
    """
    count = len(values)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    each = -(-count // (most // 2))
    whole = count // each * each
    rows = values[:whole].reshape(-1, each)
    first = np.arange(0, whole, each)
    kept = [first + rows.argmax(1), first + rows.argmin(1)]
    if whole < count:
        rest = values[whole:]
        kept.append(np.array([whole + int(rest.argmax()), whole + int(rest.argmin())]))
    return np.unique(np.concatenate(kept))


def rounded_seconds(values: Sequence[float]) -> tuple[float, ...]:
    """Times to seven digits of the longest of them: what no screen shows is not worth its bytes."""
    longest = max((abs(value) for value in values), default=0.0)
    if longest <= 0:
        return tuple(values)
    digits = max(0, 7 - int(np.floor(np.log10(longest))) - 1)
    return tuple(round(float(value), digits) for value in values)
