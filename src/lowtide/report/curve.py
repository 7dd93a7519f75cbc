"""The memory curve: thinned for a file, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["draw", "thin"]

_POINTS = 240
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def thin(values: Sequence[int], points: int = _POINTS) -> dict[str, Any]:
    """At most ``points`` values, each the largest of the operators it stands for, and how many those are."""
    each = max(1, -(-len(values) // points))
    kept = [max(values[k : k + each]) for k in range(0, len(values), each)]
    return {"bytes": kept, "ops_per_point": each, "thinned": each > 1}


def draw(values: Sequence[int], width: int, height: int = 6) -> list[str]:
    """Lines of block characters, the highest first; the scale starts at zero."""
    if not values:
        return []
    columns = min(width, len(values)) if len(values) > width else len(values)
    heights = [
        max(
            values[
                k * len(values) // columns : max(
                    (k + 1) * len(values) // columns, k * len(values) // columns + 1
                )
            ]
        )
        for k in range(columns)
    ]
    repeat = max(1, width // columns)
    top = max(heights) or 1
    eighths = [round(value / top * height * 8) for value in heights]
    return [
        "".join(_EIGHTHS[min(8, max(0, e - 8 * row))] * repeat for e in eighths)
        for row in reversed(range(height))
    ]
