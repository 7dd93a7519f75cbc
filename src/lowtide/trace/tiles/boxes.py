"""Boxes of what is cut: parts of it or not, one inside another, and two that differ in their place alone."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

from lowtide.errors import CaptureError
from lowtide.graph import Rect

__all__ = ["Reads", "form", "inside", "refuse_others", "whole_features"]

Reads = list[tuple[int, tuple[int, ...], tuple[Rect | None, ...], tuple[Rect | None, ...]]]
"""Results in turn, with the inputs of their operator, what is read of each, and the same beyond its edges."""

_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})
_NEARLY = 0.9
"""A product makes all of its features where so many of them are needed."""

_Form = tuple[dict[int, tuple[int, ...]], set[int], list[list[int]]]


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


def whole_features(kind: str, box: Rect, shape: Sequence[int]) -> Rect:
    """What an operator makes for a box: a product leaves out no few features that were padded for speed."""
    if kind not in _PRODUCTS or not box.ndim:
        return box
    lo, hi = box.lo[-1], box.hi[-1]
    wide = shape[-1] > hi - lo >= _NEARLY * shape[-1]
    return Rect((*box.lo[:-1], 0), (*box.hi[:-1], shape[-1])) if wide else box


def form(needed: dict[int, Rect], before: set[int], read: Reads) -> _Form:
    """What a box needs, wherever it lies: sizes, what is read where of each part, and what is padded."""
    places = []
    for t, sources, needs, reaches in read:
        found = [t]
        for source, need, reach in zip(sources, needs, reaches, strict=True):
            if need is not None and reach is not None and not need.empty:
                found += [source, *need.shape, *map(sub, need.lo, needed[source].lo)]
                found += [*reach.shape, *map(sub, reach.lo, need.lo)]
        places.append(found)
    return {t: box.shape for t, box in needed.items()}, before, places
