"""The nouns of tiling: Cut (what is asked for), TileNeeds, and TilingNeeds (all tiles of a step)."""

from __future__ import annotations

from typing import Literal

import msgspec

from lowtide.errors import TileError
from lowtide.graph.access import Access
from lowtide.graph.rect import Rect

__all__ = ["BATCH", "SPACE", "Carried", "Cut", "Own", "TileNeeds", "TilingNeeds", "share"]

Own = Literal["output", "input"]
"""What is cut into disjoint parts: a result of forward, or the gradient of an input."""
Carried = tuple[tuple[int, ...], ...]
"""For each axis of the grid the dimensions of a tensor that follow it."""

SPACE = (-2, -1)
"""Rows and columns of an image."""
BATCH = (0,)


class Cut(msgspec.Struct, frozen=True):
    """How a tensor is cut: into how many parts along which of its dimensions."""

    grid: tuple[int, ...]
    dims: tuple[int, ...] = SPACE
    """Negative ones count from the end."""

    def __post_init__(self) -> None:
        if len(self.grid) != len(self.dims):
            raise TileError(
                f"a grid of {len(self.grid)} numbers for {len(self.dims)} dimensions; give one for each"
            )
        if min(self.grid, default=0) < 1:
            raise TileError("every number of a grid is at least 1, as in 4x4")

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all these dimensions, once each."""
        rank = len(shape)
        inside = [d for d in self.dims if -rank <= d < rank]
        return len({d % rank for d in inside}) == len(self.dims)

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions of a tensor of this shape, counted from the beginning."""
        return tuple(d % len(shape) for d in self.dims)


class TileNeeds(msgspec.Struct, frozen=True):
    """One tile: its disjoint part of the tensor that is cut, and the parts of all others that it needs."""

    coord: tuple[int, ...]
    """Its place in the grid, one number an axis."""
    own: Rect
    parts: dict[int, Rect]
    """By tensor; what is not here is not needed."""


class TilingNeeds(msgspec.Struct, frozen=True):
    """A step in tiles: which operators every tile runs on parts, and which parts."""

    own: Own
    cut: Cut
    tensor: int
    """The tensor that is cut into disjoint parts."""
    end: int
    """The result of forward at which the tiles end; what follows it is computed once, untiled."""
    given: int | None
    """The gradient of ``end``, from which the tiles of an input go back; None without it."""
    ops: tuple[int, ...]
    """Operators that tiles run, in program order."""
    accesses: dict[int, Access]
    """Their access relations."""
    carried: dict[int, Carried]
    """The dimensions of every tensor that follow the grid."""
    tiles: tuple[TileNeeds, ...]
    """Along the last axis of the grid first."""


def share(length: int, parts: int, place: int) -> tuple[int, int]:
    """The place's range of a dimension that is cut into nearly equal parts."""
    return length * place // parts, length * (place + 1) // parts
