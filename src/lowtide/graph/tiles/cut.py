"""``tile_output`` and ``tile_input``: a step cut into tiles, or the operator that prevents it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence

from lowtide.errors import TileError
from lowtide.graph.access import Access
from lowtide.graph.rect import Rect
from lowtide.graph.tiles.carry import Lost, blocker, follow
from lowtide.graph.tiles.region import (
    Region,
    accesses_of,
    cut_input,
    ends,
    gradient_region,
    named_end,
    names,
    output_region,
)
from lowtide.graph.tiles.types import Cut, Own, TileNeeds, TilingNeeds, share
from lowtide.graph.tiles.walk import parts_for
from lowtide.graph.types import Graph
from lowtide.printable import printable

__all__ = ["grid_of", "reaches", "tile_input", "tile_output"]


def tile_output(graph: Graph, cut: Cut, until: str = "") -> TilingNeeds:
    """Tiles of the last result of forward that has the dimensions of the cut, in front of the loss.

    ``until`` names an operator whose result is cut instead. Every tile computes the part of each tensor that
    its own part of the result needs. A TileError names the operator of which a part cannot be computed.
    """
    accesses = accesses_of(graph)
    end = _end(graph, cut, until, accesses)
    return _tiling(graph, cut, "output", end, output_region(graph, end, accesses))


def tile_input(graph: Graph, cut: Cut, until: str = "") -> TilingNeeds:
    """Tiles of the gradient of the first input that has one and the dimensions of the cut.

    Every tile computes the exact gradient of its own part of the input: what that needs of the gradient of
    the last result that has these dimensions, and of the activations in between. Gradients of that result are
    taken as given.
    """
    accesses = accesses_of(graph)
    end = _end(graph, cut, until, accesses)
    region = gradient_region(graph, end, cut_input(graph, cut), accesses)
    return _tiling(graph, cut, "input", end, region)


def reaches(graph: Graph, gradient: int, given: int, boxes: Sequence[Rect]) -> list[Rect | None]:
    """For each box of a gradient the part of another, ``given`` from outside, that it depends on, if any."""
    accesses = accesses_of(graph)
    found = (parts_for(graph, range(len(graph.ops)), accesses, {gradient: box}).get(given) for box in boxes)
    return [None if reach is None or reach.empty else reach for reach in found]


def _end(graph: Graph, cut: Cut, until: str, accesses: Mapping[int, Access]) -> int:
    candidates = ends(graph, cut, accesses)
    return named_end(graph, candidates, until) if until else candidates[-1]


def _tiling(graph: Graph, cut: Cut, own: Own, end: int, region: Region) -> TilingNeeds:
    shape = graph.tensors[region.tensor].shape or ()
    dims = cut.of(shape)
    for d, parts in zip(dims, cut.grid, strict=True):
        if shape[d] < parts:
            label = printable(graph.tensors[region.tensor].label)
            most = "x".join(str(min(shape[d], n)) for d, n in zip(dims, cut.grid, strict=True))
            raise TileError(
                f"a grid of {'x'.join(map(str, cut.grid))} does not fit {label} of shape {shape}: dimension "
                f"{d} has {shape[d]} elements; try {most}"
            )
    carried, lost = follow(graph, region.ops, region.accesses, region.tensor, dims)
    found = blocker(graph, region.ops, region.accesses, carried, lost)
    if found is not None:
        raise _prevented(graph, cut, own, end, region.accesses, found)
    tiles = _tiles(graph, cut, region, shape)
    needed = {t for tile in tiles for t in tile.parts}
    ops = tuple(k for k in region.ops if needed.intersection(graph.ops[k].outputs))
    return TilingNeeds(
        own=own,
        cut=cut,
        tensor=region.tensor,
        end=end,
        given=region.given,
        ops=ops,
        accesses={k: region.accesses[k] for k in ops},
        carried={t: dims for t, dims in carried.items() if any(dims)},
        tiles=tiles,
    )


def _tiles(graph: Graph, cut: Cut, region: Region, shape: tuple[int, ...]) -> tuple[TileNeeds, ...]:
    coords = itertools.product(*map(range, cut.grid))
    return tuple(
        TileNeeds(coord, own, parts_for(graph, region.ops, region.accesses, {region.tensor: own}))
        for coord, own in zip(coords, grid_of(cut, shape), strict=True)
    )


def grid_of(cut: Cut, shape: tuple[int, ...]) -> list[Rect]:
    """The boxes of a cut, along the last axis of the grid first."""
    found = []
    for coord in itertools.product(*map(range, cut.grid)):
        lo, hi = [0] * len(shape), list(shape)
        for d, parts, place in zip(cut.of(shape), cut.grid, coord, strict=True):
            lo[d], hi[d] = share(shape[d], parts, place)
        found.append(Rect(tuple(lo), tuple(hi)))
    return found


def _prevented(
    graph: Graph, cut: Cut, own: Own, end: int, accesses: dict[int, Access], found: Lost
) -> TileError:
    op, tensor = graph.ops[found.op], graph.tensors[found.tensor]
    place = f"{op.source.file}:{op.source.line}: " if op.source else ""
    name = f"{op.kind} ({op.label})" if op.label != op.kind else op.kind
    why = (
        f"needs all of {tensor.label} {tensor.shape}, whatever part of its result is wanted"
        if accesses[found.op].known
        else "is not known, so all of its inputs are needed for any part of its result"
    )
    advice = "so the gradient of a part of the input cannot be computed from parts; cut the output instead"
    if own == "output":
        instead = _last_that_works(graph, cut, end)
        advice = f"what is in front of it can be cut, until {instead}" if instead else "nothing can be cut so"
    return TileError(printable(f"{place}{name} {why}; {advice}"), op=found.op)


def _last_that_works(graph: Graph, cut: Cut, end: int) -> str | None:
    """The operator of the last result that can be cut: what follows one that cannot be, cannot either."""
    accesses = accesses_of(graph)
    candidates = ends(graph, cut, accesses)
    del candidates[candidates.index(end) :]

    def blocked(tensor: int) -> bool:
        region = output_region(graph, tensor, accesses)
        dims = cut.of(graph.tensors[tensor].shape or ())
        carried, lost = follow(graph, region.ops, region.accesses, tensor, dims)
        return blocker(graph, region.ops, region.accesses, carried, lost) is not None

    working = bisect.bisect_left(candidates, True, key=blocked)
    return names(graph, candidates)[candidates[working - 1]][0] if working else None
