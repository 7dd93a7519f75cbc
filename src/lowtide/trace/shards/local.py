"""``local_step``: the forward part of a step as one device of a mesh computes it.

Each operator computes its Rect of the result. What it reads of an input and does not have comes along one
axis of the mesh after the other. All devices write the same exchanges in the same order, also where one of
them has nothing to send: so nobody waits for a message that never comes, in backward neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError
from lowtide.graph import Op, Phase, Rect
from lowtide.graph.access import Relation, access
from lowtide.graph.shards import (
    Cut,
    OperatorShare,
    Pieces,
    Shards,
    box_of,
    pieces,
    replicated,
    scattered,
)
from lowtide.trace.distributed.exchange import ADD_UP, EXCHANGE, SPREAD
from lowtide.trace.operators import (
    InputPart,
    cropped,
    differentiable_tensors,
    emit,
    loss_total,
    stopped,
    supported,
)
from lowtide.trace.shards.batch_norm import BATCH_NORMS, batch_norm
from lowtide.trace.shards.constants import constant
from lowtide.trace.shards.sums import added_later
from lowtide.trace.shards.unread import behind, made_from, taking_part
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint

__all__ = ["MOVED", "NUMBER", "OPERATOR", "LocalStep", "local_step"]

aten = torch.ops.aten
Wanted = Callable[[int, int], tuple[int, int]]
"""The range that a device wants of a dimension."""
OPERATOR = "lowtide operator"
"""What nodes have the label of their operator under, among what torch knows of them."""
NUMBER = "lowtide number"
"""The same for its number in the step."""
MOVED = "lowtide moved"
"""What nodes that move something have the tensor, and how it moves, under."""


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What one device runs."""

    module: fx.GraphModule
    """Takes its part of every input of the step, and gives the results of forward."""
    boxes: tuple[Rect, ...]
    """The part of each input."""
    summed: Mapping[int, tuple[int, ...]]
    """By input: axes of the mesh over which its gradient is still to be added up."""


def local_step(joint: Joint, shards: Shards, rank: int, wires: Sequence[str]) -> LocalStep:
    """That of a device; ``wires`` are the names of its connections along each axis of the mesh.

    A CaptureError names an operator that cannot be split as the Shards say.
    """
    return _Local(joint, shards, rank, wires).made()


