"""A step with a region of it as two loops, where what comes of the region's result is not known yet.

    before ──▶ loop ──▶ result ──▶ the rest, or the user's own code
    gradients ◀── loop ◀── gradient of the result

The first loop computes the boxes of the result and keeps nothing. The second runs forward of a tile again,
then its backward for its box of the gradient, and adds to the gradients of what went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide.capture.builder import Call
from lowtide.capture.differentiate import Change
from lowtide.capture.fold import Fold, dense, idle_leaves, loop_operator
from lowtide.capture.joint import Joint
from lowtide.capture.tile import Tile, Tiling
from lowtide.errors import CaptureError
from lowtide.graph import LOOP, Op, Phase, Rect

__all__ = ["Half", "in_halves"]


@dataclass(frozen=True, slots=True)
class Half:
    """What one of the two loops runs."""

    tiles: tuple[Tile, ...]
    places: dict[int, int]
    """Of tensors of the step: position in the operator's inputs. The gradient of the result comes last."""
    like: tuple[torch.Tensor, ...]
    """What the loop gives, as shape, type and device alone: the result, or gradients."""
    gradients: tuple[int, ...] | None
    """Tensors of the step that the loop gives gradients of; None: it gives the result."""
    first: int
    """How many bodies of the other loop come before those of this one."""
    end: str
    """The tensor of the step that the region ends at."""

    @property
    def bodies(self) -> list[Joint]:
        """The steps of tiles, each once."""
        return list({id(tile.joint): tile.joint for tile in self.tiles}.values())


class _Loops(torch.autograd.Function):
    """Both operators, as autograd sees them while the step around them is traced."""

    @staticmethod
    def forward(ctx: Any, forward: Half, backward: Half, *values: torch.Tensor) -> torch.Tensor:
        (result,) = loop_operator(values, forward.like)
        ctx.save_for_backward(*values)
        ctx.half = backward
        return result

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        half: Half = ctx.half
        made = loop_operator([*ctx.saved_tensors, tangent], half.like)
        found: list[torch.Tensor | None] = [None] * len(half.places)
        for t, gradient in zip(half.gradients or (), made, strict=True):
            found[half.places[t]] = gradient
        return None, None, *found


class _Applied(nn.Module):
    def __init__(self, forward: Half, backward: Half) -> None:
        super().__init__()
        self.halves = forward, backward

    def forward(self, *values: torch.Tensor) -> Any:
        return _Loops.apply(*self.halves, *values)  # type: ignore[no-untyped-call]


class _Fold(Fold):
    def __init__(
        self, tiling: Tiling, halves: tuple[Sequence[Tile], Sequence[Tile]], idle: Sequence[int] = ()
    ) -> None:
        first, second = map(tuple, halves)
        super().__init__(tiling, (*first, *second), idle)
        values = self.old.values
        places = {t: k for k, t in enumerate(self.given)}
        self.before = Half(first, places, (dense(values[tiling.result]),), None, 0, tiling.ends)
        gradients = tuple(dense(values[t]) for t in self.wanted)
        count = len(self.before.bodies)
        self.after = Half(second, places, gradients, tuple(self.wanted), count, tiling.ends)

    def region(self) -> nn.Module:
        return _Applied(self.before, self.after)

    def called(self, op: Op, call: Call) -> Call:
        if op.kind != LOOP:
            return call
        return replace(call, target=self.before if op.phase is Phase.FORWARD else self.after)


def in_halves(tiling: Tiling, boxes: Sequence[Rect], change: Change | None = None) -> Joint:
    """The step with a region that ends at a tensor as two loops over boxes of that tensor.

    ``change`` is made to it once it is differentiated.
    """
    halves = tiling.halves(boxes)
    made = _Fold(tiling, halves).joint()
    idle = idle_leaves(tiling.joint, made)
    if idle or change is not None:
        made = _Fold(tiling, halves, idle).joint(change)
    if sum(op.kind == LOOP for op in made.graph.ops) != 2:
        raise CaptureError("nothing that has a gradient comes of the part that would be in tiles")
    return made
