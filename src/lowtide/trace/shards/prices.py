"""What the choices of ``ShardWays`` take, by estimated times of operators and the speed of a link.

Operators compute, and devices talk. Forward and backward wait for what they exchange, and for sums that
somebody reads. Sums of the gradients of parameters are read by nobody before backward ends: they go on beside
it, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from lowtide.cost.wire import WireSpeed
from lowtide.graph import Op, Role
from lowtide.graph.shards import OperatorShare
from lowtide.trace.shards.batch_norm import BATCH_NORMS
from lowtide.trace.shards.reads import Needs
from lowtide.trace.shards.ways import ShardWays

__all__ = ["TIMES_FORWARD", "OperatorTimes", "ShardPrices", "step_seconds"]

TIMES_FORWARD = 3.0
"""What a step computes takes so many times as long as its forward."""
_KEPT = 1e-15
"""Seconds for a byte that a device holds: of two ways that take as long, the smaller one is taken."""

Addable = TypeVar("Addable", float, "OperatorTimes")
Table = dict[tuple[int, int], list[list[float]]]
"""By two choices."""


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Seconds of an operator of forward, with its part of backward."""

    computing: float = 0.0
    forward: float = 0.0
    """Of communications that forward waits for."""
    backward: float = 0.0
    """The same of backward."""
    gradients: float = 0.0
    """Of sums that go on beside backward."""

    @property
    def talking(self) -> float:
        """Of all communications."""
        return self.forward + self.backward + self.gradients

    def __add__(self, other: OperatorTimes) -> OperatorTimes:
        return OperatorTimes(
            self.computing + other.computing,
            self.forward + other.forward,
            self.backward + other.backward,
            self.gradients + other.gradients,
        )


_NOTHING = OperatorTimes()


def step_seconds(times: Sequence[OperatorTimes]) -> float:
    """What a step takes whose communications have a lane of their own, first in, first out."""
    now = sum(one.computing / TIMES_FORWARD + one.forward for one in times)
    lane = now
    for one in reversed(times):
        if one.backward:
            now = lane = max(now, lane) + one.backward
        now += one.computing * (1 - 1 / TIMES_FORWARD)
        if one.gradients:
            lane = max(now, lane) + one.gradients
    return max(now, lane)


