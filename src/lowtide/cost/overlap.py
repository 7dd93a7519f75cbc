"""What tiles compute more than once: work of all tiles over that of the whole step."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import msgspec

from lowtide.cost.work import flop, is_view
from lowtide.graph import Graph
from lowtide.graph.tiles import TilingNeeds

__all__ = ["Overlap", "overlap_of", "overlap_of_op"]


class Overlap(msgspec.Struct, frozen=True):
    """How much more the tiles compute than one run of their operators does; 1 where parts are disjoint."""

    elements: float
    """Elements that operators write, views left out."""
    flop: float
    """The same with each operator counted by its floating-point operations."""


def overlap_of_op(graph: Graph, tiling: TilingNeeds, k: int) -> float:
    """Elements of one operator's results that all tiles write, over those of its whole results."""
    tensors = [t for t in graph.ops[k].outputs if any(t in tile.parts for tile in tiling.tiles)]
    whole = sum(prod(graph.tensors[t].shape or ()) for t in tensors)
    computed = sum(tile.parts[t].size for tile in tiling.tiles for t in tensors if t in tile.parts)
    return computed / whole if whole else 1.0


def overlap_of(graph: Graph, tiling: TilingNeeds) -> Overlap:
    """All operators together. Of an operator that computes a part its share of the FLOP is counted."""
    elements, operations = [], []
    for k in tiling.ops:
        op = graph.ops[k]
        if is_view(graph, op):
            continue
        factor = overlap_of_op(graph, tiling, k)
        elements.append((prod(graph.tensors[op.outputs[0]].shape or ()), factor))
        operations.append((flop(graph, op)[0], factor))
    return Overlap(_mean(elements), _mean(operations))


def _mean(weighted: Iterable[tuple[int, float]]) -> float:
    """The mean of factors, each counted by its weight; 1 where nothing is done at all."""
    pairs = list(weighted)
    total = sum(weight for weight, _ in pairs)
    return sum(weight * factor for weight, factor in pairs) / total if total else 1.0
