"""A step with a region of it as one operator, which a loop runs tile after tile.

    before ──▶ loop ──▶ loss                 the region: from some tensors to the loss
       ▲         └────▶ gradients            of these tensors, for the gradient of the loss that is expected
    backward ◀── gradients × what has come / what was expected

Forward and backward of a tile run back to back, so nothing of it is kept. What is outside the region is
differentiated anew around it and planned like any other step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import fx, nn

from lowtide.capture.builder import Call
from lowtide.capture.differentiate import Example, differentiated
from lowtide.capture.joint import Joint, Leaf
from lowtide.capture.library import define
from lowtide.capture.tile import MASKED, Tile, Tiling, values_read
from lowtide.graph import LOOP, Op, Rect

__all__ = ["Region", "looped"]

_RATIO = "lowtide.ratio"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Region:
    """What a loop runs: tiles of a step, and where their parts are among the operator's inputs."""

    tiles: tuple[Tile, ...]
    axes: tuple[int, ...]
    loss: torch.Tensor
    """The loss, as shape, type and device alone; so are the gradients below."""
    places: dict[int, int]
    """Of tensors of the step: position in the operator's inputs."""
    total: Callable[..., torch.Tensor] | None
    total_of: tuple[int, ...]
    """Positions of what the weight of all targets is made from."""
    gradients: tuple[tuple[int, torch.Tensor], ...]
    """Tensors of the step that get gradients, and how those lie in memory."""
    narrow: bool = False
    """Whether tiles compute in float16, where small gradients are lost unless the loss is scaled up."""
    came: list[torch.Tensor] = field(default_factory=list)
    """The gradient of the loss that came last, of narrow tiles. It is expected the next time, so that tiles
    compute with the scale; others expect 1."""

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


_TRACED: ContextVar[Region] = ContextVar("_TRACED")


