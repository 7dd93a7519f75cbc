"""What tiles of a step compute, hold and read, from shapes alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from lowtide.graph import RESIDENT_ROLES, Rect, Role
from lowtide.trace.groups.fusible import fuses
from lowtide.trace.tiles.tiling import Tiling

__all__ = ["Geometry", "geometry", "operators", "working"]


_INSIDE = 0.25
"""The share of what a fused operator reads and writes that its group has in memory, at least."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Figures of a way to cut."""

    working_bytes: int
    """What an operator reads and writes at once, the most in any tile; of a fused one, a part of it."""
    gradient_bytes: int
    """Sums of gradients that tiles add to, with the largest that one tile makes beside them."""
    elements: int
    """Of the largest tensor that a tile makes."""
    share: float
    """Elements that the largest tile computes from the batch, over those of the whole step."""
    overlap: float
    """Elements that all tiles compute from the batch, over those of the whole step."""
    read: float
    """Elements that all tiles read of the batch, over those of the whole step."""


def geometry(tiling: Tiling, boxes: Sequence[Rect], samples: int | None = None) -> Geometry:
    """The figures of tiles of these boxes; with ``samples``, those of so many tiles stand for all."""
    looked = list(boxes)
    if samples is not None and samples < len(looked):
        looked = random.Random(0).sample(looked, samples)  # noqa: S311
        looked.append(max(boxes, key=lambda box: box.size))
    whole = _whole(tiling)
    tiles = [_tile(tiling, box) for box in looked]
    counted = tiles if samples is None else tiles[:samples]
    times = len(boxes) / len(counted)
    return Geometry(
        max(tile.working for tile in tiles),
        max(tile.gradients for tile in tiles),
        max(tile.largest for tile in tiles),
        max(tile.made for tile in tiles) / max(1, whole.made),
        times * sum(tile.made for tile in counted) / max(1, whole.made),
        times * sum(tile.read for tile in counted) / max(1, whole.read),
    )


def operators(tiling: Tiling) -> int:
    """How many operators of forward are in the region."""
    return _whole(tiling).operators


def working(tiling: Tiling, over: Rect) -> int:
    """The largest working set of an operator for a box, in bytes."""
    return _tile(tiling, over).working


@dataclass(slots=True)
class _Tile:
    operators: int = 0
    made: int = 0
    read: int = 0
    largest: int = 0
    working: int = 0
    gradients: int = 0


_WHOLE: WeakKeyDictionary[Tiling, _Tile] = WeakKeyDictionary()


def _whole(tiling: Tiling) -> _Tile:
    if tiling not in _WHOLE:
        _WHOLE[tiling] = _tile(tiling, Rect.of_shape(tiling.axes))
    return _WHOLE[tiling]


def _tile(tiling: Tiling, over: Rect) -> _Tile:
    graph = tiling.graph
    needed, before = tiling.needed(over)
    size = {t: box.size * _item(graph.tensors[t].bytes, graph.tensors[t].shape) for t, box in needed.items()}
    found = _Tile(read=sum(box.size for t, box in needed.items() if graph.tensors[t].role is Role.INPUT))
    added = [t for t in needed if t in tiling.differentiable]
    sums = [tiling.gradient_sum(t) for t in added]
    found.gradients = sum(one.numel() * one.itemsize for one in sums)
    found.gradients += int(max((size[t] for t in added), default=0))
    fused = tiling.joint.kernels is not None
    fixed = {t for t in needed if graph.tensors[t].role in RESIDENT_ROLES - {Role.INPUT}}
    for op, call in tiling.steps:
        outputs = [t for t in op.outputs if t in needed and t not in before]
        found.operators += bool(outputs)
        new = [t for t in outputs if graph.tensors[t].alias is None]
        of_weights = bool(op.inputs) and fixed.issuperset(op.inputs)  # as a cast: the same in all tiles
        fixed.update(op.outputs if of_weights else ())
        if not new:
            continue
        found.made += 0 if of_weights else sum(needed[t].size for t in new)
        found.largest = max(found.largest, *(needed[t].size for t in new))
        there = {t for t in (*op.inputs, *new) if t in size and graph.tensors[t].role not in RESIDENT_ROLES}
        inside = fused and fuses(call.target)
        found.working = max(found.working, int(sum(size[t] for t in there) * (_INSIDE if inside else 1)))
    return found


def _item(size: int, shape: tuple[int, ...] | None) -> float:
    return size / max(1, math.prod(shape or ()))
