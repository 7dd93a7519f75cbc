"""How operators and inputs of a step can be split over devices along one axis, and what each way takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.graph import Op, Phase, Rect
from lowtide.graph.access import Relation, access
from lowtide.graph.shards import Mesh, OperatorShare, Shards, box_of
from lowtide.trace.operators import adds_up, supported
from lowtide.trace.shards.batch_norm import BATCH_NORMS
from lowtide.trace.step.joint import Joint

__all__ = ["ShardWays", "WireSpeed"]

_BACKWARD = 2.0
"""Backward takes so many times as long as forward."""
_KEPT = 1e-15
"""Seconds for a byte that a device holds: of two ways that take as long, the smaller one is taken."""
_RANKS = 8
"""Along longer axes, what devices do is looked at for the first and last ones alone."""


@dataclass(frozen=True, slots=True)
class WireSpeed:
    """How fast devices exchange bytes."""

    bytes_per_second: float = 1e9
    latency: float = 5e-5

    def seconds(self, moved: float) -> float:
        """That a message takes."""
        return self.latency + moved / self.bytes_per_second if moved else 0.0


class ShardWays:
    """The choices for one axis of devices: for each input of the step, then for each operator of forward."""

    def __init__(
        self,
        joint: Joint,
        devices: int,
        seconds: Mapping[int, float],
        link: WireSpeed,
        dims: Sequence[int] | None = None,
    ) -> None:
        """``seconds`` is what operators take on one device; with ``dims`` nothing else is cut."""
        self.joint, self.graph, self.mesh = joint, joint.graph, Mesh((devices,))
        self._seconds, self._link, self._dims = seconds, link, dims
        ops = enumerate(joint.graph.ops)
        self.operators = [(k, op) for k, op in ops if op.phase is Phase.FORWARD]
        self.inputs = [t for t in joint.inputs if t is not None]
        self.cuts: list[list[int | None]] = [self._cuts(t) for t in self.inputs]
        """Of each input."""
        self.shares: list[list[OperatorShare]] = [self._shares(op) for _, op in self.operators]
        """Of each operator."""
        self._maker = {t: k for k, (_, op) in enumerate(self.operators) for t in op.outputs}

    def shards(self, choices: Sequence[int]) -> Shards:
        """What choices mean."""
        count = len(self.inputs)
        leaves = {t: (self.cuts[k][choices[k]],) for k, t in enumerate(self.inputs)}
        shares = {number: self.shares[k][choices[count + k]] for k, (number, _) in enumerate(self.operators)}
        return Shards(self.mesh, leaves, {k: one for k, one in shares.items() if one.shared(0)})

    @cached_property
    def alone(self) -> list[list[float]]:
        """What each choice takes by itself."""
        found = [
            [_KEPT * self._bytes(t, cut) for cut in cuts]
            for t, cuts in zip(self.inputs, self.cuts, strict=True)
        ]
        for (number, op), shares in zip(self.operators, self.shares, strict=True):
            found.append([self._operator(number, op, share) for share in shares])
        return found

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[list[float]]]:
        """What two choices take together: bytes that must move."""
        found: dict[tuple[int, int], list[list[float]]] = {}
        count = len(self.inputs)
        for k, (_, op) in enumerate(self.operators):
            for place, t in enumerate(op.inputs):
                made = self._maker.get(t)
                if made is None and t not in self.inputs:
                    continue
                before = self.inputs.index(t) if made is None else count + made
                cuts = self.cuts[before] if made is None else [one.cut[0] for one in self.shares[made]]
                costs = [[self._moving(op, place, t, cut, share) for share in self.shares[k]] for cut in cuts]
                pair = before, count + k
                if pair in found:
                    costs = [
                        [a + b for a, b in zip(one, two, strict=True)]
                        for one, two in zip(found[pair], costs, strict=True)
                    ]
                found[pair] = costs
        return found

    def _shape(self, t: int) -> tuple[int, ...]:
        return self.graph.tensors[t].shape or ()

    def _cuts(self, t: int) -> list[int | None]:
        shape = self._shape(t)
        if t in self._statistics:
            return [None]
        able = [d for d, size in enumerate(shape) if size >= self.mesh.devices]
        return [None, *(d for d in able if self._dims is None or d in self._dims)]

    @cached_property
    def _statistics(self) -> set[int]:
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
        if adds_up(op):
            lengths = enumerate(relation.sums)
            shares += [OperatorShare((None,), (j,)) for j, size in lengths if size >= self.mesh.devices]
        return [whole, *shares]

    def _can(self, op: Op, dim: int) -> bool:
        """Whether all devices can compute their part of the results."""
        if op.kind in BATCH_NORMS:
            return dim != 1  # every device has the running statistics of all channels
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
        size = self.graph.tensors[t].bytes
        return size if cut is None else size / self.mesh.devices

    def _operator(self, number: int, op: Op, share: OperatorShare) -> float:
        """What an operator takes, forward and backward, with the sum that ends it."""
        seconds = (1 + _BACKWARD) * self._seconds.get(number, 0.0)
        seconds /= self.mesh.devices if share.shared(0) else 1
        kept = sum(self._bytes(t, share.cut[0]) for t in op.outputs)
        summed = self._reduced(kept) if share.over[0] is not None else 0.0
        if op.kind in BATCH_NORMS and share.cut[0] is not None:
            summed += 4 * self._reduced(4.0 * self._shape(op.outputs[0])[1])
        return seconds + summed + _KEPT * kept

    def _reduced(self, size: float) -> float:
        """Seconds of a sum over all devices."""
        count = self.mesh.devices
        return self._link.seconds(2 * size * (count - 1) / count)

    def _moving(self, op: Op, place: int, t: int, cut: int | None, share: OperatorShare) -> float:
        """Seconds until an operator has what it reads of an input, and for the gradient on its way back."""
        relation = access(self.graph, op).relations[0]
        if relation.inputs[place] is None:
            return 0.0
        gradient = self.joint.values[t].is_floating_point()
        if cut is None:
            return self._reduced(self.graph.tensors[t].bytes) if share.shared(0) and gradient else 0.0
        moved = self._link.seconds(self._received(op, place, t, cut, share, relation))
        return moved * (2 if gradient and share.shared(0) else 1)

    def _received(
        self, op: Op, place: int, t: int, cut: int, share: OperatorShare, relation: Relation
    ) -> float:
        """Bytes that a device gets from others, at most."""
        shape, mesh = self._shape(t), self.mesh
        if not share.shared(0):
            return self.graph.tensors[t].bytes * (mesh.devices - 1) / mesh.devices
        most = 0
        for rank in self._ranks:
            if op.kind in BATCH_NORMS:
                need: Rect | None = box_of(self._shape(op.outputs[0]), share.cut, mesh, rank)
            else:
                over = None if share.over[0] is None else box_of(relation.sums, share.over, mesh, rank)
                need = relation.needs(box_of(relation.shape, share.cut, mesh, rank), over)[place]
            held = box_of(shape, (cut,), mesh, rank)
            if need is None or need.empty:
                continue
            most = max(most, need.size - need.intersect(held).size)
        return most * self.joint.values[t].element_size()