class ShardPrices:
    """What each choice takes, alone and with another one."""

    def __init__(self, ways: ShardWays, seconds: Mapping[int, float], link: WireSpeed) -> None:
        """``seconds`` is what operators take on one device."""
        self.ways, self._seconds, self._link = ways, seconds, link

    def weighted(self, computing: float = 1.0, gradients: float = 1.0) -> tuple[list[list[float]], Table]:
        """What each choice takes, and what two take together; infinite where they do not go together.

        ``computing`` and ``gradients`` say how much these count: computing, and sums beside it.
        """

        def seconds(one: OperatorTimes) -> float:
            waits = one.forward + one.backward
            return computing * one.computing + waits + (gradients * one.gradients if one.gradients else 0.0)

        alone = [[seconds(one) for one in some] for some in self._own]
        return alone, {
            pair: [[seconds(one) for one in some] for some in table] for pair, table in self._edges[0].items()
        }

    def priced(self, byte_seconds: float) -> tuple[list[list[float]], Table]:
        """Both, with seconds for every byte that a device holds."""
        alone, pairs = self.weighted()
        rows = zip(alone, self.held, strict=True)
        return [[cost + byte_seconds * size for cost, size in zip(*row, strict=True)] for row in rows], pairs

    @property
    def copied(self) -> Table:
        """Bytes of what a device brings together from others and keeps for backward, by two choices."""
        return self._edges[1]

    def times(self, choices: Sequence[int]) -> list[OperatorTimes]:
        """What some choices take: for each input, then for each operator of forward."""
        found = [some[k] for some, k in zip(self._own, choices, strict=True)]
        for (a, b), table in self._edges[0].items():
            found[b] += table[choices[a]][choices[b]]
        return found

    def seconds(self, choices: Sequence[int]) -> float:
        """What a step takes by some choices."""
        return step_seconds(self.times(choices))

    @cached_property
    def _own(self) -> list[list[OperatorTimes]]:
        pairs = zip(self.ways.inputs, self.ways.cuts, strict=True)
        found = [[OperatorTimes(forward=_KEPT * self._bytes(t, cut)) for cut in cuts] for t, cuts in pairs]
        for (number, op), shares in zip(self.ways.operators, self.ways.shares, strict=True):
            found.append([self._operator(number, op, share) for share in shares])
        return found

    @cached_property
    def _edges(self) -> tuple[dict[tuple[int, int], list[list[OperatorTimes]]], Table]:
        """What moves, and the bytes that are kept of it."""
        ways = self.ways
        moved: dict[tuple[int, int], list[list[OperatorTimes]]] = {}
        kept: Table = {}
        count, place_of = len(ways.inputs), {t: k for k, t in enumerate(ways.inputs)}
        for k, (_, op) in enumerate(ways.operators):
            results = self._relations(op)
            for place, t in enumerate(op.inputs):
                made = ways.maker.get(t) if t not in place_of else None
                before = place_of.get(t) if made is None else count + made
                if before is None:
                    continue
                cuts = ways.cuts[before] if made is None else [one.cut[0] for one in ways.shares[made]]
                pair = before, count + k
                for result in results:
                    times, sizes = self._edge(op, place, t, cuts, ways.shares[k], result)
                    moved[pair] = _added(moved.get(pair), times)
                    kept[pair] = _added(kept.get(pair), sizes)
        talking = [pair for pair, table in moved.items() if any(one.talking for row in table for one in row)]
        return {pair: moved[pair] for pair in talking}, {pair: kept[pair] for pair in talking}

    @cached_property
    def held(self) -> list[list[float]]:
        """Bytes that a device holds by each choice, without what is exchanged.

        Parameters with their gradients, and results that backward reads.
        """
        graph, pairs = self.ways.graph, zip(self.ways.inputs, self.ways.cuts, strict=True)
        joint = self.ways.joint
        trained = {t for t, g in zip(joint.inputs, joint.gradients, strict=False) if g is not None}
        found = [[(1 + (t in trained)) * self._bytes(t, cut) for cut in cuts] for t, cuts in pairs]
        for (_, op), shares in zip(self.ways.operators, self.ways.shares, strict=True):
            kept = [t for t in op.outputs if t in self._saved and graph.tensors[t].alias is None]
            found.append([sum(self._bytes(t, share.cut[0]) for t in kept) for share in shares])
        return found

    @cached_property
    def _saved(self) -> set[int]:
        """Storages of forward that backward reads."""
        storage = self.ways.graph.storages()
        return {storage[t] for t in self.ways.graph.saved_for_backward()} | set(self.ways.inputs)

    def _size(self, t: int) -> float:
        """Bytes of a tensor on a device, before this axis cuts it."""
        size = float(self.ways.graph.tensors[t].bytes)
        for count, _ in self.ways.cut_before(t):
            size /= count
        return size

    def _relations(self, op: Op) -> list[int]:
        """Of the results that somebody reads, each with its own part of the inputs; of one at least."""
        count = len(self.ways.reads.relations(op))
        if op.kind in BATCH_NORMS or not count:
            return list(range(count))[:1]
        return [k for k, t in enumerate(op.outputs) if t in self.ways.read] or [0]

    @cached_property
    def _kept_by(self) -> dict[str, set[int]]:
        """Storages that the backward of an operator reads, by operator."""
        found: dict[str, set[int]] = {}
        for op in self.ways.graph.ops:
            if op.differentiates:
                found.setdefault(op.differentiates, set()).update(self.ways.storage[t] for t in op.reads)
        return found

    def _bytes(self, t: int, cut: int | None) -> float:
        """Of the largest part."""
        size, shape = self._size(t), self.ways.left(t)
        return size if cut is None or cut >= len(shape) else size * self._part(shape[cut])

    def _part(self, length: int) -> float:
        """The share of the device that has most of a dimension."""
        return -(-length // self.ways.mesh.devices) / length if length else 1.0

    def _operator(self, number: int, op: Op, share: OperatorShare) -> OperatorTimes:
        """What an operator takes, forward and backward, with the sum that ends it."""
        ways = self.ways
        seconds = TIMES_FORWARD * self._seconds.get(number, 0.0)
        if share.over[0] is not None:
            seconds *= self._part(ways.reads.relations(op)[0].sums[share.over[0]])
        elif share.cut[0] is not None:
            seconds *= self._part(ways.left(op.outputs[0])[share.cut[0]])
        kept = sum(self._bytes(t, share.cut[0]) for t in op.outputs)
        forward, backward = _KEPT * kept, 0.0
        if share.over[0] is not None and share.cut[0] is None:
            forward += self._reduced(kept)
        elif share.over[0] is not None:  # scattered, and the gradient gathered
            backward += self._link.seconds(kept * (ways.mesh.devices - 1))
            forward += backward
        if op.kind in BATCH_NORMS and share.cut[0] not in (None, 1):
            each = 2 * self._reduced(4.0 * ways.shape(op.outputs[0])[1])
            forward, backward = forward + each, backward + each
        return OperatorTimes(seconds, forward, backward)

    def _reduced(self, size: float) -> float:
        """Seconds of a sum over all devices."""
        return self._link.sum_seconds(size, self.ways.mesh.devices)

    def _edge(
        self,
        op: Op,
        place: int,
        t: int,
        cuts: list[int | None],
        shares: list[OperatorShare],
        result: int,
    ) -> tuple[list[list[OperatorTimes]], list[list[float]]]:
        """Seconds for what an operator reads of an input and for its gradient on the way back; bytes."""
        found = [[_NOTHING] * len(shares) for _ in cuts]
        sizes = [[0.0] * len(shares) for _ in cuts]
        gradient, owner = t in self.ways.differentiable, self.ways.graph.tensors[self.ways.storage[t]]
        saved = self.ways.storage[t] in self._kept_by.get(op.id, ())
        updated = place in op.updates and op.kind in BATCH_NORMS
        if self.ways.reads.relations(op)[result].inputs[place] is None and not updated:
            return found, sizes
        for k, share in enumerate(shares):
            needs: Needs = []
            if share.shared(0) and any(cut is not None for cut in cuts):
                needs = self.ways.reads.of(op, result, share, self.ways.mesh, self.ways.ranks)[place]
            for c, cut in enumerate(cuts):
                if updated:
                    if (cut is None) == (share.cut[0] == 1):
                        found[c][k] = OperatorTimes(forward=math.inf)
                elif cut is None:
                    summed = self._reduced(self._size(t)) if share.shared(0) and gradient else 0.0
                    if summed:
                        goes_on = owner.role is Role.PARAMETER
                        found[c][k] = OperatorTimes(**{"gradients" if goes_on else "backward": summed})
                else:
                    received, whole = self._received(t, cut, share, needs)
                    if received and any(dim == cut for _, dim in self.ways.cut_before(t)):
                        whole = self._size(t)  # first all that other axes leave comes together
                        received = whole * (self.ways.mesh.devices - 1) / self.ways.mesh.devices
                    moved = self._link.seconds(received)
                    if moved:
                        back = moved if gradient and share.shared(0) else 0.0
                        found[c][k] = OperatorTimes(forward=moved, backward=back)
                    sizes[c][k] = whole if received and saved else 0.0
        return found, sizes

    def _received(self, t: int, cut: int, share: OperatorShare, needs: Needs) -> tuple[float, float]:
        """Bytes that a device gets from others, at most, and of all that it then has."""
        count, graph = self.ways.mesh.devices, self.ways.graph
        if not share.shared(0):
            return self._size(t) * (count - 1) / count, self._size(t)
        most, whole, length = 0, 0, self.ways.shape(t)[cut]
        for rank, need in needs:
            lo, hi = need.lo[cut], need.hi[cut]
            first, end = length * rank // count, length * (rank + 1) // count
            missing = (hi - lo) - max(0, min(hi, end) - max(lo, first))
            most, whole = max(most, need.size // (hi - lo) * missing), max(whole, need.size)
        share_before = self._size(t) / max(1, graph.tensors[t].bytes)
        part = share_before * self.ways.joint.values[t].element_size()
        return most * part, whole * part


def _added(one: list[list[Addable]] | None, other: list[list[Addable]]) -> list[list[Addable]]:
    """The sum of two tables, of which one may not be there yet."""
    if one is None:
        return other
    return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]
