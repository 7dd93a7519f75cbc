"""``split_axes``: a step split over a mesh of several axes, planned axis by axis.

Each axis is planned on what the axes before it leave to a device. So the time to plan grows with the number
of axes, and not with the number of devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.cost.wire import WireSpeed
from lowtide.graph.access import access
from lowtide.graph.shards import Cut, Mesh, OperatorShare, Shards
from lowtide.plan.make.cheapest import cheapest, cost_of, fastest
from lowtide.trace.shards.kinds import CUT_KINDS, CutKind
from lowtide.trace.shards.prices import TIMES_FORWARD, OperatorTimes, ShardPrices, step_seconds
from lowtide.trace.shards.reads import Reads
from lowtide.trace.shards.ways import ShardWays
from lowtide.trace.step.joint import Joint

__all__ = ["AxesSplit", "Prices", "axes_of", "split_axes"]

_LONGEST = 8
"""Devices along an axis, where a number of devices is made into a mesh."""
_BYTES = WireSpeed(1.0, 0.0)
"""With it, what moving takes is how many bytes move."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a split is chosen by."""

    links: Sequence[WireSpeed]
    """Along each axis."""
    byte_seconds: float = 0.0
    """Of a byte that a device holds."""
    beside: bool = False
    """Whether sums of gradients go on beside what later axes leave a device to compute in backward."""


@dataclass(frozen=True, slots=True)
class AxesSplit:
    """A split over several axes, and what a device is predicted to take."""

    shards: Shards
    seconds: float
    """Of a step; sums of gradients go on beside backward, and nothing else does."""
    compute_seconds: float
    """Of the operators, as far as they are split."""
    wire_seconds: float
    """Of all communications."""
    wire_bytes: float
    """That a device gets from others, or sends into sums, in a step."""
    held_bytes: float
    """Of parameters with their gradients, and of results that backward reads."""
    planning_seconds: float


def axes_of(devices: int) -> tuple[int, ...]:
    """The lengths of the axes of a mesh of so many devices, the longest first."""
    found: list[int] = []
    left = devices
    while left > _LONGEST:
        size = next((n for n in range(_LONGEST, 1, -1) if left % n == 0), left)
        found.append(size)
        left //= size
    return tuple(sorted((*found, left) if left > 1 or not found else found, reverse=True))


def split_axes(
    joint: Joint,
    mesh: Mesh,
    seconds: Mapping[int, float],
    links: Sequence[WireSpeed],
    kind: CutKind = CUT_KINDS["any"],
    time_limit: float = 10.0,
    held: Mapping[int, Cut] | None = None,
    prices: Prices | None = None,
) -> AxesSplit:
    """The step split over a mesh; ``links`` connect the devices along each of its axes.

    ``held`` says how tensors are cut that are there already, and ``prices`` what a split is
    chosen by, where that is not what it takes.
    """
    began = time.monotonic()
    task = _Task(joint, mesh, seconds, links, kind, held or {}, Reads(joint.graph))
    if prices is not None:
        best = task.chosen(prices, time_limit)
    elif sum(size > 1 for size in mesh.sizes) < 2:
        best = task.chosen(Prices(links, beside=True), time_limit)
    else:
        both = [task.chosen(one, time_limit) for one in (Prices(links), Prices(links, beside=True))]
        best = min(both, key=lambda some: step_seconds(task.times(some)))
        if not held and not kind.parameters:
            best = task.without_slow_axes(best)
    planned = time.monotonic() - began
    return task.taken(best, planned)


