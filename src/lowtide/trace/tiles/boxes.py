"""Boxes of what is cut: whether those that somebody wrote down are parts of it; where one is in another."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import CaptureError
from lowtide.graph import Rect

__all__ = ["inside", "refuse_others"]


def refuse_others(boxes: Sequence[Rect], shape: Sequence[int], of: str) -> None:
    """A CaptureError for a box that is no part of this shape, or where there is none at all."""
    whole = Rect.of_shape(shape)
    if not boxes:
        raise CaptureError(f"there are no tiles of {of}")
    for box in boxes:
        if box.ndim != whole.ndim or box.empty or not whole.contains(box):
            raise CaptureError(f"a tile of {box} is no part of {of}, {'x'.join(map(str, shape))}")


def inside(box: Rect, part: Rect) -> tuple[slice, ...]:
    """Where a box is in a part of a tensor, as far as it is."""
    common = box.intersect(part)
    pairs = ((lo - place, hi - place) for (lo, hi), place in zip(common, part.lo, strict=True))
    return tuple(
        slice(min(lo, length), min(hi, length)) for (lo, hi), length in zip(pairs, part.shape, strict=True)
    )
