"""Which dimension of a tensor each axis of a mesh cuts, and the Rect that a device then holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from lowtide.errors import PlanError
from lowtide.graph.rect import Rect
from lowtide.graph.shards.mesh import Mesh

__all__ = ["Cut", "OperatorShare", "Shards", "box_of", "replicated"]

Cut = tuple[int | None, ...]
"""For each axis of the mesh the dimension that it cuts; None where all devices along it hold the same."""


def replicated(mesh: Mesh) -> Cut:
    """No axis cuts anything."""
    return (None,) * len(mesh.sizes)


def box_of(shape: Sequence[int], cut: Cut, mesh: Mesh, rank: int) -> Rect:
    """What a device holds of a tensor. Parts differ by one element at most."""
    lo, hi = [0] * len(shape), list(shape)
    for dim, size, along in zip(cut, mesh.sizes, mesh.place(rank), strict=True):
        if dim is None:
            continue
        first, length = lo[dim], hi[dim] - lo[dim]
        if length < size:
            raise PlanError(
                f"dimension {dim} of a tensor of shape {tuple(shape)} has {length} elements left, "
                f"too few for {size} devices"
            )
        lo[dim], hi[dim] = first + length * along // size, first + length * (along + 1) // size
    return Rect(tuple(lo), tuple(hi))


class OperatorShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an operator is shared out."""

    cut: Cut
    """That of its results."""
    over: Cut
    """For each axis of the mesh the summed axis of the operator that it cuts: each device has a part of the
    sum then, and these are added up. Where the axis cuts the results too, each gets its part of them."""

    @property
    def computed(self) -> Cut:
        """The cut of what a device computes, before parts of a sum are added up."""
        return tuple(None if o is not None else d for d, o in zip(self.cut, self.over, strict=True))

    def shared(self, axis: int) -> bool:
        """Whether devices along an axis of the mesh do different things."""
        return self.cut[axis] is not None or self.over[axis] is not None


class Shards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a step is split over a mesh."""

    mesh: Mesh
    leaves: Mapping[int, Cut]
    """Of parameters, buffers and inputs, by tensor; what is not here is replicated."""
    operators: Mapping[int, OperatorShare]
    """Of the operators of forward, by their number; what is not here runs on every device."""

    def share(self, op: int) -> OperatorShare:
        """That of an operator."""
        none = replicated(self.mesh)
        return self.operators.get(op) or OperatorShare(none, none)
