"""A step with a region of it as two loops, where what comes of the region's result is not known yet.

    before ──▶ loop ──▶ result ──▶ the rest, or the user's own code
    gradients ◀── loop ◀── gradient of the result

The first loop computes the boxes of the result and keeps nothing. The second runs forward of a tile again,
then its backward for its box of the gradient, and adds to the gradients of what went in. Where tiles own
boxes of an input, its gradient is left to a third loop, which makes it side by side (``owned.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError
from lowtide.graph import LOOP, Op, Phase, Rect
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.differentiate import Change
from lowtide.trace.tiles.fold import Fold, dense, idle_leaves, loop_operator
from lowtide.trace.tiles.owned import Halves, Owned, halves_of
from lowtide.trace.tiles.tiling import CapturedTile, Tiling

__all__ = ["Half", "in_halves"]


@dataclass(frozen=True, slots=True)
class Half:
    """What one of the two loops runs."""

    tiles: tuple[CapturedTile, ...]
    places: dict[int, int]
    """Of tensors of the step: position in the operator's inputs. The gradient of the result comes last."""
    like: tuple[torch.Tensor, ...]
    """What the loop gives, as shape, type and device alone: the result, or gradients."""
    gradients: tuple[int, ...] | None
    """Tensors of the step that the loop gives gradients of; None: it gives the result."""
    first: int
    """How many bodies of other loops come before those of this one."""
    end: str
    """The tensor of the step that the region ends at."""
    axes: tuple[int, ...]
    """Lengths of what its tiles cover: the result, or the input that they own."""
    own: str = ""
    """The input whose gradient its tiles make side by side; none: they add to gradients."""

    @property
    def bodies(self) -> list[Joint]:
        """The steps of tiles, each once."""
        return list({id(tile.joint): tile.joint for tile in self.tiles}.values())


class _Loops(torch.autograd.Function):
    """All operators, as autograd sees them while the step around them is traced."""

    @staticmethod
    def forward(ctx: Any, forward: Half, backward: Sequence[Half], *values: torch.Tensor) -> torch.Tensor:
        (result,) = loop_operator(values, forward.like)
        ctx.save_for_backward(*values)
        ctx.halves = backward
        return result

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        halves: Sequence[Half] = ctx.halves
        found: list[torch.Tensor | None] = [None] * len(halves[0].places)
        for half in halves:
            made = loop_operator([*ctx.saved_tensors, tangent], half.like, bool(half.own))
            for t, gradient in zip(half.gradients or (), made, strict=True):
                place = half.places[t]
                found[place] = gradient.to(ctx.saved_tensors[place].dtype)
        return None, None, *found


class _Applied(nn.Module):
    def __init__(self, forward: Half, backward: Sequence[Half]) -> None:
        super().__init__()
        self.halves = forward, backward

    def forward(self, *values: torch.Tensor) -> Any:
        return _Loops.apply(*self.halves, *values)  # type: ignore[no-untyped-call]


class _Fold(Fold):
    def __init__(self, tiling: Tiling, halves: Halves, idle: Sequence[int] = ()) -> None:
        super().__init__(tiling, (*halves.forward, *halves.backward, *halves.owned), idle)
        values, result = self.old.values, tiling.result
        places = {t: k for k, t in enumerate(self.given)}

        def half(
            tiles: Sequence[CapturedTile], gradients: tuple[int, ...] | None, count: int, own: str = ""
        ) -> Half:
            sums = [tiling.gradient_sum(t) for t in gradients or ()]
            like = (dense(values[result]),) if gradients is None else tuple(sums)
            axes = tuple(like[0].shape) if own else tiling.axes
            return Half(tuple(tiles), places, like, gradients, count, tiling.ends, axes, own)

        self.before = half(halves.forward, None, 0)
        count = len(self.before.bodies)
        self.after: list[Half] = []
        added = tuple(t for t in self.wanted if t != halves.own)
        if added:
            self.after.append(half(halves.backward, added, count))
            count += len(self.after[0].bodies)
        if halves.own is not None:
            name = self.old.graph.tensors[halves.own].id
            self.after.append(half(halves.owned, (halves.own,), count, name))

    def region(self) -> nn.Module:
        return _Applied(self.before, self.after)

    def loops(self) -> Hashable:
        return tuple((half.own, half.gradients) for half in self.after)

    def called(self, op: Op, call: Call) -> Call:
        if op.kind != LOOP:
            return call
        if op.phase is Phase.FORWARD:
            return replace(call, target=self.before)
        return replace(call, target=self.after[-1 if call.args[1] else 0])


def in_halves(
    tiling: Tiling,
    boxes: Sequence[Rect],
    change: Change | None = None,
    own: Owned | None = None,
    around: dict[Hashable, Joint] | None = None,
) -> Joint:
    """The step with a region that ends at a tensor as two loops over boxes of that tensor.

    ``change`` is made to it once it is differentiated. With ``own`` tiles own boxes of an input. ``around``
    keeps what is the same for other tiles.
    """
    halves = halves_of(tiling, boxes, own)
    fold = _Fold(tiling, halves)
    made = fold.joint(around=around)
    idle = idle_leaves(tiling.joint, made)
    if idle or change is not None:
        fold = _Fold(tiling, halves, idle)
        made = fold.joint(change, around)
    loops = sum(op.kind == LOOP for op in made.graph.ops)
    if loops <= len(fold.after) or not (fold.after or tiling.joint.evaluates):
        raise CaptureError("nothing that has a gradient comes of the part that would be in tiles")
    return made
