"""A step with a region of it as one operator, which a loop runs tile after tile.

    before ──▶ loop ──▶ loss                 the region: from some tensors to the loss
       ▲         └────▶ gradients            of these tensors, for the gradient of the loss that is expected
    backward ◀── gradients × what has come / what was expected

Forward and backward of a tile run back to back, so nothing of it is kept. What is outside the region is
differentiated anew around it and planned like any other step. A region that ends before the loss is two
loops (``trace/tiles/outside.py``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from lowtide.errors import CaptureError
from lowtide.graph import LOOP, Op, Rect
from lowtide.trace.eager.library import define
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.boxes import refuse_others
from lowtide.trace.tiles.differentiate import differentiated
from lowtide.trace.tiles.fold import Fold, idle_leaves, loop_operator
from lowtide.trace.tiles.nested import Inner, nested
from lowtide.trace.tiles.outside import in_halves
from lowtide.trace.tiles.owned import Owned
from lowtide.trace.tiles.tiling import CapturedTile, Tiling

__all__ = ["TiledRegion", "looped"]

_RATIO = "lowtide.ratio"


@dataclass(frozen=True, slots=True)
class TiledRegion:
    """What a loop runs: tiles of a step, and where their parts are among the operator's inputs."""

    tiles: tuple[CapturedTile, ...]
    loss: torch.Tensor
    """The loss, as shape, type and device alone; so are the gradients below."""
    places: dict[int, int]
    """Of tensors of the step: position in the operator's inputs."""
    totals: bool
    """Whether the weight of all targets goes in behind them."""
    gradients: tuple[tuple[int, torch.Tensor], ...]
    """Tensors of the step that get gradients, and how those lie in memory."""
    axes: tuple[int, ...]
    """Lengths of what its tiles cover."""
    narrow: bool = False
    """Whether tiles compute in float16, where small gradients are lost unless the loss is scaled up."""
    came: list[torch.Tensor] = field(default_factory=list)
    """The gradient of the loss that came last, of narrow tiles. It is expected the next time, so that tiles
    compute with the scale; others expect 1."""

    first: ClassVar[int] = 0
    """All bodies are its own."""

    @property
    def like(self) -> list[torch.Tensor]:
        """What the loop gives: the loss, what was expected, gradients."""
        return [self.loss, self.loss, *(one for _, one in self.gradients)]

    @property
    def bodies(self) -> list[Joint]:
        """The steps of tiles, each once."""
        return list({id(tile.joint): tile.joint for tile in self.tiles}.values())

    def ratio(self, tangent: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """What gradients are to be multiplied by, now that the gradient of the loss is known."""
        if self.narrow:
            usable = torch.isfinite(tangent) & (tangent.abs() >= 1)
            self.came[:] = [torch.where(usable, tangent, torch.ones_like(tangent))]
        return tangent / expected


def _ratio(tangent: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return tangent / expected


define("ratio(Tensor tangent, Tensor expected) -> Tensor", _ratio)


class _Loop(torch.autograd.Function):
    """The operator, as autograd sees it while the step around it is traced."""

    @staticmethod
    def forward(ctx: Any, region: TiledRegion, *values: torch.Tensor) -> torch.Tensor:
        loss, *saved = loop_operator(values, region.like)
        ctx.save_for_backward(*saved)
        ctx.region, ctx.dtypes = region, [value.dtype for value in values]
        return loss

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        expected, *gradients = ctx.saved_tensors
        ratio = torch.ops.lowtide.ratio(tangent, expected)
        region: TiledRegion = ctx.region
        found: list[torch.Tensor | None] = [None] * len(ctx.dtypes)
        for (t, _), gradient in zip(region.gradients, gradients, strict=True):
            place = region.places[t]
            found[place] = (gradient * ratio).to(ctx.dtypes[place])
        return None, *found


class _Applied(nn.Module):
    def __init__(self, region: TiledRegion) -> None:
        super().__init__()
        self.region = region

    def forward(self, *values: torch.Tensor) -> Any:
        return _Loop.apply(self.region, *values)  # type: ignore[no-untyped-call]


class _Fold(Fold):
    def __init__(self, tiling: Tiling, tiles: Sequence[CapturedTile], idle: Sequence[int] = ()) -> None:
        super().__init__(tiling, tiles, idle)
        values = self.old.values
        self.loop = TiledRegion(
            tuple(tiles),
            values[tiling.result],
            {t: k for k, t in enumerate(self.given)},
            tiling.totals,
            tuple((t, tiling.gradient_sum(t)) for t in self.wanted),
            tiling.axes,
            any(value.dtype is torch.float16 for tile in tiles for value in tile.joint.values),
        )

    def region(self) -> nn.Module:
        return _Applied(self.loop)

    def loops(self) -> Hashable:
        return None

    def called(self, op: Op, call: Call) -> Call:
        if op.kind == _RATIO:
            return replace(call, target=self.loop.ratio)
        return replace(call, target=self.loop) if op.kind == LOOP else call


def looped(
    joint: Joint,
    boxes: Sequence[Rect],
    cut: Sequence[str] = (),
    end: str = "",
    *,
    channels_last: bool = False,
    inner: Inner | None = None,
    own: Owned | None = None,
    around: dict[Hashable, Joint] | None = None,
) -> Joint:
    """The step with the part from the ``cut`` tensors to the ``end`` as a loop over these boxes of its axes.

    Without any it goes from the inputs to the loss: all of the step. With ``channels_last`` images lie in
    memory that way in tiles. ``inner`` chooses loops inside tiles, where they add up to the loss; ``own`` is
    an input whose gradient is made side by side, where they do not. ``around`` keeps what is the same for
    other tiles of this step, where many ways to cut it are looked at in a hurry. A CaptureError names what
    cannot be in tiles.
    """
    tiling = Tiling(joint, cut, end, channels_last=channels_last)
    refuse_others(boxes, tiling.axes, "the axes that are cut")
    if end:
        return in_halves(tiling, boxes, own=own, around=around)
    if own is not None:
        raise CaptureError("tiles that own an input end before the loss")
    hurried = around is not None
    tiles = tiling.tiles(boxes, nested(inner) if inner else differentiated, hurried=hurried)
    made = _Fold(tiling, tiles).joint(around=around)
    idle = idle_leaves(joint, made)
    return _Fold(tiling, tiles, idle).joint(around=around) if idle else made