def _shapes(values: list[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG001
    """Results of the loop that is being traced: the loss, what was expected, gradients."""
    region = _TRACED.get()
    like = [region.loss, region.loss, *(one for _, one in region.gradients)]
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]


def _ratio(tangent: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return tangent / expected


define("loop(Tensor[] values) -> Tensor[]", _shapes)
define("ratio(Tensor tangent, Tensor expected) -> Tensor", _ratio)


class _Loop(torch.autograd.Function):
    """The operator, as autograd sees it while the step around it is traced."""

    @staticmethod
    def forward(ctx: Any, region: Region, *values: torch.Tensor) -> torch.Tensor:
        token = _TRACED.set(region)
        try:
            loss, *saved = torch.ops.lowtide.loop(list(values))
        finally:
            _TRACED.reset(token)
        ctx.save_for_backward(*saved)
        ctx.region = region
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:
        expected, *gradients = ctx.saved_tensors
        ratio = torch.ops.lowtide.ratio(tangent, expected)
        region: Region = ctx.region
        found: list[torch.Tensor | None] = [None] * len(region.places)
        for (t, _), gradient in zip(region.gradients, gradients, strict=True):
            found[region.places[t]] = gradient * ratio
        return None, *found


class _Applied(nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, *values: torch.Tensor) -> Any:
        return _Loop.apply(self.region, *values)  # type: ignore[no-untyped-call]


def looped(
    joint: Joint, boxes: Sequence[Rect], cut: Sequence[str] = (), *, channels_last: bool = False
) -> Joint:
    """The step with the part from the ``cut`` tensors to the loss as a loop over these boxes of its axes.

    Without any, that is all of the step. With ``channels_last`` images lie in memory that way in tiles. A
    CaptureError names what cannot be in tiles.
    """
    tiling = Tiling(joint, cut, channels_last=channels_last)
    tiles = tuple(tiling.tiles(boxes))
    made = _Fold(tiling, tiles).joint()
    idle = [
        t
        for t, before, now in zip(joint.inputs, joint.gradients, made.gradients, strict=False)
        if t is not None and before is not None and now is None
    ]
    return _Fold(tiling, tiles, idle).joint() if idle else made


class _Fold:
    """The forward pass around a region, written anew and differentiated.

    ``idle`` are leaves that no tile reads: the loop gives gradients of zeros for them, as the step does.
    """

    def __init__(self, tiling: Tiling, tiles: tuple[Tile, ...], idle: Sequence[int] = ()) -> None:
        self.old, self.tiling = tiling.joint, tiling
        given = sorted({t for tile in tiles for t, _ in tile.given}.union(idle))
        total = tiling.total
        given += [t for t in (total[1] if total else ()) if t not in given]
        self.given = given
        wanted = sorted({tile.given[k][0] for tile in tiles for k in tile.wanted}.union(idle))
        values = self.old.values
        self.region = Region(
            tiles,
            tiling.axes,
            values[tiling.loss],
            {t: k for k, t in enumerate(given)},
            total[0] if total else None,
            tuple(given.index(t) for t in total[1]) if total else (),
            tuple((t, _dense(values[t])) for t in wanted),
            any(value.dtype is torch.float16 for tile in tiles for value in tile.joint.values),
        )
        self.graph = fx.Graph()
        self.node: dict[int, fx.Node] = {}

    def joint(self) -> Joint:
        """The step."""
        old, root = self.old, nn.Module()
        inputs = [*(t for t in old.inputs if t is not None), *old.constants]
        for t in inputs:
            self.node[t] = self.graph.placeholder(f"t{t}")
        self.before()
        root.region = _Applied(self.region)
        loss = self.graph.call_module("region", tuple(self.node[t] for t in self.given))
        self.graph.output((loss,))
        wants = {
            t for t, g in zip(old.inputs, old.gradients, strict=False) if t is not None and g is not None
        }
        examples = [_example(old.values[t], t in wants) for t in inputs]
        leaves = [Leaf(old.graph.tensors[t].label, old.graph.tensors[t].role) for t in inputs]
        mode = getattr(old.values[inputs[0]], "fake_mode", None)
        made = differentiated(self.graph, examples, leaves, root=root, mode=mode)
        return self.aligned(made)

    def before(self) -> None:
        """Operators outside the region whose results it needs as a whole.

        All that draw random numbers are among them, so that what is drawn later stays the same.
        """
        graph = self.old.graph
        wanted = set(self.given) - self.node.keys()
        chosen: list[tuple[Op, Call]] = []
        for op, call in reversed(self.tiling.forward):
            drawn = self.tiling.draws(op) and not wanted.intersection(op.outputs)
            if drawn:
                self.tiling.may_be_before(op, "it draws random numbers that nobody reads")
            if drawn or wanted.intersection(op.outputs):
                chosen.append((op, call))
                read = op.inputs if _is_whole(op, wanted) else values_read(graph, op)
                wanted |= set(read) - self.node.keys()
        for _, call in reversed(chosen):
            self.write(call)

    def write(self, call: Call) -> None:
        """An operator as it is; of tensors that it reads no value of, and that are not there, empty ones."""

        def mapped(node: fx.Node) -> fx.Node:
            t = self.old.tensor_of[node]
            return self.node[t] if t in self.node else self.empty(t)

        args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), mapped)
        made = self.graph.call_function(call.target, args, kwargs)
        for k, t in enumerate(call.results):
            if t >= 0:
                whole = not call.several
                self.node[t] = made if whole else self.graph.call_function(_item, (made, k))

    def empty(self, tensor: int) -> fx.Node:
        value = self.old.values[tensor]
        where: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        args = list(value.shape), list(value.stride())
        return self.graph.call_function(aten.empty_strided.default, args, where)

    def aligned(self, made: Joint) -> Joint:
        """With an entry for every input of the step, tensor or not, and the loop itself as what is called.

        Constants stand behind the inputs in what was differentiated.
        """
        inputs, gradients = iter(made.inputs), iter(made.gradients)
        places = [None if t is None else (next(inputs), next(gradients)) for t in self.old.inputs]
        constants = {
            t: value for t, value in zip(inputs, self.old.constants.values(), strict=True) if t is not None
        }
        calls, ops = list(made.calls), list(made.graph.ops)
        for k, op in enumerate(ops):
            if op.kind == LOOP:
                calls[k] = replace(calls[k], target=self.region, args=tuple(calls[k].args[0]))
                attributes = op.attributes | {"axes": list(self.tiling.axes)}
                ops[k] = msgspec.structs.replace(op, attributes=attributes, source=self.tiling.adds.source)
            elif op.kind == _RATIO:
                calls[k] = replace(calls[k], target=self.region.ratio)
        return replace(
            made,
            graph=msgspec.structs.replace(made.graph, ops=tuple(ops)),
            calls=tuple(calls),
            inputs=tuple(None if pair is None else pair[0] for pair in places),
            gradients=tuple(None if pair is None else pair[1] for pair in places),
            constants=dict(made.constants) | constants,
        )


def _item(results: Any, k: int) -> Any:
    return results[k]


def _is_whole(op: Op, wanted: set[int]) -> bool:
    """Whether a dropout is wanted for its result, not for its mask alone."""
    return op.kind == MASKED and op.outputs[0] in wanted


def _example(value: torch.Tensor, differentiable: bool) -> Example:
    return Example(tuple(value.shape), value.stride(), value.dtype, value.device, differentiable)


def _dense(value: torch.Tensor) -> torch.Tensor:
    """How a gradient of a tensor lies in memory: as the tensor does, without gaps."""
    return torch.empty_like(value)
