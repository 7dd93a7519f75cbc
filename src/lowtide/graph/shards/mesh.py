"""Mesh: devices in a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from lowtide.errors import PlanError

__all__ = ["Mesh"]


class Mesh(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices in a grid, counted along its last axis first."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 1 for size in self.sizes):
            raise PlanError(f"a mesh has at least one device along each axis, and not {list(self.sizes)}")

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.sizes)

    def place(self, rank: int) -> tuple[int, ...]:
        """Where a device is along each axis."""
        if not 0 <= rank < self.devices:
            raise PlanError(f"a mesh of {self.devices} devices has no device {rank}")
        found: list[int] = []
        for size in reversed(self.sizes):
            rank, along = divmod(rank, size)
            found.append(along)
        return tuple(reversed(found))

    def rank(self, place: tuple[int, ...]) -> int:
        """The device at a place."""
        found = 0
        for along, size in zip(place, self.sizes, strict=True):
            found = found * size + along
        return found

    def line(self, rank: int, axis: int) -> tuple[int, ...]:
        """The devices along an axis, this one among them."""
        place = self.place(rank)
        return tuple(self.rank((*place[:axis], k, *place[axis + 1 :])) for k in range(self.sizes[axis]))

    def plane(self, rank: int, axes: Sequence[int]) -> tuple[int, ...]:
        """The devices that differ from this one along some axes alone, this one among them."""
        found = [rank]
        for axis in axes:
            found = [other for one in found for other in self.line(one, axis)]
        return tuple(found)
