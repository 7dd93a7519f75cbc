"""Says whether boxes that somebody wrote down are parts of what is cut, before anything is made from them."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import CaptureError
from lowtide.graph import Rect

__all__ = ["refuse_others"]


def refuse_others(boxes: Sequence[Rect], shape: Sequence[int], of: str) -> None:
    """A CaptureError for a box that is no part of this shape, or where there is none at all."""
    whole = Rect.of_shape(shape)
    if not boxes:
        raise CaptureError(f"there are no tiles of {of}")
    for box in boxes:
        if box.ndim != whole.ndim or box.empty or not whole.contains(box):
            raise CaptureError(f"a tile of {box} is no part of {of}, {'x'.join(map(str, shape))}")
