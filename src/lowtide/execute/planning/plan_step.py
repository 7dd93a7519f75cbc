"""From a captured step to a Plan: costs, what the device holds, plans that were made before."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Sequence
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
from lowtide.errors import FileError, InfeasibleError, LowtideError
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.host import fits_host, refuse_too_much
from lowtide.execute.memory.optimizer_state import with_state
from lowtide.execute.planning.kept import Kept
from lowtide.execute.planning.other_shapes import NO_OTHERS, OtherShapes
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.graph import Graph, Op, Phase
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan, plain_peak, plan_with
from lowtide.plan.make.other_sizes import best_of, program_of, scaled
from lowtide.plan.make.paused import PausedStep
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.short_reruns import short_seconds
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.step.joint import Joint

__all__ = [
    "costs_of",
    "device_of",
    "link_of",
    "measurable",
    "measured_by",
    "plan_joint",
    "warn_interrupted",
]

_MEASURED_SHARE = 0.8
"""Of the free memory: what measuring may take where the plain step does not fit."""


_MEASURING = 60.0
"""Seconds in which operators are measured several times; the others are timed once."""
_QUICK = 0.5
"""Seconds of a search beside plans for other shapes."""


def warn_interrupted() -> None:
    """Tell that Ctrl-C has ended a search, where there is a plan all the same."""
    warnings.warn("the search was interrupted: the step runs by the best plan so far", stacklevel=3)


def plan_joint(
    joint: Any,
    run: Callable[[Marker], object] | None,
    room: Room,
    request: PlanRequest,
    *,
    state: Sequence[Any] = (),
    pinned: Collection[int] = (),
    smallest: bool = False,
    others: OtherShapes = NO_OTHERS,
) -> Plan:
    """The plan for a captured step; ``run`` runs it once with a marker, to measure what is not known.

    ``state`` is that of the optimiser; ``pinned`` are leaves that cannot leave. With ``smallest`` it is the
    plan with the smallest peak, the same whenever it is asked for. Plans for ``others`` shapes of the step
    make it quick: one of them, or what a short search finds.
    """
    graph: Graph = joint.graph
    device = device_of(graph)
    able = able_in_place(joint)
    targets = [call.target for call in joint.calls]
    relatives = others.of(with_state(graph, state))
    costs = costs_of(graph, targets, device, run, request.cost, 0.0 if relatives else _MEASURING)
    if relatives and costs.origin == "measured":
        known = scaled(relatives[0], with_state(graph, state))
        costs = replace(costs, seconds=known.seconds, short=known.short, origin=known.origin)
    request = _of_training(request, graph)
    graph = with_state(graph, state)
    free = room.free_bytes() if request.budget.auto else None
    link = link_of(device) if "offload" in request.methods else None
    outside = room.outside_bytes()  # after all that was measured: libraries have taken what they keep
    paused = PausedStep.of(graph, costs, able, room.between_bytes) if room.between_bytes else None
    if paused is not None:
        step, graph, costs, able = graph, paused.graph, paused.costs, paused.able
    kept = Kept(graph, able, request, device, DeviceRoom(outside, free, link, pinned))
    plan = kept.load_first() if smallest else kept.load()
    optional = request.auto and not request.offload  # nobody has asked for offload

    def made(asked: PlanRequest) -> Plan:
        usable = link if "offload" in asked.methods else None
        try:
            return make_plan(graph, costs, asked, DeviceRoom(outside, free, usable, pinned), able=able)
        except InfeasibleError as error:
            return kept.first(error) if smallest else kept.smallest(error)

    if plan is None and relatives:
        place = DeviceRoom(outside, free, link, pinned)
        plan = _quick(graph, costs, request, place, able, relatives, settled=others.settled(graph))
        plan = plan if plan is None or fits_host(graph, plan.program) else None
        if plan is not None and not plan.interrupted:
            kept.store(plan)
    if plan is None or (optional and not fits_host(graph, plan.program)):
        plan = made(request)
        if optional and not fits_host(graph, plan.program):
            plan = made(request.without("offload"))
        if plan.interrupted:
            warn_interrupted()
        elif not smallest:
            kept.store(plan)
    refuse_too_much(graph, plan.program)
    return plan if paused is None else _resumed(plan, paused, request, step)


def _resumed(plan: Plan, paused: PausedStep, request: PlanRequest, step: Graph) -> Plan:
    """The plan for a step itself, from one with a pause; by the figures of that plan."""
    asked = replace(request, budget=Budget(bytes=plan.budget_bytes))
    room, program = DeviceRoom(plan.beside_bytes, link=plan.link), paused.without(plan.program)
    costs, able = paused.figures(plan.seconds, plan.workspace_bytes, plan.short, plan.able)
    found = plan_with(
        step,
        replace(costs, origin=plan.cost, disturbed=plan.disturbed),
        program,
        asked,
        room,
        able=able,
        method=plan.method,
    )
    assert found is not None
    return found


def _of_training(request: PlanRequest, graph: Graph) -> PlanRequest:
    """A share is one of a training step; evaluation keeps nothing for backward as it is."""
    forward_only = all(op.phase is Phase.FORWARD for op in graph.ops)
    evaluates = request.budget.share is not None and forward_only
    return replace(request, budget=Budget(share=1.0)) if evaluates else request


def _quick(
    graph: Graph,
    costs: Costs,
    request: PlanRequest,
    room: DeviceRoom,
    able: Collection[int],
    relatives: Sequence[Plan],
    *,
    settled: bool,
) -> Plan | None:
    """One of the plans for other shapes, or what a short search finds where that is faster; None: neither.

    Where it is ``settled`` that the first of them is as good as any, nothing is searched.
    """
    asked = request.without("tile")
    if settled and (found := best_of(relatives[:1], graph, costs, asked, room, able)) is not None:
        return found
    found = best_of(relatives, graph, costs, asked, room, able)
    with contextlib.suppress(InfeasibleError):
        short = asked.within(min(_QUICK, asked.limits.time_limit))
        searched = make_plan(graph, costs, short, room, able=able)
        if found is None or searched.predicted.seconds < found.predicted.seconds:
            return searched
    return found


def device_of(graph: Graph) -> str:
    """The kind of device that a step runs on."""
    return "cuda" if any(op.device.startswith("cuda") for op in graph.ops) else "cpu"


def costs_of(
    graph: Graph,
    targets: Sequence[Any],
    kind: str,
    run: Callable[[Marker], object] | None,
    origin: str = "measured",
    time_limit: float = _MEASURING,
) -> Costs:
    """What every operator takes: from the cache, else measured while ``run`` runs the step; or estimated.

    The origin ``known`` stands for what the cache has, and estimates of the rest. What is left to measure
    after ``time_limit`` seconds is timed once, as the step runs it.
    """
    if origin == "known":
        cache = open_cache(cache_folder(), environment(kind))
        guesses = estimate(graph, _described(kind))
        found = tuple(cache.get(signature(graph, k)) or guess for k, guess in enumerate(guesses))
    elif origin == "estimated" or run is None:
        found = estimate(graph, _described(kind))
    else:
        where = environment(kind)
        cache = open_cache(cache_folder(), where)
        names = [signature(graph, op) for op in range(len(graph.ops))]
        known = [cache.get(name) for name in names]
        if all(cost is not None for cost in known):
            found = tuple(cost for cost in known if cost is not None)
        else:
            found = measure(graph, targets, run, cache=cache, time_limit=time_limit).costs
            with contextlib.suppress(FileError):  # what cannot be kept is measured again next time
                cache.save()
    return Costs(
        tuple(_seconds(cost) for cost in found),
        tuple(_workspace(cost) + _scratch(graph, op) for op, cost in zip(graph.ops, found, strict=True)),
        origin,
        short=short_seconds(graph, found),
        disturbed=sum(cost.disturbed for cost in found),
    )


def measurable(
    graph: Graph, targets: Sequence[Any], kind: str, room: Room, limit: int | None = None
) -> Program | None:
    """A Program to measure a step with: the plain one where it fits, else one planned with estimates.

    It fits into the device, or into ``limit`` bytes of it; the latter is not searched for long.
    """
    plain = store_all(graph)
    free, outside = int(room.free_bytes() * _MEASURED_SHARE), room.outside_bytes()
    free = free if limit is None else min(free, limit)
    if simulate(graph, plain).peak_bytes + outside <= free:
        return plain
    costs = costs_of(graph, targets, kind, None, "estimated")
    with contextlib.suppress(LowtideError):
        asked = PlanRequest(Budget(bytes=free))
        asked = asked if limit is None else asked.within(_QUICK)
        first = make_plan(graph, costs, asked, DeviceRoom(outside))
        if first.interrupted:
            raise KeyboardInterrupt  # there is no plan for the user's budget yet
        return first.program
    return None


def measured_by(
    joint: Joint, room: Room, request: PlanRequest, state: Sequence[Any], others: OtherShapes
) -> Program | None:
    """The Program to measure a step with; where it has run with other shapes, one inside the budget.

    The user trains then, and no new shape may take more than is allowed, nor another way through branches.
    None where none is known to fit.
    """
    graph, targets = with_state(joint.graph, state), [call.target for call in joint.calls]
    kind, plans = device_of(joint.graph), others.of(graph)
    if not others.planned:
        return measurable(joint.graph, targets, kind, room)
    request = _of_training(request, joint.graph)
    outside, able = room.outside_bytes(), able_in_place(joint)
    free = room.free_bytes() if request.budget.auto else None
    found = program_of(plans, graph, request, DeviceRoom(outside, free), able)
    if found is not None:
        return found
    plain = plain_peak(graph, scaled(plans[0], graph) if plans else Costs(()), able) + outside
    return measurable(joint.graph, targets, kind, room, request.budget.resolve(plain, free))


def _described(kind: str) -> Device:
    """The device as it was measured before, or as it is measured now."""
    folder = cache_folder()
    device = load_device(folder, environment(kind))
    if device is None:
        device = measure_device(kind)
        with contextlib.suppress(FileError):
            store_device(folder, device)
    return device


def link_of(kind: str) -> Link:
    """How fast copies between the device and the host are, each way."""
    device = _described(kind)
    memory = device.bytes_per_second / 2  # of the host itself: each byte is read and written
    return Link(
        to_host=device.from_device_bytes_per_second or memory,
        to_device=device.to_device_bytes_per_second or memory,
        handover=device.handover_seconds or 0.0,
        beside=1 / device.bytes_per_second if kind == "cuda" else 0.0,
    )


def _seconds(cost: Cost) -> float:
    return float(cost.seconds.value) if cost.seconds else 0.0


def _workspace(cost: Cost) -> int:
    return int(cost.workspace_bytes.value) if cost.workspace_bytes else 0


def _scratch(graph: Graph, op: Op) -> int:
    """What a second run of an operator writes its updates into, which were made the first time."""
    return 0 if op.once else sum(allocated_bytes(graph.tensors[op.inputs[k]]) for k in op.updates)