@dataclass(frozen=True, slots=True)
class _Task:
    """What is split."""

    joint: Joint
    mesh: Mesh
    seconds: Mapping[int, float]
    links: Sequence[WireSpeed]
    kind: CutKind
    held: Mapping[int, Cut]
    reads: Reads

    def chosen(self, prices: Prices, time_limit: float) -> list[Shards]:
        """The split along each axis, given those before."""
        found: list[Shards] = []
        for axis, (size, link) in enumerate(zip(self.mesh.sizes, prices.links, strict=True)):
            if size == 1:  # nothing to cut, and nobody to talk to
                found.append(self.whole(1))
                continue
            later = math.prod(self.mesh.sizes[axis + 1 :]) if prices.beside else 1
            left = {k: one / later for k, one in _left(self.joint, self.seconds, found).items()}
            ways = ShardWays(self.joint, size, self.kind, _joined(found) if found else None, self.reads)
            ways.hold({t: cut[axis] for t, cut in self.held.items()})
            by, limit = ShardPrices(ways, left, link), time_limit / len(self.links)
            if prices.beside:
                choices = fastest(by.weighted, by.seconds, limit).choices
            else:
                choices = cheapest(*by.priced(prices.byte_seconds), limit).choices
            found.append(ways.shards(choices))
        return found

    def whole(self, size: int) -> Shards:
        """An axis along which all devices do the same."""
        return Shards(Mesh((size,)), {t: (None,) for t in self.joint.inputs if t is not None}, {})

    def without_slow_axes(self, some: list[Shards]) -> list[Shards]:
        """The same without axes that make it slower: each was chosen by what those before it leave."""
        best = step_seconds(self.times(some))
        for axis, size in enumerate(self.mesh.sizes):
            other = [*some[:axis], self.whole(size), *some[axis + 1 :]]
            taken = step_seconds(self.times(other))
            if taken < best:
                some, best = other, taken
        return some

    def settled(self, some: Sequence[Shards]) -> Iterator[ShardWays]:
        """The ways along each axis, of which the others leave one."""
        for axis, one in enumerate(some):
            others = [other for k, other in enumerate(some) if k != axis]
            before = _joined(others) if others else None
            ways = ShardWays(self.joint, one.mesh.devices, self.kind, before, self.reads)
            ways.settle(one)
            yield ways

    def times(self, some: Sequence[Shards]) -> list[OperatorTimes]:
        """What each input and each operator is predicted to take of a device."""
        found = [OperatorTimes() for t in self.joint.inputs if t is not None]
        computed = _left(self.joint, self.seconds, some).values()
        found += [OperatorTimes(TIMES_FORWARD * one) for one in computed]
        for ways, link in zip(self.settled(some), self.links, strict=True):
            more = ShardPrices(ways, {}, link).times([0] * len(found))
            found = [one + other for one, other in zip(found, more, strict=True)]
        return found

    def taken(self, some: Sequence[Shards], planning_seconds: float) -> AxesSplit:
        """What a device is predicted to take."""
        times, moved, kept = self.times(some), 0.0, 0.0
        for ways in self.settled(some):
            by, only = ShardPrices(ways, {}, _BYTES), [0] * len(times)
            moved += sum(one.talking for one in by.times(only))
            kept = cost_of(only, by.held, {})
        return AxesSplit(
            _joined(some),
            step_seconds(times),
            sum(one.computing for one in times),
            sum(one.talking for one in times),
            moved,
            kept,
            planning_seconds,
        )


def _joined(some: Sequence[Shards]) -> Shards:
    """One split over several axes."""
    none = OperatorShare((None,), (None,))
    numbers = {k for one in some for k in one.operators}
    shares = {
        k: OperatorShare(
            tuple(one.operators.get(k, none).cut[0] for one in some),
            tuple(one.operators.get(k, none).over[0] for one in some),
        )
        for k in numbers
    }
    leaves = {t: tuple(one.leaves[t][0] for one in some) for t in some[0].leaves}
    return Shards(Mesh(tuple(one.mesh.devices for one in some)), leaves, shares)


def _left(joint: Joint, seconds: Mapping[int, float], some: Sequence[Shards]) -> dict[int, float]:
    """What operators of forward take on a device that is split so."""
    found: dict[int, float] = {}
    graph = joint.graph
    for k, op in enumerate(graph.ops):
        if op.phase.value != "forward":
            continue
        found[k] = seconds.get(k, 0.0)
        for one in some:
            share = one.operators.get(k)
            if share is None:
                continue
            if share.over[0] is not None:
                length = access(graph, op).relations[0].sums[share.over[0]]
            else:
                length = (graph.tensors[op.outputs[0]].shape or ())[share.cut[0] or 0]
            found[k] *= -(-length // one.mesh.devices) / length
    return found
