"""What tiles of a step compute, and how much of it is there at once, told from boxes alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from lowtide.capture.tile import Tiling
from lowtide.graph import RESIDENT_ROLES, Rect

__all__ = ["geometry", "working"]

_SAMPLES = 8
"""So many tiles are looked at."""


def geometry(tiling: Tiling, boxes: Sequence[Rect]) -> tuple[int, float]:
    """The largest working set of an operator in one tile; elements computed over those of the whole."""
    some = random.Random(0).sample(list(boxes), min(_SAMPLES, len(boxes)))  # noqa: S311
    whole, _ = _computed(tiling, Rect.of_shape(tiling.axes))
    looked = [_computed(tiling, box) for box in (*some, max(boxes, key=lambda box: box.size))]
    parts = [made for made, _ in looked[:-1]]
    return max(working for _, working in looked), sum(parts) / len(parts) * len(boxes) / max(1, whole)


def working(tiling: Tiling, over: Rect) -> int:
    """The largest working set of an operator for a box, in bytes."""
    return _computed(tiling, over)[1]


def _computed(tiling: Tiling, over: Rect) -> tuple[int, int]:
    """Elements that are computed for a box, and the largest working set of an operator, in bytes."""
    graph = tiling.graph
    needed, before = tiling.needed(over)
    size = {t: box.size * _item(graph.tensors[t].bytes, graph.tensors[t].shape) for t, box in needed.items()}
    made = most = 0
    for op, _ in tiling.steps:
        outputs = [t for t in op.outputs if t in needed and t not in before]
        new = [t for t in outputs if graph.tensors[t].alias is None]
        made += sum(needed[t].size for t in new)
        there = {t for t in (*op.inputs, *new) if t in size and graph.tensors[t].role not in RESIDENT_ROLES}
        most = max(most, int(sum(size[t] for t in there)) if new else 0)
    return made, most


def _item(size: int, shape: tuple[int, ...] | None) -> float:
    return size / max(1, math.prod(shape or ()))
