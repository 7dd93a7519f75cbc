"""What the operators of a captured step take: from the cache, measured, or estimated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowtide.cost import Cost
from lowtide.cost.cache import open_cache
from lowtide.cost.device import Device, cache_folder, load_device, store_device
from lowtide.cost.estimate import estimate
from lowtide.cost.measure import measure
from lowtide.cost.probe import environment, measure_device
from lowtide.cost.signature import signature
from lowtide.cost.watch import Marker
from lowtide.cost.wire import WireEnd, exchanged_bytes, wire_seconds
from lowtide.errors import FileError
from lowtide.graph import Graph, Op
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.memory import allocated_bytes, rounded
from lowtide.plan.program.short_reruns import short_seconds
from lowtide.plan.request import PlanRequest
from lowtide.trace.distributed.wires import wire_ends

__all__ = [
    "MEASURING",
    "costs_of",
    "described",
    "device_of",
    "known_costs",
    "launch_seconds",
    "link_for",
    "link_of",
    "on_their_way",
]

MEASURING = 60.0
"""Seconds in which operators are measured several times; the others are timed once."""
_LATE = 1.15
"""Copies inside of a graph are planned to take this many times as long, so that they end in time: operators
took up to 5% less there than they were measured to take, and copies up to 9% more (1.09 / 0.95)."""


def device_of(graph: Graph) -> str:
    """The kind of device that a step runs on."""
    return "cuda" if any(op.device.startswith("cuda") for op in graph.ops) else "cpu"


def costs_of(
    graph: Graph,
    targets: Sequence[Any],
    kind: str,
    run: Callable[[Marker], object] | None,
    origin: str = "measured",
    time_limit: float = MEASURING,
    guessed: Collection[int] = (),
) -> Costs:
    """What every operator takes: from the cache, else measured while ``run`` runs the step; or estimated.

    The origin ``known`` stands for what the cache has, and estimates of the rest. What is left to measure
    after ``time_limit`` seconds is timed once, as the step runs it. Operators that are ``guessed`` are
    estimated where the cache does not know them. Communications are tried out without other processes: so
    their own seconds are what they compute, and what they wait for follows from how fast their wires are.
    """
    if origin == "known":
        cache = open_cache(cache_folder(), environment(kind))
        kept = [cache.get(signature(graph, k)) for k in range(len(graph.ops))]
        found = tuple(cost for cost in kept if cost is not None)
        if len(found) < len(kept):  # only then: a device is measured in gigabytes
            guesses = estimate(graph, described(kind))
            found = tuple(cost or guess for cost, guess in zip(kept, guesses, strict=True))
    elif origin == "estimated" or run is None:
        found = estimate(graph, described(kind))
    else:
        where = environment(kind)
        cache = open_cache(cache_folder(), where)
        names = [signature(graph, op) for op in range(len(graph.ops))]
        guesses = estimate(graph, described(kind)) if guessed else ()
        for k in guessed:
            cache.assume(names[k], guesses[k])
        known = [cache.get(name) for name in names]
        if all(cost is not None for cost in known):
            found = tuple(cost for cost in known if cost is not None)
        else:
            found = measure(graph, targets, run, cache=cache, time_limit=time_limit, names=names).costs
            with contextlib.suppress(FileError):  # what cannot be kept is measured again next time
                cache.save()
    return _as_costs(graph, found, origin)


def known_costs(graph: Graph) -> Costs | None:
    """What every operator was measured to take before; None where one of them never was."""
    cache = open_cache(cache_folder(), environment(device_of(graph)))
    kept = [cache.get(signature(graph, k)) for k in range(len(graph.ops))]
    found = tuple(cost for cost in kept if cost is not None)
    return None if len(found) < len(kept) else _as_costs(graph, found, "measured")


def _as_costs(graph: Graph, found: Sequence[Cost], origin: str) -> Costs:
    return Costs(
        tuple(_seconds(cost) for cost in found),
        tuple(_workspace(cost) + _scratch(graph, op) for op, cost in zip(graph.ops, found, strict=True)),
        origin,
        short=short_seconds(graph, found),
        wire_seconds=wire_seconds(graph, wire_ends()),
        disturbed=sum(cost.disturbed for cost in found),
        on_their_way=on_their_way(graph, wire_ends()),
    )


def on_their_way(graph: Graph, wires: Mapping[str, WireEnd]) -> dict[int, int]:
    """What exchanges take beside their results while they go on, by operator."""
    return {
        k: sum(rounded(size, graph.tensors[graph.ops[k].inputs[0]].device) for size in parts)
        for k, parts in exchanged_bytes(graph, wires).items()
    }


def described(kind: str) -> Device:
    """The device as it was measured before, or as it is measured now."""
    folder = cache_folder()
    device = load_device(folder, environment(kind))
    if device is None:
        device = measure_device(kind)
        with contextlib.suppress(FileError):
            store_device(folder, device)
    return device


def launch_seconds(kind: str) -> float:
    """What launching an operator takes the host, at least."""
    return described(kind).launch_seconds


def link_of(kind: str) -> Link:
    """How fast copies between the device and the host are, each way."""
    device = described(kind)
    memory = device.bytes_per_second / 2  # of the host itself: each byte is read and written
    return Link(
        to_host=device.from_device_bytes_per_second or memory,
        to_device=device.to_device_bytes_per_second or memory,
        handover=device.handover_seconds or 0.0,
        beside=1 / device.bytes_per_second if kind == "cuda" else 0.0,
    )


def link_for(request: PlanRequest, kind: str, *, graphs: bool) -> Link | None:
    """How copies to the host and back go in a plan that has any; with memory for ``graphs`` or not.

    A step whose parameters leave the device is not replayed.
    """
    if "offload" not in request.methods:
        return None
    link = link_of(kind)
    if not graphs or request.offload:
        return link
    return replace(link, to_host=link.to_host / _LATE, to_device=link.to_device / _LATE, settles=True)


def _seconds(cost: Cost) -> float:
    return float(cost.seconds.value) if cost.seconds else 0.0


def _workspace(cost: Cost) -> int:
    return int(cost.workspace_bytes.value) if cost.workspace_bytes else 0


def _scratch(graph: Graph, op: Op) -> int:
    """What a second run of an operator writes its updates into, which were made the first time."""
    return 0 if op.once else sum(allocated_bytes(graph.tensors[op.inputs[k]]) for k in op.updates)
