"""Whether boxes of a step need the same of it, but for their place."""

from __future__ import annotations

from operator import sub

from lowtide.graph import Rect

__all__ = ["Reads", "form"]

Reads = list[tuple[int, tuple[int, ...], tuple[Rect | None, ...]]]
"""Results in turn, with the inputs of their operator and what is read of each."""

_Form = tuple[dict[int, tuple[int, ...]], set[int], list[list[int]]]


def form(needed: dict[int, Rect], before: set[int], read: Reads) -> _Form:
    """What a box needs, wherever it lies: sizes, and what is read where of each part."""
    places = []
    for t, sources, needs in read:
        found = [t]
        for source, need in zip(sources, needs, strict=True):
            if need is not None and not need.empty:
                found += [source, *need.shape, *map(sub, need.lo, needed[source].lo)]
        places.append(found)
    return {t: box.shape for t, box in needed.items()}, before, places
