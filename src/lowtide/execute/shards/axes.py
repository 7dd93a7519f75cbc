"""``split_axes``: a step split over a mesh of several axes, planned axis by axis.

Each axis is planned on what the axes before it leave to a device. So the time to plan grows with the number
of axes, and not with the number of devices.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.cost.wire import WireSpeed
from lowtide.graph.access import access
from lowtide.graph.shards import Cut, Mesh, OperatorShare, Shards
from lowtide.plan.make.cheapest import cheapest, cost_of, fastest
from lowtide.trace.shards.kinds import CUT_KINDS, CutKind
from lowtide.trace.shards.prices import TIMES_FORWARD, OperatorTimes, ShardPrices, step_seconds
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
    prices = prices or Prices(links)
    began = time.monotonic()
    done: Shards | None = None
    chosen: list[Shards] = []
    for axis, (size, link) in enumerate(zip(mesh.sizes, prices.links, strict=True)):
        if size == 1:  # nothing to cut, and nobody to talk to
            chosen.append(Shards(Mesh((1,)), {t: (None,) for t in joint.inputs if t is not None}, {}))
            done = _joined(chosen)
            continue
        left = _left(joint, seconds, chosen)
        ways = ShardWays(joint, size, kind, done)
        ways.hold({t: cut[axis] for t, cut in (held or {}).items()})
        by, limit = ShardPrices(ways, left, link), time_limit / len(links)
        if prices.byte_seconds:
            found = cheapest(*by.priced(prices.byte_seconds), limit)
        else:
            found = fastest(by.weighted, by.seconds, limit)
        chosen.append(ways.shards(found.choices))
        done = _joined(chosen)
    planned = time.monotonic() - began
    assert done is not None
    computed = _left(joint, seconds, chosen).values()
    own = [OperatorTimes() for t in joint.inputs if t is not None]
    own += [OperatorTimes(TIMES_FORWARD * one) for one in computed]
    moved = kept = 0.0
    for axis, link in enumerate(links):
        others = [one for k, one in enumerate(chosen) if k != axis]
        ways = ShardWays(joint, mesh.sizes[axis], kind, _joined(others) if others else None)
        ways.settle(chosen[axis])
        by, only = ShardPrices(ways, {}, link), [0] * len(own)
        own = [one + other for one, other in zip(own, by.times(only), strict=True)]
        moved += sum(one.talking for one in ShardPrices(ways, {}, _BYTES).times(only))
        kept = cost_of(only, by.held, {})
    compute, wire = (sum(some) for some in zip(*((one.computing, one.talking) for one in own), strict=True))
    return AxesSplit(done, step_seconds(own), compute, wire, moved, kept, planned)


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
