"""The tiles of a region that ends before the loss, with gradients of an input that overlap or that do not.

    by output   each tile has a box of the result, and adds to the gradient of all of the input that it reads
    by input    each tile has a box of the input, and makes its gradient from all of the result that depends
                on it; all other gradients are still added up by output

Owned by input, nothing is added up where tiles meet. That is more work: forward runs once more for these
tiles, which reach further than boxes of the result do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lowtide.errors import CaptureError
from lowtide.graph import Rect
from lowtide.graph.tiles import reaches
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.boxes import refuse_others
from lowtide.trace.tiles.differentiate import Change, Forward, differentiated
from lowtide.trace.tiles.tiling import CapturedTile, Tiling

__all__ = ["Halves", "Owned", "halves_of"]


@dataclass(frozen=True, slots=True)
class Owned:
    """An input of the step, and boxes that cover it."""

    name: str
    boxes: Sequence[Rect]


@dataclass(frozen=True, slots=True)
class Halves:
    """Tiles that give their box of the result, and tiles for later, when the gradient of that is known."""

    forward: Sequence[CapturedTile]
    backward: Sequence[CapturedTile]
    """They run forward again, then backward for their box of the gradient, and add to gradients."""
    owned: Sequence[CapturedTile] = ()
    """They do the same for a box of an input, whose gradient they make."""
    own: int | None = None
    """That input."""


def halves_of(tiling: Tiling, boxes: Sequence[Rect], own: Owned | None = None) -> Halves:
    """Each box of the result as two steps, and each box of an input as one."""
    known: dict[Hashable, Joint] = {}
    again = partial(differentiated, again=True)
    forward = [tiling.tile(box, known, half="forward") for box in boxes]
    if tiling.joint.evaluates:
        return Halves(forward, ())
    if own is None:
        return Halves(forward, [tiling.tile(box, known, again, "backward") for box in boxes])
    leaf = _leaf(tiling, own.name)
    refuse_others(own.boxes, tiling.graph.tensors[leaf].shape or (), repr(own.name))
    if not any(t == leaf for tile in forward for t, _ in tile.given):
        label = tiling.graph.tensors[leaf].label
        raise CaptureError(f"{label!r} does not go into the tiles, which cannot own it; cut by output")
    others = tiling.differentiable - {leaf}
    read = any(t in others for tile in forward for t, _ in tile.given)
    try:
        backward = [tiling.tile(box, known, again, "backward", others) for box in boxes] if read else []
    except CaptureError as error:
        label = tiling.graph.tensors[leaf].label
        raise CaptureError(
            f"tiles cannot own boxes of {label!r}: of the other gradients, {error}; cut by output"
        ) from error
    owned = [
        tiling.tile(reach, known, again, "owned", (leaf,), (leaf, box))
        for box, reach in zip(own.boxes, _reaches(tiling, leaf, own.boxes), strict=True)
    ]
    return Halves(forward, backward, owned, leaf)


def _reaches(tiling: Tiling, leaf: int, boxes: Sequence[Rect]) -> list[Rect]:
    """For each box of an input the part of the result that depends on it.

    The region is differentiated alone for that: in the backward of the step nothing says which tensor is the
    gradient of the region's result. Where nothing depends on a box, it has the smallest part of the others,
    or all: that reads the input, and adds nothing to this box.
    """

    def make(forward: Forward, _: Change) -> Joint:
        return differentiated(replace(forward, fused=False, split=False))

    whole = Rect.of_shape(tiling.axes)
    tile = tiling.tile(whole, {}, make, "reach", (leaf,))
    (place,) = tile.wanted
    read, gradient, given = tile.given[place][1], tile.joint.gradients[place], tile.joint.tangents[0]
    if gradient is None:
        return [whole] * len(boxes)
    inside = [box.intersect(read).shift([-lo for lo in read.lo]) for box in boxes]
    found = reaches(tile.joint.graph, gradient, given, inside)
    smallest = min((reach for reach in found if reach), key=lambda reach: reach.size, default=whole)
    return [reach or smallest for reach in found]


def _leaf(tiling: Tiling, name: str) -> int:
    for t in tiling.leaves:
        if tiling.graph.tensors[t].id == name:
            return t
    raise CaptureError(f"there is no input {name!r} that has a gradient")
