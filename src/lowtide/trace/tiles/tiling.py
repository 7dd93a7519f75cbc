"""A step in tiles: the part of the loss that a box of its summed axes adds, differentiated by itself.

    loss   = sum over boxes of what each box adds        axes: batch, rows or tokens, height, width
    result = its boxes side by side                      axes: its own; where the loss is outside, or later

What a box needs of every tensor follows from the access relation, back from there to the inputs: halos
where windows overlap, whole parameters. Its forward operators are written anew for these parts, and
AOTAutograd gives their backward, so that gradients of tiles that overlap add up to those of the whole step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError, GraphError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Rect, Role, Source
from lowtide.graph.access import Relation, access
from lowtide.trace.eager.layouts import layouts_of
from lowtide.trace.operators import (
    MASKED,
    InputPart,
    cropped,
    depends_on_place,
    emit,
    loss_total,
    stopped,
    supported,
    values_read,
)
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint, Leaf
from lowtide.trace.tiles.accumulate import accumulating, summed
from lowtide.trace.tiles.boxes import Reads, form, inside, whole_features
from lowtide.trace.tiles.differentiate import Change, Example, Forward, differentiated, evaluated
from lowtide.trace.tiles.masks import is_mask, packed_box, packed_like, unpack, unpacked_box
from lowtide.trace.tiles.record import written_for
from lowtide.trace.tiles.sums import Sums, depends, is_weighted, line_of

__all__ = ["CapturedTile", "Differentiate", "Tiling"]

aten = torch.ops.aten
_WRITTEN = 3
"""So many boxes are looked at before others are taken to be like them."""
Differentiate = Callable[[Forward, Change], Joint]


@dataclass(frozen=True, slots=True)
class CapturedTile:
    """One box of the axes that are cut, as a step of its own that adds to gradients."""

    over: Rect
    given: tuple[tuple[int, Rect], ...]
    """Tensors of the step that go in, and which part of each."""
    totals: bool
    """Whether the weight of all targets goes in behind them."""
    wanted: tuple[int, ...]
    """Positions in ``given`` of what has a gradient: so many parts of gradients go in last."""
    joint: Joint
    """The tile's own step: its result is what it adds to the loss, or its box of the result."""
    reach: Rect | None = None
    """Where ``over`` is a box of an input: the part of the result that depends on it."""


_NO_GRADIENT = "aten.rrelu_with_noise_functional"
"""Torch differentiates it with the noise that went in, which is not the one that was drawn."""


