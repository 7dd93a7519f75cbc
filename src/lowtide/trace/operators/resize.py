"""Upsampling: parts are resized by themselves where one element becomes a whole number of elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from lowtide.graph import Rect
from lowtide.trace.operators.site import HeldPart, Site, replaced

__all__ = ["uneven", "upsample"]

_SCALES = {3: ("scales",), 4: ("scales_h", "scales_w"), 5: ("scales_d", "scales_h", "scales_w")}
"""By the rank of the tensor, the arguments that say how much larger it gets."""


def upsample(site: Site) -> fx.Node:
    """The part made larger, and the wanted box of that."""
    x: HeldPart = site.arguments["self"]
    need = replaced(site.need(x), dict(enumerate(list(site.wanted)[:2])))
    whole = uneven(x.shape, site.shape, site.arguments)
    made = list(site.wanted)
    for d in range(2, len(x.shape)):
        factor = site.shape[d] // x.shape[d]
        made[d] = (0, site.shape[d]) if d in whole else (need.lo[d] * factor, need.hi[d] * factor)
    box = Rect(tuple(lo for lo, _ in made), tuple(hi for _, hi in made))
    given = replaced(need, {d: (0, x.shape[d]) for d in whole})  # what nothing reads may not be there
    node = site.again(self=site.filled(x, given), output_size=list(box.shape[2:]))
    return site.crop(node, box, site.wanted)


def uneven(given: Sequence[int], made: Sequence[int], arguments: Mapping[str, Any]) -> list[int]:
    """The dimensions that have to stay whole: one element becomes no whole number of elements there."""
    found = []
    for d, name in zip(range(2, len(given)), _SCALES[len(given)], strict=True):
        scale = arguments.get(name)
        even = made[d] % given[d] == 0 and scale in (None, made[d] // given[d])
        if not even or arguments.get("align_corners"):
            found.append(d)
    return found
