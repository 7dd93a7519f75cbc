"""How operators and inputs of a step can be split over devices along one axis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from lowtide.graph import Op, Phase, Role
from lowtide.graph.shards import Mesh, OperatorShare, Shards, box_of
from lowtide.trace.operators import adds_up, differentiable_tensors, supported
from lowtide.trace.shards.batch_norm import BATCH_NORMS
from lowtide.trace.shards.kinds import CUT_KINDS, CutKind
from lowtide.trace.shards.reads import Reads
from lowtide.trace.step.joint import Joint

__all__ = ["ShardWays"]

_RANKS = 4
"""Along longer axes, what devices do is looked at for some of them alone."""
_INNER = frozenset({"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.convolution"})
"""Operators that sum over an inner dimension, which can be cut."""


class ShardWays:
    """The choices for one axis of devices: for each input of the step, then for each operator of forward."""

    def __init__(
        self,
        joint: Joint,
        devices: int,
        kind: CutKind = CUT_KINDS["any"],
        before: Shards | None = None,
        reads: Reads | None = None,
    ) -> None:
        """Nothing is cut but what the kind allows; ``before`` says how other axes split the step already.

        ``reads`` is what is known of the same step from other axes.
        """
        self.joint, self.graph, self.mesh = joint, joint.graph, Mesh((devices,))
        self._before = before
        self._known_before: dict[int, list[tuple[int, int]]] = {}
        self._kind = kind
        self.reads = reads or Reads(joint.graph)
        self.differentiable = differentiable_tensors(joint)
        ops = enumerate(joint.graph.ops)
        self.operators = [(k, op) for k, op in ops if op.phase is Phase.FORWARD]
        self.inputs = [t for t in joint.inputs if t is not None]
        self.maker = {t: k for k, (_, op) in enumerate(self.operators) for t in op.outputs}

    @cached_property
    def cuts(self) -> list[list[int | None]]:
        """The choices for each input."""
        return [self._cuts(t) for t in self.inputs]

    @cached_property
    def shares(self) -> list[list[OperatorShare]]:
        """The choices for each operator."""
        return [self._shares(op) for _, op in self.operators]

    def hold(self, cuts: Mapping[int, int | None]) -> None:
        """Leave one choice for inputs that are cut already."""
        for place, t in enumerate(self.inputs):
            if t in cuts:
                self.cuts[place] = [cuts[t]]

    def settle(self, shards: Shards) -> None:
        """Leave one choice for everything: that of a split along this axis."""
        whole = OperatorShare((None,), (None,))
        self.cuts = [[shards.leaves[t][0]] for t in self.inputs]
        self.shares = [[shards.operators.get(number, whole)] for number, _ in self.operators]

    def shards(self, choices: tuple[int, ...] | list[int]) -> Shards:
        """What choices mean."""
        count = len(self.inputs)
        leaves = {t: (self.cuts[k][choices[k]],) for k, t in enumerate(self.inputs)}
        shares = {number: self.shares[k][choices[count + k]] for k, (number, _) in enumerate(self.operators)}
        return Shards(self.mesh, leaves, {k: one for k, one in shares.items() if one.shared(0)})

    def left(self, t: int) -> list[int]:
        """How long the dimensions of a tensor are on a device, before this axis cuts them."""
        shape = list(self.shape(t))
        for size, dim in self.cut_before(t):
            shape[dim] = max(1, shape[dim] // size)
        return shape

    def cut_before(self, t: int) -> list[tuple[int, int]]:
        """How often other axes cut a tensor, and in which dimension."""
        if t not in self._known_before:
            self._known_before[t] = [] if self._before is None else self._found_before(self._before, t)
        return self._known_before[t]

    def _found_before(self, before: Shards, t: int) -> list[tuple[int, int]]:
        made = self._number.get(t)
        cut = before.leaves.get(t, ()) if made is None else before.share(made).cut
        rank = len(self.shape(t))
        pairs = zip(before.mesh.sizes, cut, strict=False)
        return [(size, dim) for size, dim in pairs if dim is not None and dim < rank]

    @cached_property
    def _number(self) -> dict[int, int]:
        leaves = set(self.inputs)
        return {t: k for k, op in self.operators for t in op.outputs if t not in leaves}

    def _others(self, op: Op) -> dict[int, int]:
        """Into how many parts other axes cut each sum of an operator."""
        found: dict[int, int] = {}
        if self._before is not None and op.outputs:
            share = self._before.share(self._number.get(op.outputs[0], -1))
            for size, axis in zip(self._before.mesh.sizes, share.over, strict=True):
                if axis is not None:
                    found[axis] = found.get(axis, 1) * size
        return found

    def shape(self, t: int) -> tuple[int, ...]:
        """On one device."""
        return self.graph.tensors[t].shape or ()

    def _cuts(self, t: int) -> list[int | None]:
        shape = self.shape(t)
        able = [d for d, size in enumerate(self.left(t)) if size >= self.mesh.devices]
        if t in self._written:
            return [None]
        if self._kind.parameters and self.graph.tensors[t].role is Role.PARAMETER:
            return [d for d in able[:1] if self._kind.parameters == "cut"] or [None]
        if t in self._channelled:  # it follows its BatchNorm
            return [None, *(d for d in able if self._kind.allows(1, 4))]
        owner = self.graph.tensors[self.storage[t]]
        if self._kind.parameters == "cut" and owner.role is Role.PARAMETER:  # a view of what is cut
            return [None, *able]
        return [None, *(d for d in able if self._kind.allows(d, len(shape)))]

    @cached_property
    def _written(self) -> set[int]:
        """What operators write to that every device runs."""
        return {t for _, op in self.operators if op.kind not in BATCH_NORMS for t in op.changes}

    @cached_property
    def _channelled(self) -> set[int]:
        """What a BatchNorm has for each channel."""
        return {t for _, op in self.operators if op.kind in BATCH_NORMS for t in op.inputs[1:]}

    @cached_property
    def ranks(self) -> list[int]:
        """Devices that are looked at: all, or some of many."""
        count = self.mesh.devices
        return list(range(count)) if count <= _RANKS else [0, 1, count // 2, count - 1]

    def _shares(self, op: Op) -> list[OperatorShare]:
        whole = OperatorShare((None,), (None,))
        if op.random or ((op.changes or op.updates) and op.kind not in BATCH_NORMS) or not op.outputs:
            return [whole]
        relation = self.reads.relations(op)[0]
        cuts = [d for d in self._cuts(op.outputs[0]) if d is not None]
        shares = [OperatorShare((d,), (None,)) for d in cuts if self._can(op, d)]
        taken = self._others(op)
        if adds_up(op) and (op.kind not in _INNER or self._kind.inner):
            lengths = [size // taken.get(j, 1) for j, size in enumerate(relation.sums)]
            axes = [j for j, size in enumerate(lengths) if size >= self.mesh.devices]
            shares += [OperatorShare((None,), (j,)) for j in axes]
            if op.kind in _INNER:
                shares += [OperatorShare((d,), (j,)) for j in axes for d in cuts]
        return [whole, *(one for one in shares if self._goes_with_others(op, one))]

    def _goes_with_others(self, op: Op, share: OperatorShare) -> bool:
        """Whether no dimension is cut by one axis, and a sum scattered over it by another."""
        if self._before is None:
            return True
        other = self._before.share(self._number.get(op.outputs[0], -1))
        pairs = list(zip(other.cut, other.over, strict=True))
        same = [over for dim, over in pairs if dim is not None and dim == share.cut[0]]
        return not same or (share.over[0] is None and all(over is None for over in same))

    def _can(self, op: Op, dim: int) -> bool:
        """Whether all devices can compute their part of the results."""
        if op.kind in BATCH_NORMS:
            return True
        for output, t in enumerate(op.outputs):
            shape = self.shape(t)
            if dim >= len(shape) or shape[dim] < self.mesh.devices:
                return output > 0 and t not in self.read
            for rank in self.ranks:
                if supported(op, self.graph, box_of(shape, (dim,), self.mesh, rank), output) is not None:
                    return output > 0 and t not in self.read
        return True

    @cached_property
    def read(self) -> set[int]:
        """Tensors that operators of forward, or the user, read."""
        read = {t for _, op in self.operators for t in op.inputs}
        return read | {t for t in self.joint.outputs if t is not None}

    @cached_property
    def storage(self) -> list[int]:
        """The tensor that owns the storage of each."""
        return self.graph.storages()
