"""Tiles inside tiles: the step of a tile with a part of it as loops over smaller tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.graph import Rect
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.boxes import refuse_others
from lowtide.trace.tiles.differentiate import Change, Forward, differentiated
from lowtide.trace.tiles.outside import in_halves
from lowtide.trace.tiles.tiling import Differentiate, Tiling

__all__ = ["Inner", "nested"]

Inner = Callable[[Joint], tuple[str, Sequence[Rect]] | None]
"""Chooses for the step of a tile where a loop inside it ends, and over which boxes; None: there is none."""


def nested(inner: Inner) -> Differentiate:
    """What differentiates the forward graph of a tile with such a loop in it."""

    def made(forward: Forward, change: Change) -> Joint:
        plain = differentiated(replace(forward, fused=False))
        plain = replace(plain, kernels={} if forward.fused else None)
        chosen = inner(plain)
        if chosen is None:
            return differentiated(forward, change)
        end, boxes = chosen
        tiling = Tiling(plain, (), end)
        refuse_others(boxes, tiling.axes, "the axes that are cut inside a tile")
        return in_halves(tiling, boxes, change)

    return made
