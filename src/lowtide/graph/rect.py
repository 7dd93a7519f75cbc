"""Rect: a half-open box of a tensor, ``lo <= i < hi`` in every dimension."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence

import msgspec

from lowtide.errors import GraphError

__all__ = ["Rect"]


class Rect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """The box of indices ``i`` with ``lo[d] <= i[d] < hi[d]`` for every dimension ``d``.

        0   lo          hi
        ·····├───────────┤·······   size = hi - lo, empty where hi <= lo

    A box with no dimensions is a scalar: one element.
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise GraphError(
                f"a Rect needs as many upper as lower bounds, got {len(self.hi)} and {len(self.lo)}"
            )

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> Rect:
        """The whole of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """How many dimensions the box has."""
        return len(self.lo)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension, never negative."""
        return tuple([hi - lo if hi > lo else 0 for lo, hi in zip(self.lo, self.hi, strict=True)])

    @property
    def size(self) -> int:
        """How many elements the box holds."""
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        """Whether the box holds nothing."""
        return any(map(operator.le, self.hi, self.lo))

    def _same_rank(self, other: Sequence[int], what: str) -> None:
        if len(other) != self.ndim:
            raise GraphError(f"{what} has {len(other)} dimensions, the Rect has {self.ndim}")

    def intersect(self, other: Rect) -> Rect:
        """What both boxes hold; boxes that do not meet give an empty one."""
        self._same_rank(other.lo, "the other Rect")
        lo = tuple(map(max, self.lo, other.lo))
        return Rect(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    def hull(self, other: Rect) -> Rect:
        """The smallest box that holds both; an empty box adds nothing."""
        self._same_rank(other.lo, "the other Rect")
        if self.empty:
            return other
        if other.empty:
            return self
        return Rect(tuple(map(min, self.lo, other.lo)), tuple(map(max, self.hi, other.hi)))

    def contains(self, other: Rect) -> bool:
        """Whether every element of the other box is in this one."""
        self._same_rank(other.lo, "the other Rect")
        inside = all(map(operator.le, self.lo, other.lo)) and all(map(operator.ge, self.hi, other.hi))
        return inside or other.empty

    def shift(self, by: Sequence[int]) -> Rect:
        """The box moved by a whole number of elements a dimension."""
        self._same_rank(by, "the shift")
        return Rect(
            tuple(lo + d for lo, d in zip(self.lo, by, strict=True)),
            tuple(hi + d for hi, d in zip(self.hi, by, strict=True)),
        )

    def grow(self, before: Sequence[int], after: Sequence[int]) -> Rect:
        """The box with a margin added below and above each dimension; negative margins shrink it."""
        self._same_rank(before, "the margin below")
        self._same_rank(after, "the margin above")
        return Rect(
            tuple(lo - d for lo, d in zip(self.lo, before, strict=True)),
            tuple(hi + d for hi, d in zip(self.hi, after, strict=True)),
        )

    def clip(self, shape: Sequence[int]) -> Rect:
        """The part of the box that lies inside a tensor of this shape."""
        return self.intersect(Rect.of_shape(shape))

    def split(self, dim: int, parts: int) -> tuple[Rect, ...]:
        """Disjoint boxes that make up this one, cut along a dimension, sizes differing by at most one.

        Never returns an empty part: asking for more parts than elements gives one part an element.
        """
        if not -self.ndim <= dim < self.ndim:
            raise GraphError(f"cannot split dimension {dim} of a Rect with {self.ndim} dimensions")
        if parts < 1:
            raise GraphError(f"cannot split a Rect into {parts} parts; ask for at least one")
        dim %= self.ndim
        lo, length = self.lo[dim], self.shape[dim]
        parts = max(1, min(parts, length))
        cuts = [lo + length * k // parts for k in range(parts)] + [self.hi[dim]]
        return tuple(
            Rect((*self.lo[:dim], a, *self.lo[dim + 1 :]), (*self.hi[:dim], b, *self.hi[dim + 1 :]))
            for a, b in itertools.pairwise(cuts)
        )

    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array."""
        return tuple(slice(lo, max(lo, hi)) for lo, hi in zip(self.lo, self.hi, strict=True))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """``(lo, hi)`` of each dimension."""
        return iter(zip(self.lo, self.hi, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in self) + "]"
