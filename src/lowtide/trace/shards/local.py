"""``local_step``: the forward part of a step as one device of a mesh computes it.

Each operator computes its Rect of the result. What it reads of an input and does not have comes along one
axis of the mesh after the other. All devices write the same exchanges in the same order, also where one of
them has nothing to send: so nobody waits for a message that never comes, in backward neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError
from lowtide.graph import Op, Phase, Rect
from lowtide.graph.access import Relation, access
from lowtide.graph.shards import Cut, OperatorShare, Shards, box_of, pieces, replicated
from lowtide.trace.distributed.exchange import ADD_UP, EXCHANGE, SPREAD
from lowtide.trace.operators import InputPart, cropped, emit, loss_total, supported
from lowtide.trace.shards.batch_norm import BATCH_NORMS, batch_norm
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint

__all__ = ["LocalStep", "local_step"]

aten = torch.ops.aten


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
        self.differentiable = self._differentiable()
        self.cuts: dict[int, Cut] = {}
        self.parts: dict[int, InputPart] = {}
        self.inputs: dict[int, int] = {}
        """Inputs of the step, with their places."""
        self.unread: list[fx.Node] = []
        """Parts of which this device reads nothing, while others do: it takes part in their gradients."""

    def made(self) -> LocalStep:
        """The step of the device."""
        if self.joint.constants:
            name = self.graph.tensors[next(iter(self.joint.constants))].label
            raise CaptureError(f"the constant {name!r} cannot be split over devices; pass it as an argument")
        boxes: list[Rect] = []
        for place, t in enumerate(self.joint.inputs):
            if t is None:
                raise CaptureError("a step that is split over devices takes tensors alone")
            self.cuts[t] = self.shards.leaves.get(t, replicated(self.mesh))
            boxes.append(self._box(t, self.cuts[t]))
            self.parts[t] = InputPart(self.target.placeholder(f"t{t}"), boxes[-1])
            self.inputs[t] = place
        shared, alike = self._uses()
        self.added_later = {t: shared[t] - alike[t] for t in self.inputs}
        for number, op, call in self.forward:
            if op.changes or op.updates or self.needed.intersection(op.outputs):
                self._add(op, call, self.shards.share(number))
        results = [None if t is None else self._whole(t).node for t in self.joint.outputs]
        self.target.output(tuple(results))
        wanted = [t for t in self.inputs if t in self.differentiable and self.added_later[t]]
        summed = {self.inputs[t]: tuple(sorted(self.added_later[t])) for t in wanted}
        return LocalStep(fx.GraphModule(torch.nn.Module(), self.target), tuple(boxes), summed)

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

    def _differentiable(self) -> set[int]:
        """Tensors of forward through which gradients go."""
        pairs = zip(self.joint.inputs, self.joint.gradients, strict=False)
        found = {t for t, g in pairs if t is not None and g is not None}
        values, stopped = self.joint.values, self.joint.stopped
        for _, op, _ in self.forward:
            if found.intersection(op.inputs):
                found |= {t for t in op.outputs if values[t].is_floating_point() and t not in stopped}
        return found

    def _uses(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Axes along which devices use an input that all hold for something of their own, or for the same."""
        shared: dict[int, set[int]] = {t: set() for t in self.inputs}
        alike: dict[int, set[int]] = {t: set() for t in self.inputs}
        for number, op, _ in self.forward:
            share = self.shards.share(number)
            for t in self.inputs.keys() & set(op.inputs):
                for axis in self.axes:
                    if self.cuts[t][axis] is None:
                        (shared if share.shared(axis) else alike)[t].add(axis)
        return shared, alike

    def _shape(self, t: int) -> tuple[int, ...]:
        return self.graph.tensors[t].shape or ()

    def _box(self, t: int, cut: Cut, rank: int | None = None) -> Rect:
        return box_of(self._shape(t), cut, self.mesh, self.rank if rank is None else rank)

    def _add(self, op: Op, call: Call, share: OperatorShare) -> None:
        """An operator."""
        split = any(map(share.shared, self.axes))
        if op.kind in BATCH_NORMS and split:
            node = self._batch_norm(op, call, share)
            self._made(op.outputs[0], node, share.cut)
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
                self._made(t, self._result(call, made, t), share.cut)
            return
        for output, t in enumerate(op.outputs):
            if t in self.needed:
                self._made(t, self._written(op, call, output, share, relations[output]), share.cut)

    def _made(self, t: int, node: fx.Node, cut: Cut) -> None:
        if t in self.joint.stopped:
            node = self.target.call_function(aten.detach.default, (node,))
        self.cuts[t], self.parts[t] = cut, InputPart(node, self._box(t, cut))

    def _written(self, op: Op, call: Call, output: int, share: OperatorShare, relation: Relation) -> fx.Node:
        """This device's part of a result."""
        box = self._box(op.outputs[output], share.cut)
        why = supported(op, self.graph, box, output)
        if why is not None:
            raise CaptureError(f"{op.label}: {op.kind} cannot be split so: {why}")
        held = [self._held(op, k, output, share, relation) for k in range(len(op.inputs))]
        over, total = self._over(relation, share, self.rank), None
        if over is not None and op.kind.startswith("aten.nll_loss") and relation.scaled:
            parts = [None if k == 0 else self._whole(t) for k, t in enumerate(op.inputs)]
            total = loss_total(self.target, call, op, self.graph, parts)
        node = emit(self.target, call, op, self.graph, held, box, output, over, total, relation=relation)
        for one in self.unread:
            empty = self.target.call_function(aten.slice.Tensor, (one, 0, 0, 0))
            nothing = self.target.call_function(aten.sum.default, (empty,))
            node = self.target.call_function(aten.add.Tensor, (node, nothing))
        self.unread.clear()
        for axis, summed in enumerate(share.over):
            if summed is not None:
                node = self.target.call_function(ADD_UP, (node, True, self.wires[axis]))
        return node

    def _over(self, relation: Relation, share: OperatorShare, rank: int) -> Rect | None:
        """The part of the summed axes that a device has."""
        if all(one is None for one in share.over):
            return None
        return box_of(relation.sums, share.over, self.mesh, rank)

    def _need(self, op: Op, k: int, output: int, share: OperatorShare, relation: Relation, rank: int) -> Rect:
        """What a device reads of an input."""
        box = self._box(op.outputs[output], share.cut, rank)
        need = relation.needs(box, self._over(relation, share, rank))[k]
        assert need is not None
        return need

    def _held(
        self, op: Op, k: int, output: int, share: OperatorShare, relation: Relation
    ) -> InputPart | None:
        """What an operator is given of an input, once it is there."""
        t = op.inputs[k]
        if relation.inputs[k] is None:
            return None
        part = self.parts[t]
        for axis, dim in enumerate(self.cuts[t]):
            if dim is not None:
                line = self.mesh.line(self.rank, axis)
                needs = [self._need(op, k, output, share, relation, one) for one in line]
                part = self._moved(t, part, axis, [list(one)[dim] for one in needs], not share.shared(axis))
            elif share.shared(axis) and t in self.differentiable and axis not in self.added_later.get(t, ()):
                node = self.target.call_function(SPREAD, (part.node, self.wires[axis]))
                part = InputPart(node, part.box)
        if not self._need(op, k, output, share, relation, self.rank).empty:
            return part
        if t in self.differentiable:  # others read it, and add gradients up with this device
            self.unread.append(part.node)
        return None

    def _moved(
        self, t: int, part: InputPart, axis: int, wanted: Sequence[tuple[int, int]], alike: bool
    ) -> InputPart:
        """A part with what each device along an axis wants of the dimension that the axis cuts."""
        dim = self.cuts[t][axis]
        assert dim is not None
        line = self.mesh.line(self.rank, axis)
        mine = line.index(self.rank)
        found = pieces([list(self._box(t, self.cuts[t], one))[dim] for one in line], wanted, mine)
        if found is None:
            return part
        sends, receives = ([x for one in some for x in one] for some in (found.sends, found.receives))
        given = (part.node, dim, sends, receives, found.length, alike, self.wires[axis])
        lo, hi = list(part.box.lo), list(part.box.hi)
        lo[dim], hi[dim] = wanted[mine]
        return InputPart(self.target.call_function(EXCHANGE, given), Rect(tuple(lo), tuple(hi)))

    def _whole(self, t: int) -> InputPart:
        """All of a tensor, on every device."""
        part = self.parts[t]
        for axis, dim in enumerate(self.cuts[t]):
            if dim is not None:
                ranges = [(0, self._shape(t)[dim])] * self.mesh.sizes[axis]
                part = self._moved(t, part, axis, ranges, True)
        return part

    def _verbatim(self, op: Op, call: Call) -> fx.Node:
        """An operator as it is, which every device runs."""
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
        first, box = op.inputs[0], self._box(op.outputs[0], share.cut)
        x = self.parts[first]
        for axis, dim in enumerate(self.cuts[first]):
            if dim is not None:
                line = self.mesh.line(self.rank, axis)
                ranges = [list(self._box(op.outputs[0], share.cut, one))[dim] for one in line]
                x = self._moved(first, x, axis, ranges, not share.shared(axis))
        x = InputPart(cropped(self.target, x, box), box)
        wires = [self.wires[a] for a, dim in enumerate(share.cut) if dim is not None and dim != 1]
        others = {t: self.parts[t] for t in op.inputs[1:]}
        return batch_norm(self.target, self.joint, op, call, x, others, wires)


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place]
