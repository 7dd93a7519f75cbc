"""What moves between the devices along one axis of a mesh, so that each has what it wants of a dimension."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Pieces", "pieces", "scattered"]

Range = tuple[int, int]


class Pieces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one device sends and receives along a dimension, counted in what it holds and in what it wants."""

    sends: tuple[tuple[int, int, int], ...]
    """The device along the axis, and from where to where; itself for what it keeps."""
    receives: tuple[tuple[int, int, int], ...]
    length: int
    """Of what it wants."""

    def moved(self, mine: int) -> int:
        """Elements along the dimension that it sends to others."""
        return sum(hi - lo for other, lo, hi in self.sends if other != mine)


def pieces(held: Sequence[Range], wanted: Sequence[Range], mine: int) -> Pieces | None:
    """Of the device ``mine``, where all hold and want these ranges; None where nobody lacks anything."""
    if all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(held, wanted, strict=True)):
        return None

    def common(one: Range, other: Range, start: int) -> Range | None:
        lo, hi = max(one[0], other[0]), min(one[1], other[1])
        return (lo - start, hi - start) if lo < hi else None

    sends, receives = [], []
    for other in range(len(held)):
        if found := common(held[mine], wanted[other], held[mine][0]):
            sends.append((other, *found))
        if found := common(held[other], wanted[mine], wanted[mine][0]):
            receives.append((other, *found))
    lo, hi = wanted[mine]
    return Pieces(tuple(sends), tuple(receives), max(0, hi - lo))


def scattered(held: Range, wanted: Sequence[Range], mine: int) -> Pieces:
    """Of the device ``mine``, where all hold one range of summands, and each wants a part of the sum."""
    first = held[0]
    sends = tuple((other, lo - first, hi - first) for other, (lo, hi) in enumerate(wanted) if lo < hi)
    lo, hi = wanted[mine]
    receives = tuple((other, 0, hi - lo) for other in range(len(wanted))) if lo < hi else ()
    return Pieces(sends, receives, max(0, hi - lo))