class Tiling:
    """How a captured step can be cut; a CaptureError says what stands against it.

    Its region goes from the ``cut`` tensors, or the inputs, to the ``end``, or the loss.
    """

    def __init__(
        self, joint: Joint, cut: Sequence[str] = (), end: str = "", *, channels_last: bool = False
    ) -> None:
        self.joint, self.graph, self.channels_last = joint, joint.graph, channels_last
        self.begins, self.ends = tuple(cut), end
        pairs = zip(joint.graph.ops, joint.calls, strict=True)
        self.forward = [(op, call) for op, call in pairs if op.phase is Phase.FORWARD]
        self._refuse_marks()
        number = {tensor.id: t for t, tensor in enumerate(joint.graph.tensors)}
        self.relations = {t: r for op, _ in self.forward for t, r in _relations(self.graph, op)}
        """How each tensor that forward makes depends on the inputs of its operator."""
        self.leaves = joint.leaves
        found = None if end else Sums(joint, self.forward, self.relations, self.leaves)
        self.result = self._loss(found) if found is not None else self._end(number.get(end, -1))
        """What the region ends at: the loss, or what the loss is made from, or this tensor."""
        self.end = self.result if end else None
        """The tensor that tiles make side by side; None where they add up to the loss, or to a part of it."""
        self.adds = found.ops if found is not None else ()
        """The operators that sum up what the tiles add, where they do."""
        self.cut = frozenset(self._begin(number, name) for name in cut)
        """Tensors at which the region begins; all that they are made from is outside."""
        self.steps = [pair for pair in self.forward if not self.cut.intersection(pair[0].outputs)]
        self.sources = self.leaves | self.cut
        """Tensors that gradients come to, or would in training."""
        self.differentiable = frozenset() if joint.evaluates else self.sources
        self.axes: tuple[int, ...] = (
            self.relations[self.adds[0].outputs[0]].sums
            if self.adds
            else self.graph.tensors[self.result].shape or ()
        )
        """Lengths of the axes that can be cut."""

    def _refuse_marks(self) -> None:
        marks = self.joint.marks
        if marks is not None:
            raise CaptureError(f"the step says more about gradients than its operators do: {marks}")
        if any(op.kind == _NO_GRADIENT for op, _ in self.forward):
            raise CaptureError(f"{_NO_GRADIENT} has no gradient that could be traced again")

    def _begin(self, number: Mapping[str, int], name: str) -> int:
        tensor = number.get(name)
        if tensor is None or not any(tensor in op.outputs for op, _ in self.forward):
            raise CaptureError(f"a region begins at a tensor that forward makes, and {name!r} is none")
        return tensor

    def _end(self, tensor: int) -> int:
        if not any(tensor in op.outputs for op, _ in self.forward):
            raise CaptureError("a region ends at a tensor that forward makes, and here is none of that name")
        one, value = self.graph.tensors[tensor], self.joint.values[tensor]
        if not value.is_floating_point() or not one.shape or 0 in one.shape:
            raise CaptureError(f"{one.label!r}, {one.dtype} of shape {one.shape}, cannot be the end of tiles")
        return tensor

    def _loss(self, found: Sums) -> int:
        for op, _ in self.forward:
            if op.updates and any(found.carries(t) for t in op.outputs):
                what = self.graph.tensors[op.inputs[op.updates[0]]].label
                raise CaptureError(
                    f"the step updates {what!r}, which depends on the whole batch; BatchNorm can be cut in "
                    "evaluation alone, GroupNorm and LayerNorm always"
                )
        return found.result

    def _adds(self, op: Op) -> bool:
        return any(op is one for one in self.adds)

    def _has_gradient(self, *tensors: int) -> bool:
        """Whether any of these tensors depends on something that has a gradient."""
        return depends(self.joint, self.steps, tensors, self.sources)

    def boxes(self, parts: Sequence[int]) -> list[Rect]:
        """A grid of boxes over the axes, row by row, at most so many along each.

        All have the same size but the last along an axis, so that few differ in more than their place.
        """
        sides = [max(1, -(-length // count)) for length, count in zip(self.axes, parts, strict=False)]
        sides += self.axes[len(sides) :]
        starts = [range(0, length, side) for length, side in zip(self.axes, sides, strict=True)]
        return [Rect(lo, tuple(map(add, lo, sides))).clip(self.axes) for lo in itertools.product(*starts)]

    def needed(self, over: Rect) -> tuple[dict[int, Rect], set[int]]:
        """The part of every tensor that a box needs; and those among them that are made as a whole before."""
        needed, before, _ = self._reads(over)
        return needed, before

    def _reads(self, over: Rect) -> tuple[dict[int, Rect], set[int], Reads]:
        """The same, and for every result in turn what is read of the inputs of its operator."""
        graph = self.graph
        read: Reads = []
        box = Rect.of_shape(graph.tensors[self.result].shape or ()) if self.end is None else over
        needed, before = {self.result: box}, set[int]()
        for op, _ in reversed(self.steps):
            for output, t in enumerate(op.outputs):
                if t not in needed or t in before:
                    continue
                needed[t] = whole_features(op.kind, needed[t], graph.tensors[t].shape or ())
                why = supported(op, graph, needed[t], output)
                if op.kind == MASKED and output == 0:  # the mask is drawn before, of all
                    mask = op.outputs[1]
                    needed[mask] = needed.get(mask, needed[t]).hull(needed[t])
                    before.add(mask)
                elif why is not None:
                    self.may_be_before(op, why)
                    before.add(t)
                    continue
                elif depends_on_place(op) and needed[t] != Rect.of_shape(graph.tensors[t].shape or ()):
                    before.add(t)  # cut like an input, so that tiles differ in nothing but what goes in
                    continue
                reach = self.relations[t].reach(needed[t], over if self._adds(op) else None)
                needs = self.relations[t].inside(reach)
                read.append((t, op.inputs, needs, reach))
                for source, need in zip(op.inputs, needs, strict=True):
                    if need is not None and not need.empty:
                        needed[source] = needed.get(source, need).hull(need)
        return needed, before, read

    def may_be_before(self, op: Op, why: str) -> None:
        """What is made as a whole must not depend on anything that has a gradient."""
        if self._has_gradient(*values_read(self.graph, op)):
            raise CaptureError(f"{line_of(op)}: {op.kind} cannot run in tiles: {why}")

    def gradient_sum(self, tensor: int) -> torch.Tensor:
        """How tiles add up the gradient of a tensor: without gaps, as shape, type and device alone."""
        value = self.joint.values[tensor]
        with getattr(value, "fake_mode", None) or contextlib.nullcontext():
            return summed(torch.empty_like(value), fused=self.joint.kernels is not None)

    def draws(self, op: Op) -> bool:
        """Whether an operator draws random numbers in this call."""
        return bool(op.random) and supported(op, self.graph) is not None

    def tiles(
        self, boxes: Sequence[Rect], make: Differentiate = differentiated, *, hurried: bool = False
    ) -> list[CapturedTile]:
        """Each box as a step of its own; boxes that differ in place alone share one, which ``make`` makes.

        In a hurry, boxes along the first axis are taken to be alike where the first two and the last of them
        are, and what each operator reads is of the same size and at the same place in its part.
        """
        known: dict[Hashable, Joint] = {}
        alike = [k for k, box in enumerate(boxes) if box.shape == boxes[0].shape]
        in_rows = len({(box.lo[1:], box.hi[1:]) for box in boxes}) == 1
        if not hurried or not in_rows or len(alike) <= _WRITTEN:
            return [self.tile(box, known, make) for box in boxes]
        written = {k: self.tile(boxes[k], known, make) for k in {*alike[:2], alike[-1]}}
        if len({id(one.joint) for one in written.values()}) == 1:
            first, like = written[0], form(*self._reads(boxes[0]))
            for k in alike[2:-1]:
                needed, before, read = self._reads(boxes[k])
                if form(needed, before, read) == like:
                    written[k] = replace(
                        first,
                        over=boxes[k],
                        given=tuple((t, self.given_box(t, needed[t])) for t, _ in first.given),
                    )
        return [written.get(k) or self.tile(box, known, make) for k, box in enumerate(boxes)]

    def tile(
        self,
        over: Rect,
        known: dict[Hashable, Joint],
        make: Differentiate = differentiated,
        half: str = "",
        wanted: Collection[int] | None = None,
        own: tuple[int, Rect] | None = None,
    ) -> CapturedTile:
        """A box as a step of its own, which ``make`` makes unless one like it is ``known``.

        ``half`` of it runs forward or backward alone. ``wanted`` are tensors that it adds to the gradients
        of, all of them by default; where it is to ``own`` a box of one, nothing outside of that is added.
        """
        half = "forward" if self.joint.evaluates else half
        gradients = self.differentiable if wanted is None else frozenset(wanted)
        needed, before = self.needed(over)
        made = {t for op, _ in self.steps for t in op.outputs} - before
        for op, _ in self.forward:
            others = [t for t in op.outputs if t in needed and t not in made and t not in before | self.cut]
            if any(self.joint.values[t].is_floating_point() for t in others):
                raise CaptureError(
                    f"{line_of(op)}: the region begins at one result of {op.kind} and reads another"
                )
        target = fx.Graph()
        given = sorted(t for t in needed if t not in made)
        parts_in = tuple((t, self.given_box(t, needed[t])) for t in given)
        parts = {t: InputPart(target.placeholder(f"t{t}"), box) for t, box in parts_in}
        total = target.placeholder("total") if self.totals else None
        parts |= {t: self._unpacked(target, t, parts[t]) for t in given if t in self.packed}
        for op, call in self.steps:
            for output, t in enumerate(op.outputs):
                if t in needed and t in made:
                    with written_for(target, op):
                        node = self._written(target, op, call, output, parts, needed, over, total)
                    node = stopped(target, self.joint, t, InputPart(node, needed[t]), parts)
                    parts[t] = InputPart(node, needed[t])
        target.output((parts[self.result].node,))
        places = tuple(k for k, t in enumerate(given) if t in gradients)
        examples = [self._example(t, box, t in gradients) for t, box in parts_in]
        leaves = [Leaf(self.graph.tensors[t].label, _role(self.graph, t)) for t in given]
        if total is not None:
            examples.append(Example((), (), self.joint.values[self.result].dtype, self.device, False))
            leaves.append(Leaf("total", Role.INPUT))
        kept = () if own is None else inside(own[1], needed[own[0]])
        key = half, str(target), tuple(examples), str(kept)
        if half == "forward":
            places = ()
        fused = self.joint.kernels is not None
        layouts, split = layouts_of(self.joint.values), self.joint.split
        forward = Forward(target, examples, leaves, layouts, fused=fused, split=split)
        if key not in known and half == "forward":
            known[key] = evaluated(forward)
        elif key not in known:
            sums = {k: self.gradient_sum(given[k]).dtype for k in places}
            known[key] = make(forward, accumulating(leaves, sums, kept))
        box, reach = (over, None) if own is None else (own[1], over)
        return CapturedTile(box, parts_in, total is not None, places, known[key], reach)

    def _written(
        self,
        target: fx.Graph,
        op: Op,
        call: Call,
        output: int,
        parts: dict[int, InputPart],
        needed: dict[int, Rect],
        over: Rect,
        total: fx.Node | None,
    ) -> fx.Node:
        wanted = needed[op.outputs[output]]
        if op.kind == MASKED:
            value, mask = parts[op.inputs[0]], parts[op.outputs[1]]
            share = float(call.args[1]) if call.args[2] is not False else 0.0
            source = cropped(target, value, wanted), cropped(target, mask, wanted)
            kept = target.call_function(aten.mul.Tensor, source)
            return target.call_function(aten.mul.Tensor, (kept, 1 / (1 - share) if share < 1 else 0.0))
        held = [parts.get(source) for source in op.inputs]
        more = (over, total if op is self.weighted else None) if self._adds(op) else ()
        relation = self.relations[op.outputs[output]]
        known: dict[str, Any] = {"channels_last": self.channels_last, "relation": relation}
        try:
            return emit(target, call, op, self.graph, held, wanted, output, *more, **known)
        except GraphError as error:  # it reads what the step changes on its way
            raise CaptureError(f"{line_of(op)}: {op.kind} cannot run in tiles: {error}") from error

    def _example(self, tensor: int, box: Rect, differentiable: bool) -> Example:
        """How the part of a tensor that goes in lies in memory."""
        value = self.joint.values[tensor]
        like = packed_like(value) if tensor in self.packed else value
        cut = torch.empty_strided(like.shape, like.stride(), device="meta")[box.slices()]
        return Example(tuple(cut.shape), cut.stride(), like.dtype, value.device, differentiable)

    @cached_property
    def packed(self) -> frozenset[int]:
        """Random masks of the region, which go into tiles as bits."""
        as_they_are = {*self.joint.outputs, *(self.total[1] if self.total else ())}
        values = self.joint.values
        drawn = {t for op, _ in self.steps for t in op.outputs if is_mask(op, values[t])}
        return frozenset(drawn - as_they_are)

    def given_box(self, tensor: int, needed: Rect) -> Rect:
        """What goes into a tile of a tensor of which it needs this part."""
        return packed_box(needed) if tensor in self.packed else needed

    def _unpacked(self, target: fx.Graph, tensor: int, part: InputPart) -> InputPart:
        mask = self.joint.values[tensor]
        node = unpack(target, part.node, part.box, tuple(mask.shape), mask.dtype)
        return InputPart(node, unpacked_box(part.box, tuple(mask.shape)))

    @cached_property
    def source(self) -> Source | None:
        """The user's line at which the region ends."""
        return self.adds[0].source if self.adds else self.graph.tensors[self.result].source

    @cached_property
    def device(self) -> torch.device:
        """Where the loss is."""
        return self.joint.values[self.result].device

    @property
    def weighted(self) -> Op | None:
        """The loss that is divided by the weight of all targets, if there is one."""
        return next((op for op in self.adds if is_weighted(op, self.relations)), None)

    @property
    def totals(self) -> bool:
        """Whether a loss is divided by the weight of all targets."""
        return self.weighted is not None

    @cached_property
    def total(self) -> tuple[fx.GraphModule, tuple[int, ...]] | None:
        """What gives the weight of all targets, and the tensors of the step that it takes."""
        loss = self.weighted
        if loss is None:
            return None
        target = fx.Graph()
        call = next(call for op, call in self.steps if op is loss)
        held: list[InputPart | None] = []
        used: list[int] = []
        reads = loss.inputs[1:]
        for t in loss.inputs:
            box = Rect.of_shape(self.graph.tensors[t].shape or ())
            held.append(InputPart(target.placeholder(f"t{t}"), box) if t in reads else None)
            used += [t] if t in reads else []
        target.output(loss_total(target, call, loss, self.graph, held))
        return fx.GraphModule(torch.nn.Module(), target), tuple(used)


def _relations(graph: Graph, op: Op) -> Iterator[tuple[int, Relation]]:
    return zip(op.outputs, access(graph, op).relations, strict=True)


def _role(graph: Graph, tensor: int) -> Role:
    role = graph.tensors[tensor].role
    return role if role in RESIDENT_ROLES else Role.INPUT
