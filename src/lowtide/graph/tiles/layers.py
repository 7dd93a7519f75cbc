"""What one operator writes and reads for one tile: regions, halo and padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from lowtide.graph.access import Relation
from lowtide.graph.rect import Rect
from lowtide.graph.tiles.types import TileNeeds, TilingNeeds
from lowtide.graph.types import Graph

__all__ = ["Layer", "Margin", "Read", "layers"]

Margin = tuple[tuple[int, int], ...]
"""Elements before and after, for each axis of the grid."""


class Read(msgspec.Struct, frozen=True):
    """The part of one tensor that an operator reads for a tile."""

    tensor: int
    reach: Rect
    """Without regard to where the tensor ends."""
    region: Rect
    """``reach`` cut to the tensor."""
    padding: Margin
    """What ``reach`` has beyond the tensor."""
    halo: Margin
    """What belongs to neighbours: half of what this tile and the next one both read, less the padding.

        ├────── this tile reads ──────┤
                          ├────── the next one reads ──────┤
                          ├── both ──┤     half of it is halo on either side
    """


class Layer(msgspec.Struct, frozen=True):
    """What one operator does for one tile."""

    op: int
    tensor: int
    """The output that is described: the first that follows the grid."""
    written: Rect
    reads: tuple[Read, ...]
    """Tensors that follow the grid; weights and the like are read whole."""


def layers(graph: Graph, tiling: TilingNeeds, tile: TileNeeds) -> tuple[Layer, ...]:
    """One Layer for each operator that the tile runs, in program order."""
    found = []
    for k in tiling.ops:
        op = graph.ops[k]
        outputs = [
            (t, r) for t, r in zip(op.outputs, tiling.accesses[k].relations, strict=True) if t in tile.parts
        ]
        if not outputs:
            continue
        described = next((t for t, _ in outputs if t in tiling.carried), outputs[0][0])
        reads = [
            _read(tiling, tile, position, tensor, outputs)
            for position, tensor in enumerate(op.inputs)
            if tensor in tiling.carried and any(r.inputs[position] is not None for _, r in outputs)
        ]
        found.append(
            Layer(k, described, tile.parts[described], tuple(r for r in reads if not r.region.empty))
        )
    return tuple(found)


def _read(
    tiling: TilingNeeds, tile: TileNeeds, position: int, tensor: int, outputs: Sequence[tuple[int, Relation]]
) -> Read:
    """What is read of one input for all outputs that the tile needs."""
    shape = outputs[0][1].input_shapes[position]
    nothing = Rect((0,) * len(shape), (0,) * len(shape))
    reach, halo = nothing, ((0, 0),) * len(tiling.cut.grid)
    for output, relation in outputs:
        rect = tile.parts[output]
        own = relation.reach(rect)[position]
        if own is None:
            continue
        reach = reach.hull(own)
        written = _single(tiling, output)
        beside = tuple(
            _halo(relation, rect, own, position, axis, dim)
            for axis, dim in zip(written, _single(tiling, tensor), strict=True)
        )
        halo = tuple((max(a, c), max(b, d)) for (a, b), (c, d) in zip(halo, beside, strict=True))
    region = reach.clip(shape)
    padding = tuple(
        (0, 0) if dim is None or region.empty else _beyond(reach, dim, shape[dim])
        for dim in _single(tiling, tensor)
    )
    return Read(tensor, reach, region, padding, halo)


def _single(tiling: TilingNeeds, tensor: int) -> list[int | None]:
    """The dimension of a tensor that follows each axis of the grid; None where it is not one for one."""
    carried = tiling.carried.get(tensor, ((),) * len(tiling.cut.grid))
    often = Counter(d for along in carried for d in along)
    return [along[0] if len(along) == 1 and often[along[0]] == 1 else None for along in carried]


def _beyond(reach: Rect, dim: int, length: int) -> tuple[int, int]:
    return max(0, -reach.lo[dim]), max(0, reach.hi[dim] - length)


def _halo(
    relation: Relation, rect: Rect, reach: Rect, position: int, axis: int | None, dim: int | None
) -> tuple[int, int]:
    """What is read along one dimension that neighbours along an axis of the output read for their part."""
    if axis is None or dim is None:
        return 0, 0
    length, padding = relation.shape[axis], _beyond(reach, dim, relation.input_shapes[position][dim])
    before = after = 0
    if rect.lo[axis] > 0:
        last = _beside(relation, rect, position, axis, rect.lo[axis] - 1)
        before = max(0, (max(0, last.hi[dim] - reach.lo[dim]) + 1) // 2 - padding[0])
    if rect.hi[axis] < length:
        first = _beside(relation, rect, position, axis, rect.hi[axis])
        after = max(0, max(0, reach.hi[dim] - first.lo[dim]) // 2 - padding[1])
    return before, after


def _beside(relation: Relation, rect: Rect, position: int, axis: int, place: int) -> Rect:
    """What is read for the elements at one place of an axis."""
    lo, hi = list(rect.lo), list(rect.hi)
    lo[axis], hi[axis] = place, place + 1
    found = relation.reach(Rect(tuple(lo), tuple(hi)))[position]
    assert found is not None
    return found