class _Local:
    """Writes the graph."""

    def __init__(self, joint: Joint, shards: Shards, rank: int, wires: Sequence[str]) -> None:
        self.joint, self.graph, self.shards, self.rank = joint, joint.graph, shards, rank
        self.mesh, self.wires, self.axes = shards.mesh, wires, range(len(shards.mesh.sizes))
        self.target = fx.Graph()
        pairs = enumerate(zip(joint.graph.ops, joint.calls, strict=True))
        self.forward = [(k, op, call) for k, (op, call) in pairs if op.phase is Phase.FORWARD]
        self.needed = self._needed()
        self.differentiable = differentiable_tensors(joint)
        self.cuts: dict[int, Cut] = {}
        self.parts: dict[int, InputPart] = {}
        self.inputs: dict[int, int] = {}
        """Inputs of the step, with their places."""

    def made(self) -> LocalStep:
        """The step of the device."""
        boxes: list[Rect] = []
        for place, t in enumerate(self.joint.inputs):
            if t is None:
                raise CaptureError(
                    "a step that is split over devices takes tensors alone; pass numbers as tensors"
                )
            self.cuts[t] = self.shards.leaves.get(t, replicated(self.mesh))
            boxes.append(self._box(t, self.cuts[t]))
            self.parts[t] = InputPart(self.target.placeholder(f"t{t}"), boxes[-1])
            self.inputs[t] = place
        for t, value in self.joint.constants.items():
            box = Rect.of_shape(value.shape)
            self.cuts[t], self.parts[t] = replicated(self.mesh), InputPart(constant(self.target, value), box)
        self.added_later = added_later(self.joint, self.shards, self.inputs)
        for number, op, call in self.forward:
            if op.changes or op.updates or self.needed.intersection(op.outputs):
                before = len(self.target.nodes)
                self._add(op, call, self.shards.share(number))
                for node in itertools.islice(reversed(self.target.nodes), len(self.target.nodes) - before):
                    node.meta[OPERATOR], node.meta[NUMBER] = op.label, number
        results = [None if t is None else self._whole(t).node for t in self.joint.outputs]
        self._count_unread(results)
        self._take_part(results)
        self.target.output(tuple(results))
        wanted = [t for t in self.inputs if t in self.differentiable and self.added_later[t]]
        summed = {self.inputs[t]: tuple(sorted(self.added_later[t])) for t in wanted}
        return LocalStep(fx.GraphModule(torch.nn.Module(), self.target), tuple(boxes), summed)

    def _count_unread(self, results: list[fx.Node | None]) -> None:
        """Have the first result behind inputs that other devices read alone: their memory is here as well."""
        place, t = next((k, t) for k, t in enumerate(self.joint.outputs) if t is not None)
        read = {one for _, op, _ in self.forward for one in op.inputs}
        for one in sorted(read.intersection(self.inputs) - self.differentiable):
            part, node = self.parts[one], results[place]
            if node is not None and not part.node.users:
                results[place] = behind(self.target, part, node, self.joint.values[t].dtype)

    def _take_part(self, results: list[fx.Node | None]) -> None:
        """Have the first result behind every communication, so that none is left out."""
        place, t = next((k, t) for k, t in enumerate(self.joint.outputs) if t is not None)
        node, talks = results[place], dict[fx.Node, bool]()
        for one in self.target.nodes:
            if one.target in (ADD_UP, EXCHANGE, SPREAD):
                moved = {one.meta[MOVED][0]} if MOVED in one.meta else set[int]()
                made = self.graph.ops[one.meta[NUMBER]].outputs if NUMBER in one.meta else ()
                talks[one] = moved <= self.differentiable and not self.differentiable.isdisjoint(made)
        if node is not None:
            results[place] = taking_part(self.target, node, self.joint.values[t].dtype, talks)

    def _needed(self) -> set[int]:
        """Tensors that the results of forward, or what it updates, are made from."""
        needed = {t for t in self.joint.outputs if t is not None}
        for _, op, _ in reversed(self.forward):
            if needed.intersection(op.outputs) or op.changes or op.updates:
                relations = access(self.graph, op).relations
                pairs = [pair for one in relations for pair in zip(op.inputs, one.inputs, strict=True)]
                whole = op.random or op.changes or op.updates or not relations
                needed |= set(op.inputs) if whole else {t for t, read in pairs if read is not None}
        return needed

    def _shape(self, t: int) -> tuple[int, ...]:
        return self.graph.tensors[t].shape or ()

    def _box(self, t: int, cut: Cut, rank: int | None = None) -> Rect:
        return box_of(self._shape(t), cut, self.mesh, self.rank if rank is None else rank)

    def _add(self, op: Op, call: Call, share: OperatorShare) -> None:
        """An operator."""
        split = any(map(share.shared, self.axes))
        if op.kind in BATCH_NORMS and split:
            node = self._batch_norm(op, call, share)
            self._made(op.outputs[0], node, share)
            return
        relations = access(self.graph, op).relations
        whole = not split and any(
            supported(op, self.graph, Rect.of_shape(self._shape(t)), k) for k, t in enumerate(op.outputs)
        )
        if op.random or op.changes or op.updates or whole:
            if split:
                raise CaptureError(f"{op.label}: {op.kind} cannot be split; each device has to run all of it")
            made = self._verbatim(op, call)
            for t in op.outputs:
                self._made(t, self._result(call, made, t), share)
            return
        for output, t in enumerate(op.outputs):
            if t in self.needed:
                self._made(t, self._written(op, call, output, share, relations[output]), share)

    def _made(self, t: int, node: fx.Node, share: OperatorShare) -> None:
        cut, before = share.cut, self.joint.overwritten.get(t, -1)
        part, there = InputPart(node, self._box(t, cut)), dict[int, InputPart]()
        if before in self.differentiable and self._shape(before) == self._shape(t):
            there[before] = self._brought(before, lambda rank, dim: list(self._box(t, cut, rank))[dim], share)
        node = stopped(self.target, self.joint, t, part, there)
        self.cuts[t], self.parts[t] = cut, InputPart(node, part.box)

    def _written(self, op: Op, call: Call, output: int, share: OperatorShare, relation: Relation) -> fx.Node:
        """This device's part of a result."""
        box = self._box(op.outputs[output], share.computed)
        why = supported(op, self.graph, box, output)
        if why is not None:
            raise CaptureError(f"{op.label}: {op.kind} cannot be split so: {why}")
        brought = [self._held(op, k, output, share, relation) for k in range(len(op.inputs))]
        held = [None if one is None or one[1].empty else one[0] for one in brought]
        over, total = self._over(relation, share, self.rank), None
        if over is not None and op.kind.startswith("aten.nll_loss") and relation.scaled:
            parts = [None if k == 0 else self._whole(t) for k, t in enumerate(op.inputs)]
            total = loss_total(self.target, call, op, self.graph, parts)
        before = len(self.target.nodes)
        node = emit(self.target, call, op, self.graph, held, box, output, over, total, relation=relation)
        dtype, split = self.joint.values[op.outputs[output]].dtype, any(map(share.shared, self.axes))
        used = made_from(self.target, node, before)
        for t, given in zip(op.inputs, brought, strict=True):
            if given is None or not (given[1].empty or (split and given[0].node not in used)):
                continue
            if t in self.differentiable or given[0].node is not self.parts[t].node:
                # others read it, and wait for pieces of this device or for gradients to add up
                node = behind(self.target, given[0], node, dtype)
        part = InputPart(node, box)
        for axis, summed in enumerate(share.over):
            if summed is not None:
                part = self._added_up(op.outputs[output], part, axis, share.cut)
        return part.node

    def _added_up(self, t: int, part: InputPart, axis: int, cut: Cut) -> InputPart:
        """The sum of what the devices along an axis have; if the axis cuts it, a part of that for each."""
        dim = cut[axis]
        if dim is None:
            node = self.target.call_function(ADD_UP, (part.node, True, self.wires[axis]))
            return _marked(InputPart(node, part.box), t, "sum")
        line = self.mesh.line(self.rank, axis)
        wanted = [list(self._box(t, cut, one))[dim] for one in line]
        found = scattered(list(part.box)[dim], wanted, line.index(self.rank))
        made = self._exchanged(part, axis, dim, found, wanted[line.index(self.rank)], False)
        return _marked(made, t, "scattered sum")

    def _exchanged(
        self, part: InputPart, axis: int, dim: int, found: Pieces, wanted: tuple[int, int], alike: bool
    ) -> InputPart:
        """A part whose dimension has another range, once pieces are exchanged along an axis."""
        sends, receives = ([x for one in some for x in one] for some in (found.sends, found.receives))
        given = (part.node, dim, sends, receives, found.length, alike, self.wires[axis])
        lo, hi = list(part.box.lo), list(part.box.hi)
        lo[dim], hi[dim] = wanted
        return InputPart(self.target.call_function(EXCHANGE, given), Rect(tuple(lo), tuple(hi)))

    def _over(self, relation: Relation, share: OperatorShare, rank: int) -> Rect | None:
        """The part of the summed axes that a device has."""
        if all(one is None for one in share.over):
            return None
        return box_of(relation.sums, share.over, self.mesh, rank)

    def _need(self, op: Op, k: int, output: int, share: OperatorShare, relation: Relation, rank: int) -> Rect:
        """What a device reads of an input."""
        box, over = self._box(op.outputs[output], share.computed, rank), self._over(relation, share, rank)
        need = relation.needs(box, over)[k]
        assert need is not None
        if k in relation.once and over is not None and any(over.lo):
            return Rect((0,) * need.ndim, (0,) * need.ndim)
        return need

    def _held(
        self, op: Op, k: int, output: int, share: OperatorShare, relation: Relation
    ) -> tuple[InputPart, Rect] | None:
        """What there is of an input once it is brought here, and what of it this device reads."""
        if relation.inputs[k] is None:
            return None
        need = cache(partial(self._need, op, k, output, share, relation))
        part = self._brought(op.inputs[k], lambda rank, dim: list(need(rank))[dim], share)
        return part, need(self.rank)

    def _spread(self, t: int, part: InputPart, axis: int, share: OperatorShare) -> InputPart:
        """What all devices along an axis have; where they use it differently, its gradient is added up."""
        later = axis in self.added_later.get(t, ())
        if not share.shared(axis) or t not in self.differentiable or later:
            return part
        spread = InputPart(self.target.call_function(SPREAD, (part.node, self.wires[axis])), part.box)
        return _marked(spread, t, "sum")

    def _brought(self, t: int, wanted: Wanted, share: OperatorShare | None) -> InputPart:
        """What this device gets of a tensor, where each wants a range of each dimension that is cut.

        All devices use it alike along axes that the share does not split, or if there is none.
        """
        part, cut = self.parts[t], self.cuts[t]
        for axis, dim in enumerate(cut):
            if dim is None and share is not None:  # before devices along the axis have different parts
                part = self._spread(t, part, axis, share)
        for axis, dim in enumerate(cut):
            if dim is not None and dim not in cut[:axis]:
                later = [a for a, d in enumerate(cut) if d is not None and d not in cut[: axis + 1]]
                part = self._moved(t, part, dim, partial(self._passed_on, wanted, later), share)
        return part

    def _passed_on(self, wanted: Wanted, later: Sequence[int], rank: int, dim: int) -> tuple[int, int]:
        """What a device wants of a dimension, and those to which it passes it on along later axes."""
        ranges = [wanted(one, dim) for one in self.mesh.plane(rank, later)]
        some = [(lo, hi) for lo, hi in ranges if lo < hi]
        return (min(lo for lo, _ in some), max(hi for _, hi in some)) if some else (0, 0)

    def _moved(
        self, t: int, part: InputPart, dim: int, wanted: Wanted, share: OperatorShare | None
    ) -> InputPart:
        """A part with what each device wants of a dimension.

        Where several axes cut it, the inner ones first bring together what the first one leaves to a device.
        """
        cut, shape = self.cuts[t], self._shape(t)
        axes = [axis for axis, one in enumerate(cut) if one == dim]
        if len(axes) > 1 and not self._lacks(t, dim, wanted):
            return part

        def held(rank: int, count: int) -> tuple[int, int]:
            """What the first of these axes leave to a device."""
            kept = tuple(one if a in axes[:count] else None for a, one in enumerate(cut))
            return list(box_of(shape, kept, self.mesh, rank))[dim]

        for count in range(len(axes), 0, -1):
            axis = axes[count - 1]
            line = self.mesh.line(self.rank, axis)
            ranges = [wanted(one, dim) if count == 1 else held(one, count - 1) for one in line]
            mine = line.index(self.rank)
            found = pieces([held(one, count) for one in line], ranges, mine)
            if found is not None:
                alike = share is None or not share.shared(axis)
                part = self._exchanged(part, axis, dim, found, ranges[mine], alike)
                whole = count > 1 or all(one == (0, shape[dim]) for one in ranges)
                part = _marked(part, t, "gather" if whole else "halo")
        return part

    def _lacks(self, t: int, dim: int, wanted: Wanted) -> bool:
        """Whether any device wants more of a dimension than it has."""
        for rank in range(self.mesh.devices):
            (lo, hi), (first, end) = list(self._box(t, self.cuts[t], rank))[dim], wanted(rank, dim)
            if first < end and (first < lo or end > hi):
                return True
        return False

    def _whole(self, t: int) -> InputPart:
        """All of a tensor, on every device."""
        return self._brought(t, lambda _, dim: (0, self._shape(t)[dim]), None)

    def _verbatim(self, op: Op, call: Call) -> fx.Node:
        """An operator as it is, which every device runs."""
        if any(dim is not None for t in op.changes for dim in self.cuts[t]):
            raise CaptureError(
                f"{op.label}: {op.kind} writes to what is cut; each device has to have all of it"
            )
        nodes = {t: self._whole(t).node for t in op.inputs if t in self.parts}

        def given(one: fx.Node) -> fx.Node:
            return nodes[self.joint.tensor_of[one]]

        args: Any = fx.map_arg(call.args, given)
        kwargs: Any = fx.map_arg(dict(call.kwargs), given)
        return self.target.call_function(call.target, args, kwargs)

    def _result(self, call: Call, made: fx.Node, t: int) -> fx.Node:
        """One of what a call gives."""
        return self.target.call_function(_item, (made, call.results.index(t))) if call.several else made

    def _batch_norm(self, op: Op, call: Call, share: OperatorShare) -> fx.Node:
        made, first = op.outputs[0], op.inputs[0]
        box = self._box(made, share.cut)
        for t in (op.inputs[k] for k in op.updates):
            if any((dim is None) == (one == 1) for dim, one in zip(self.cuts[t], share.cut, strict=True)):
                raise CaptureError(
                    f"{op.label}: running statistics are cut where channels are, and nowhere else"
                )

        def wanted(rank: int, dim: int) -> tuple[int, int]:
            return list(self._box(made, share.cut, rank))[dim]

        x = InputPart(cropped(self.target, self._brought(first, wanted, share), box), box)
        wires = [self.wires[a] for a, dim in enumerate(share.cut) if dim is not None and dim != 1]
        others = {t: self._brought(t, lambda rank, _: wanted(rank, 1), share) for t in op.inputs[1:]}
        return batch_norm(self.target, self.joint, op, call, x, others, wires)


def _marked(part: InputPart, t: int, how: str) -> InputPart:
    """The same, which says what moves."""
    part.node.meta[MOVED] = t, how
    return part


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place]
