"""Whether boxes of a step need the same of it, but for their place."""

from __future__ import annotations

from operator import sub

from lowtide.graph import Rect

__all__ = ["Reads", "form"]

Reads = list[tuple[int, tuple[int, ...], tuple[Rect | None, ...], tuple[Rect | None, ...]]]
"""Results in turn, with the inputs of their operator, what is read of each, and the same beyond its edges."""

_Form = tuple[dict[int, tuple[int, ...]], set[int], list[list[int]]]


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
