"""The forward pass around a region, written anew and differentiated: the region is one operator of it."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import fx, nn

from lowtide.errors import CaptureError
from lowtide.graph import LOOP, Op, Rect, Tensor
from lowtide.trace.eager.gradients import copy_gradients
from lowtide.trace.eager.in_place_calls import IN_PLACE_OF, operator_in_place
from lowtide.trace.eager.layouts import layouts_of
from lowtide.trace.eager.library import define
from lowtide.trace.operators import MASKED, InputPart, stopped, values_read
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.trace.tiles.differentiate import Change, Example, Forward, differentiated, evaluated
from lowtide.trace.tiles.gradient_order import add_gradients_up, refuse_another_order
from lowtide.trace.tiles.masks import drawn_as_mask, pack
from lowtide.trace.tiles.record import written_for
from lowtide.trace.tiles.tiling import CapturedTile, Tiling

__all__ = ["Fold", "dense", "idle_leaves", "loop_operator"]

aten = torch.ops.aten
_LIKE: ContextVar[Sequence[torch.Tensor]] = ContextVar("_LIKE")


def _shapes(values: list[torch.Tensor], which: int) -> list[torch.Tensor]:  # noqa: ARG001
    """Results of the loop that is being traced."""
    like = _LIKE.get()
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]


define("loop(Tensor[] values, int which) -> Tensor[]", _shapes)


def loop_operator(
    values: Sequence[torch.Tensor], like: Sequence[torch.Tensor], which: int = 0
) -> list[torch.Tensor]:
    """The operator that stands for a loop, while the step around it is traced, with results like these.

    ``which`` tells loops of one region apart.
    """
    token = _LIKE.set(like)
    try:
        return torch.ops.lowtide.loop(list(values), which)  # type: ignore[no-any-return]
    finally:
        _LIKE.reset(token)


def dense(value: torch.Tensor) -> torch.Tensor:
    """How a gradient of a tensor lies in memory: as the tensor does, without gaps."""
    with getattr(value, "fake_mode", None) or contextlib.nullcontext():
        return torch.empty_like(value)


def idle_leaves(joint: Joint, made: Joint) -> list[int]:
    """Leaves that no tile reads: they have a gradient of zeros in the step, and none in what was made."""
    return [
        t
        for t, before, now in zip(joint.inputs, joint.gradients, made.gradients, strict=False)
        if t is not None and before is not None and now is None
    ]


class Fold(ABC):
    """The forward pass around a region.

    ``idle`` are leaves that no tile reads: the loop gives gradients of zeros for them, as the step does.
    """

    def __init__(self, tiling: Tiling, tiles: Sequence[CapturedTile], idle: Sequence[int] = ()) -> None:
        self.old, self.tiling = tiling.joint, tiling
        given = sorted({t for tile in tiles for t, _ in tile.given}.union(idle))
        total = tiling.total
        given += [t for t in (total[1] if total else ()) if t not in given]
        self.given = given
        """Tensors that go into the loop."""
        self.wanted = sorted({tile.given[k][0] for tile in tiles for k in tile.wanted}.union(idle))
        """Those of them that get gradients."""
        self.graph = fx.Graph()
        self.node: dict[int, fx.Node] = {}

    @abstractmethod
    def region(self) -> nn.Module:
        """What the loop is for autograd."""

    @abstractmethod
    def loops(self) -> Hashable:
        """What tells its loops apart from those of other tiles, seen from around them."""

    @abstractmethod
    def called(self, op: Op, call: Call) -> Call:
        """How an operator of the step is called: the loop by what it stands for."""

    def joint(self, change: Change | None = None, around: dict[Hashable, Joint] | None = None) -> Joint:
        """The step, with a change to it once it is differentiated.

        ``around`` keeps it, without a change, for folds of the same step that look the same from around.
        """
        if around is None or change is not None:
            return self.aligned(self._differentiated(change))
        tiling = self.tiling
        key = type(self), tiling.begins, tiling.ends, tuple(self.given), tuple(self.wanted), self.loops()
        if key not in around:
            around[key] = self._differentiated(None)
        return self.aligned(around[key])

    def _differentiated(self, change: Change | None) -> Joint:
        old, root = self.old, nn.Module()
        inputs = [*(t for t in old.inputs if t is not None), *old.constants]
        for t in inputs:
            self.node[t] = self.graph.placeholder(f"t{t}")
        root.region = self.region()
        around = self.around()
        packed: dict[int, fx.Node] = {}
        for op, call in self.tiling.forward:
            masks = self.tiling.packed.intersection(op.outputs).intersection(self.given)
            with written_for(self.graph, op):
                if op.id in around and masks:
                    packed |= self.write_masks(call, masks, around)
                elif op.id in around:
                    self.write(call)
                if self.tiling.result in op.outputs:
                    going_in = [packed.get(t) or self.node[t] for t in self.given]
                    going_in += self.counted()
                    self.node[self.tiling.result] = self.graph.call_module("region", tuple(going_in))
        self.graph.output(tuple(self.node[t] for t in old.outputs if t is not None))
        pairs = zip(old.inputs, old.gradients, strict=False)
        kept = {t: old.values[g].stride() for t, g in pairs if t is not None and g is not None}
        examples = [_example(old.values[t], t in kept) for t in inputs]
        leaves = [Leaf(old.graph.tensors[t].label, old.graph.tensors[t].role) for t in inputs]
        mode = getattr(old.values[inputs[0]], "fake_mode", None)
        layouts, fused = layouts_of(old.values), old.kernels is not None
        forward = Forward(self.graph, examples, leaves, layouts, root, mode, fused, old.split)

        def changed(joint: fx.GraphModule, num_outputs: int) -> list[Leaf]:
            add_gradients_up(joint, num_outputs, inputs, old)
            copy_gradients(joint, num_outputs, [kept.get(t) for t in inputs])
            return change(joint, num_outputs) if change is not None else []

        return evaluated(forward) if old.evaluates else differentiated(forward, changed)

    def around(self) -> set[str]:
        """Operators outside the region: what it needs as a whole, what the step gives besides.

        All that draw random numbers are among them, so that what is drawn later stays the same, and all
        that update a buffer.
        """
        graph, result = self.old.graph, self.tiling.result
        wanted = {t for t in (*self.given, *self.old.outputs) if t is not None and t != result}
        wanted -= self.node.keys()
        chosen: set[str] = set()
        for op, _ in reversed(self.tiling.forward):
            read = bool(wanted.intersection(op.outputs))
            drawn = self.tiling.draws(op) and not read
            updates = bool(op.updates)
            if drawn:
                self.tiling.may_be_before(op, "it draws random numbers that nobody reads")
            if drawn or read or updates:
                chosen.add(op.id)
                whole = updates or _is_whole(op, wanted)
                needs = op.inputs if whole else values_read(graph, op)
                wanted |= set(needs) - self.node.keys() - {result}
        return chosen

    def counted(self) -> list[fx.Node]:
        """The weight of all targets, where tiles divide by it; no gradient goes through it."""
        if self.tiling.total is None:
            return []
        module, used = self.tiling.total
        places = module.graph.find_nodes(op="placeholder")
        known = {place: self.node[t] for place, t in zip(places, used, strict=True)}
        total: Any = self.graph.graph_copy(module.graph, known)
        return [self.graph.call_function(aten.detach.default, (total,))]

    def write(self, call: Call) -> None:
        """An operator as it is; of tensors that it reads no value of, and that are not there, empty ones."""

        def mapped(node: fx.Node) -> fx.Node:
            t = self.old.tensor_of[node]
            return self.node[t] if t in self.node else self.empty(t)

        args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), mapped)
        if call.source is aten.copy.default:
            made = self.copied(args[1], self.old.values[call.results[0]])
        else:
            made = self.graph.call_function(call.source, args, kwargs)
            if operator_in_place(call.target) is not None:
                made.meta[IN_PLACE_OF] = call.laid_out_by
        for k, t in enumerate(call.results):
            if t >= 0:
                node = self.graph.call_function(_item, (made, k)) if call.several else made
                self.node[t] = self.stopped(t, node)

    def write_masks(self, call: Call, masks: Iterable[int], around: set[str]) -> dict[int, fx.Node]:
        """An operator that draws masks of the region, and the nodes that pack them."""
        found: dict[int, fx.Node] = {}
        read = {t for op, _ in self.tiling.forward if op.id in around for t in op.inputs}
        for t in masks:
            mask = self.old.values[t]
            drawn = None if t in read else drawn_as_mask(self.graph, call, mask)
            if drawn is None:
                self.write(call)
            numbers = drawn is None and mask.dtype is not torch.bool
            found[t] = pack(self.graph, drawn or self.node[t], mask, numbers=numbers)
        return found

    def stopped(self, tensor: int, node: fx.Node) -> fx.Node:
        """The tensor, through which no gradient goes where none did."""
        box = Rect.of_shape(self.old.values[tensor].shape)
        before = self.old.overwritten.get(tensor)
        parts = {} if before not in self.node else {before: InputPart(self.node[before], box)}
        return stopped(self.graph, self.old, tensor, InputPart(node, box), parts)

    def copied(self, source: fx.Node, like: torch.Tensor) -> fx.Node:
        """What is written over a tensor, in its shape and type: autograd has no derivative of ``copy``."""
        expanded = self.graph.call_function(aten.expand.default, (source, list(like.shape)))
        where: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        return self.graph.call_function(aten._to_copy.default, (expanded,), where)

    def empty(self, tensor: int) -> fx.Node:
        """Memory in the form of a tensor."""
        value = self.old.values[tensor]
        where: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        args = list(value.shape), list(value.stride())
        return self.graph.call_function(aten.empty_strided.default, args, where)

    def aligned(self, made: Joint) -> Joint:
        """With an entry for every input and result of the step, tensor or not, and with loops to call.

        Constants stand behind the inputs in what was differentiated, and behind them what a change has added.
        """
        old = self.old
        if len(made.outputs) != len(old.outputs) - len(old.plain) or len(made.tangents) != len(old.tangents):
            raise CaptureError("the step gives results that share memory with others: return copies of them")
        inputs, outputs = iter(made.inputs), iter(made.outputs)
        gradients = itertools.repeat(None) if old.evaluates else iter(made.gradients)
        places = [None if t is None else (next(inputs), next(gradients)) for t in old.inputs]
        pairs = zip(itertools.islice(inputs, len(old.constants)), old.constants.values(), strict=True)
        constants = {t: value for t, value in pairs if t is not None}
        calls, ops = list(made.calls), list(made.graph.ops)
        for k, op in enumerate(ops):
            calls[k] = self.called(op, calls[k])
            if op.kind == LOOP:
                calls[k] = replace(calls[k], args=tuple(calls[k].args[0]))
                axes = tuple(calls[k].target.axes)
                # what a narrow one expects changes in backward
                once = op.once or getattr(calls[k].target, "narrow", False)
                ops[k] = msgspec.structs.replace(op, axes=axes, once=once, source=self.tiling.source)
        refuse_another_order(old, made, old.inputs, [None if one is None else one[0] for one in places])
        places_of = {t: pair[0] for t, pair in zip(old.inputs, places, strict=True) if pair is not None}
        return replace(
            made,
            graph=msgspec.structs.replace(
                made.graph, ops=tuple(ops), tensors=self.with_storages(made.graph.tensors, places_of)
            ),
            calls=tuple(calls),
            inputs=(*(None if pair is None else pair[0] for pair in places), *inputs),
            outputs=tuple(None if t is None else next(outputs) for t in old.outputs),
            gradients=() if old.evaluates else tuple(None if pair is None else pair[1] for pair in places),
            constants=dict(made.constants) | constants,
            plain=old.plain,
        )

    def with_storages(
        self, tensors: Sequence[Tensor], places: Mapping[int | None, int | None]
    ) -> tuple[Tensor, ...]:
        """The tensors, with inputs on the storages that they are on: ``places`` of those of the step."""
        found = list(tensors)
        for t, place in places.items():
            if t is not None and place is not None:
                one = self.old.graph.tensors[t]
                alias = places.get(one.alias)
                found[place] = msgspec.structs.replace(found[place], bytes=one.bytes, alias=alias)
        return tuple(found)


def _item(results: Any, k: int) -> Any:
    return results[k]


def _is_whole(op: Op, wanted: set[int]) -> bool:
    """Whether a dropout is wanted for its result, not for its mask alone."""
    return op.kind == MASKED and op.outputs[0] in wanted


def _example(value: torch.Tensor, differentiable: bool) -> Example:
    return Example(tuple(value.shape), value.stride(), value.dtype, value.device, differentiable)
