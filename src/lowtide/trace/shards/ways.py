"""How operators and inputs of a step can be split over devices along one axis, and what each way takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from lowtide.cost.wire import WireSpeed
from lowtide.graph import Op, Phase, Rect, Role
from lowtide.graph.access import Relation, access
from lowtide.graph.shards import Mesh, OperatorShare, Shards, box_of
from lowtide.trace.operators import adds_up, differentiable_tensors, supported
from lowtide.trace.shards.batch_norm import BATCH_NORMS
from lowtide.trace.shards.kinds import CUT_KINDS, CutKind
from lowtide.trace.step.joint import Joint

__all__ = ["ShardWays"]

_BACKWARD = 2.0
"""Backward takes so many times as long as forward."""
_KEPT = 1e-15
"""Seconds for a byte that a device holds: of two ways that take as long, the smaller one is taken."""
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
        seconds: Mapping[int, float],
        link: WireSpeed,
        kind: CutKind = CUT_KINDS["any"],
        before: Shards | None = None,
    ) -> None:
        """``seconds`` is what operators take on one device; nothing is cut but what the kind allows.

        ``before`` says how other axes of the mesh split the step already.
        """
        self.joint, self.graph, self.mesh = joint, joint.graph, Mesh((devices,))
        self._before = before
        self._known_before: dict[int, list[tuple[int, int]]] = {}
        self._seconds, self._link, self._kind = seconds, link, kind
        self._differentiable = differentiable_tensors(joint)
        ops = enumerate(joint.graph.ops)
        self.operators = [(k, op) for k, op in ops if op.phase is Phase.FORWARD]
        self.inputs = [t for t in joint.inputs if t is not None]
        self._maker = {t: k for k, (_, op) in enumerate(self.operators) for t in op.outputs}

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
        """Leave one choice for everything: that of a split along this axis, whose cost is asked for."""
        whole = OperatorShare((None,), (None,))
        self.cuts = [[shards.leaves[t][0]] for t in self.inputs]
        self.shares = [[shards.operators.get(number, whole)] for number, _ in self.operators]

    def shards(self, choices: tuple[int, ...] | list[int]) -> Shards:
        """What choices mean."""
        count = len(self.inputs)
        leaves = {t: (self.cuts[k][choices[k]],) for k, t in enumerate(self.inputs)}
        shares = {number: self.shares[k][choices[count + k]] for k, (number, _) in enumerate(self.operators)}
        return Shards(self.mesh, leaves, {k: one for k, one in shares.items() if one.shared(0)})

    @cached_property
    def alone(self) -> list[list[float]]:
        """What each choice takes by itself."""
        pairs = zip(self.inputs, self.cuts, strict=True)
        found = [[_KEPT * self._bytes(t, cut) for cut in cuts] for t, cuts in pairs]
        for (number, op), shares in zip(self.operators, self.shares, strict=True):
            found.append([self._operator(number, op, share) for share in shares])
        return found

    def priced(self, byte_seconds: float) -> list[list[float]]:
        """The same, with seconds for every byte that a device holds."""
        rows = zip(self.alone, self.held, strict=True)
        return [[cost + byte_seconds * size for cost, size in zip(*row, strict=True)] for row in rows]

    @property
    def pairs(self) -> dict[tuple[int, int], list[list[float]]]:
        """What two choices take together: bytes that must move. Infinite where they do not go together."""
        return self._edges[0]

    @property
    def copied(self) -> dict[tuple[int, int], list[list[float]]]:
        """Bytes of what a device brings together from others and keeps for backward, by two choices."""
        return self._edges[1]

    @cached_property
    def _edges(self) -> tuple[dict[tuple[int, int], list[list[float]]], ...]:
        """Both of these: what moves, and what is kept of it."""
        moved: dict[tuple[int, int], list[list[float]]] = {}
        kept: dict[tuple[int, int], list[list[float]]] = {}
        count, place_of = len(self.inputs), {t: k for k, t in enumerate(self.inputs)}
        for k, (_, op) in enumerate(self.operators):
            relations = self._relations(op)
            for place, t in enumerate(op.inputs):
                made = self._maker.get(t) if t not in place_of else None
                before = place_of.get(t) if made is None else count + made
                if before is None:
                    continue
                cuts = self.cuts[before] if made is None else [one.cut[0] for one in self.shares[made]]
                pair = before, count + k
                for relation in relations:
                    costs, sizes = self._edge(op, place, t, cuts, self.shares[k], relation)
                    moved[pair] = _added(moved.get(pair), costs)
                    kept[pair] = _added(kept.get(pair), sizes)
        return moved, kept

    @cached_property
    def held(self) -> list[list[float]]:
        """Bytes that a device holds by each choice, without what is exchanged.

        Parameters with their gradients, and results that backward reads.
        """
        graph, pairs = self.graph, zip(self.inputs, self.cuts, strict=True)
        trained = {t for t, g in zip(self.joint.inputs, self.joint.gradients, strict=False) if g is not None}
        found = [[(1 + (t in trained)) * self._bytes(t, cut) for cut in cuts] for t, cuts in pairs]
        for (_, op), shares in zip(self.operators, self.shares, strict=True):
            kept = [t for t in op.outputs if t in self._saved and graph.tensors[t].alias is None]
            found.append([sum(self._bytes(t, share.cut[0]) for t in kept) for share in shares])
        return found

    @cached_property
    def _saved(self) -> set[int]:
        """Storages of forward that backward reads."""
        storage = self.graph.storages()
        return {storage[t] for t in self.graph.saved_for_backward()} | set(self.inputs)

    def _left(self, t: int) -> list[int]:
        """How long the dimensions of a tensor are on a device, before this axis cuts them."""
        shape = list(self._shape(t))
        for size, dim in self._cut_before(t):
            shape[dim] = max(1, shape[dim] // size)
        return shape

    def _cut_before(self, t: int) -> list[tuple[int, int]]:
        """How often other axes cut a tensor, and in which dimension."""
        if t not in self._known_before:
            self._known_before[t] = [] if self._before is None else self._found_before(self._before, t)
        return self._known_before[t]

    def _found_before(self, before: Shards, t: int) -> list[tuple[int, int]]:
        made = self._number.get(t)
        cut = before.leaves.get(t, ()) if made is None else before.share(made).cut
        rank = len(self._shape(t))
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

    def _size(self, t: int) -> float:
        """Bytes of a tensor on a device, before this axis cuts it."""
        size = float(self.graph.tensors[t].bytes)
        for count, _ in self._cut_before(t):
            size /= count
        return size

    def _relations(self, op: Op) -> list[Relation]:
        """Of the results that somebody reads, each with its own part of the inputs; of one at least."""
        found = access(self.graph, op).relations
        if op.kind in BATCH_NORMS or not found:
            return list(found[:1])
        read = [one for one, t in zip(found, op.outputs, strict=True) if t in self._read]
        return read or list(found[:1])

    def _shape(self, t: int) -> tuple[int, ...]:
        return self.graph.tensors[t].shape or ()

    def _cuts(self, t: int) -> list[int | None]:
        shape = self._shape(t)
        able = [d for d, size in enumerate(self._left(t)) if size >= self.mesh.devices]
        if t in self._written:
            return [None]
        if self._kind.parameters and self.graph.tensors[t].role is Role.PARAMETER:
            return [d for d in able[:1] if self._kind.parameters == "cut"] or [None]
        if t in self._channelled:  # it follows its BatchNorm
            return [None, *(d for d in able if self._kind.allows(1, 4))]
        owner = self.graph.tensors[self._storage[t]]
        if self._kind.parameters == "cut" and owner.role is Role.PARAMETER:  # a view of what is cut
            return [None, *able]
        return [None, *(d for d in able if self._kind.allows(d, len(shape)))]

    @cached_property
    def _written(self) -> set[int]:
        """What operators write to that every device runs."""
        return {t for _, op in self.operators if op.kind not in BATCH_NORMS for t in op.changes}

    @cached_property
    def _kept_by(self) -> dict[str, set[int]]:
        """Storages that the backward of an operator reads, by operator."""
        found: dict[str, set[int]] = {}
        for op in self.graph.ops:
            if op.differentiates:
                found.setdefault(op.differentiates, set()).update(self._storage[t] for t in op.reads)
        return found

    @cached_property
    def _channelled(self) -> set[int]:
        """What a BatchNorm has for each channel."""
        return {t for _, op in self.operators if op.kind in BATCH_NORMS for t in op.inputs[1:]}

    @cached_property
    def _ranks(self) -> list[int]:
        count = self.mesh.devices
        return list(range(count)) if count <= _RANKS else [0, 1, count // 2, count - 1]

    def _shares(self, op: Op) -> list[OperatorShare]:
        whole = OperatorShare((None,), (None,))
        if op.random or ((op.changes or op.updates) and op.kind not in BATCH_NORMS) or not op.outputs:
            return [whole]
        relation = access(self.graph, op).relations[0]
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
            shape = self._shape(t)
            if dim >= len(shape) or shape[dim] < self.mesh.devices:
                return output > 0 and t not in self._read
            for rank in self._ranks:
                if supported(op, self.graph, box_of(shape, (dim,), self.mesh, rank), output) is not None:
                    return output > 0 and t not in self._read
        return True

    @cached_property
    def _read(self) -> set[int]:
        """Tensors that operators of forward, or the user, read."""
        read = {t for _, op in self.operators for t in op.inputs}
        return read | {t for t in self.joint.outputs if t is not None}

    def _bytes(self, t: int, cut: int | None) -> float:
        """Of the largest part."""
        size, shape = self._size(t), self._left(t)
        return size if cut is None or cut >= len(shape) else size * self._part(shape[cut])

    def _part(self, length: int) -> float:
        """The share of the device that has most of a dimension."""
        return -(-length // self.mesh.devices) / length if length else 1.0

    def _operator(self, number: int, op: Op, share: OperatorShare) -> float:
        """What an operator takes, forward and backward, with the sum that ends it."""
        seconds = (1 + _BACKWARD) * self._seconds.get(number, 0.0)
        if share.over[0] is not None:
            seconds *= self._part(access(self.graph, op).relations[0].sums[share.over[0]])
        elif share.cut[0] is not None:
            seconds *= self._part(self._left(op.outputs[0])[share.cut[0]])
        kept = sum(self._bytes(t, share.cut[0]) for t in op.outputs)
        summed = 0.0
        if share.over[0] is not None and share.cut[0] is None:
            summed = self._reduced(kept)
        elif share.over[0] is not None:  # scattered, and the gradient gathered
            summed = 2 * self._link.seconds(kept * (self.mesh.devices - 1))
        if op.kind in BATCH_NORMS and share.cut[0] not in (None, 1):
            summed += 4 * self._reduced(4.0 * self._shape(op.outputs[0])[1])
        return seconds + summed + _KEPT * kept

    def _reduced(self, size: float) -> float:
        """Seconds of a sum over all devices."""
        return self._link.sum_seconds(size, self.mesh.devices)

    def _edge(
        self,
        op: Op,
        place: int,
        t: int,
        cuts: list[int | None],
        shares: list[OperatorShare],
        relation: Relation,
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds for what an operator reads of an input and for its gradient on the way back; bytes."""
        found = [[0.0] * len(shares) for _ in cuts]
        sizes = [[0.0] * len(shares) for _ in cuts]
        gradient = t in self._differentiable
        saved = self._storage[t] in self._kept_by.get(op.id, ())
        for k, share in enumerate(shares):
            needs = self._needs(op, place, share, relation)
            for c, cut in enumerate(cuts):
                if place in op.updates and op.kind in BATCH_NORMS:
                    found[c][k] = math.inf if (cut is None) == (share.cut[0] == 1) else 0.0
                elif needs is None:
                    continue
                elif cut is None:
                    alone = share.shared(0) and gradient
                    found[c][k] = self._reduced(self._size(t)) if alone else 0.0
                else:
                    received, whole = self._received(t, cut, share, needs)
                    if received and any(dim == cut for _, dim in self._cut_before(t)):
                        whole = self._size(t)  # first all that other axes leave comes together
                        received = whole * (self.mesh.devices - 1) / self.mesh.devices
                    moved = self._link.seconds(received)
                    found[c][k] = moved * (2 if gradient and share.shared(0) else 1)
                    sizes[c][k] = whole if received and saved else 0.0
        return found, sizes

    @cached_property
    def _storage(self) -> list[int]:
        return self.graph.storages()

    def _needs(
        self, op: Op, place: int, share: OperatorShare, relation: Relation
    ) -> list[tuple[int, Rect]] | None:
        """What some devices read of an input; None where its values are not read."""
        if relation.inputs[place] is None:
            return None
        found: list[tuple[int, Rect]] = []
        for rank in self._ranks if share.shared(0) else ():
            if op.kind in BATCH_NORMS:
                need: Rect | None = box_of(self._shape(op.outputs[0]), share.cut, self.mesh, rank)
                if need is not None and place:
                    need = Rect(need.lo[1:2], need.hi[1:2])
            else:
                over = None
                if share.over[0] is not None:
                    over = box_of(relation.sums, share.over, self.mesh, rank)
                    if place in relation.once and any(over.lo):
                        continue
                need = relation.needs(box_of(relation.shape, share.computed, self.mesh, rank), over)[place]
            if need is not None and not need.empty:
                found.append((rank, need))
        return found

    def _received(
        self, t: int, cut: int, share: OperatorShare, needs: list[tuple[int, Rect]]
    ) -> tuple[float, float]:
        """Bytes that a device gets from others, at most, and of all that it then has."""
        count = self.mesh.devices
        if not share.shared(0):
            return self._size(t) * (count - 1) / count, self._size(t)
        most, whole, length = 0, 0, self._shape(t)[cut]
        for rank, need in needs:
            lo, hi = need.lo[cut], need.hi[cut]
            first, end = length * rank // count, length * (rank + 1) // count
            missing = (hi - lo) - max(0, min(hi, end) - max(lo, first))
            most, whole = max(most, need.size // (hi - lo) * missing), max(whole, need.size)
        part = self._size(t) / max(1, self.graph.tensors[t].bytes) * self.joint.values[t].element_size()
        return most * part, whole * part


def _added(one: list[list[float]] | None, other: list[list[float]]) -> list[list[float]]:
    """The sum of two tables, of which one may not be there yet."""
    if one is None:
        return other
    return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]
