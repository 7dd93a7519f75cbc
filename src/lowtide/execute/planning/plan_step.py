"""From a captured step to a Plan: costs, what the device holds, plans that were made before."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lowtide.cost import Cost
from lowtide.cost.cache import open_cache
from lowtide.cost.device import Device, cache_folder, load_device, store_device
from lowtide.cost.estimate import estimate
from lowtide.cost.measure import measure
from lowtide.cost.probe import environment, measure_device
from lowtide.cost.signature import signature
from lowtide.cost.watch import Marker
from lowtide.documents import read_document, write_document
from lowtide.errors import FileError, InfeasibleError, LowtideError
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.host import fits_host, refuse_too_much
from lowtide.execute.memory.optimizer_state import with_state
from lowtide.execute.runtime.fits import refuse_invalid
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.graph import Graph, Op, Phase
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.short_reruns import short_seconds
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.validate import valid_plan
from lowtide.trace.step.joint import Joint

__all__ = [
    "Kept",
    "costs_of",
    "device_of",
    "link_of",
    "measurable",
    "plan_joint",
    "warn_interrupted",
]

_MEASURED_SHARE = 0.8
"""Of the free memory: what measuring may take where the plain step does not fit."""


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
) -> Plan:
    """The plan for a captured step; ``run`` runs it once with a marker, to measure what is not known.

    ``state`` is that of the optimiser; ``pinned`` are leaves that cannot leave. With ``smallest`` it is the
    plan with the smallest peak, the same whenever it is asked for.
    """
    graph: Graph = joint.graph
    device = device_of(graph)
    able = able_in_place(joint)
    targets = [call.target for call in joint.calls]
    costs = costs_of(graph, targets, device, run, request.cost)
    if request.budget.share is not None and all(op.phase is Phase.FORWARD for op in graph.ops):
        # a share is one of a training step; evaluation keeps nothing for backward as it is
        request = replace(request, budget=Budget(share=1.0))
    graph = with_state(graph, state)
    free = room.free_bytes() if request.budget.auto else None
    link = link_of(device) if "offload" in request.methods else None
    outside = room.outside_bytes()  # after all that was measured: libraries have taken what they keep
    kept = Kept(graph, able, request, device, DeviceRoom(outside, free, link, pinned))
    plan = kept.load_first() if smallest else kept.load()
    optional = request.auto and not request.offload  # nobody has asked for offload

    def made(asked: PlanRequest) -> Plan:
        usable = link if "offload" in asked.methods else None
        try:
            return make_plan(graph, costs, asked, DeviceRoom(outside, free, usable, pinned), able=able)
        except InfeasibleError as error:
            return kept.first(error) if smallest else kept.smallest(error)

    if plan is None or (optional and not fits_host(graph, plan.program)):
        plan = made(request)
        if optional and not fits_host(graph, plan.program):
            plan = made(request.without("offload"))
        if plan.interrupted:
            warn_interrupted()
        elif not smallest:
            kept.store(plan)
    refuse_too_much(graph, plan.program)
    return plan


def device_of(graph: Graph) -> str:
    """The kind of device that a step runs on."""
    return "cuda" if any(op.device.startswith("cuda") for op in graph.ops) else "cpu"


def costs_of(
    graph: Graph,
    targets: Sequence[Any],
    kind: str,
    run: Callable[[Marker], object] | None,
    origin: str = "measured",
    time_limit: float = 60.0,
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


def measurable(graph: Graph, targets: Sequence[Any], kind: str, room: Room) -> Program | None:
    """A Program to measure a step with: the plain one where it fits, else one planned with estimates."""
    plain = store_all(graph)
    free, outside = int(room.free_bytes() * _MEASURED_SHARE), room.outside_bytes()
    if simulate(graph, plain).peak_bytes + outside <= free:
        return plain
    costs = costs_of(graph, targets, kind, None, "estimated")
    with contextlib.suppress(LowtideError):
        first = make_plan(graph, costs, PlanRequest(Budget(bytes=free)), DeviceRoom(outside))
        if first.interrupted:
            raise KeyboardInterrupt  # there is no plan for the user's budget yet
        return first.program
    return None


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


class Kept:
    """A plan that was made before for the same step, device, versions and budget, if it still holds."""

    def __init__(
        self,
        graph: Graph,
        able: frozenset[int],
        request: PlanRequest,
        kind: str,
        room: DeviceRoom,
        whole: Callable[[Plan], Joint] | None = None,
        state: Sequence[Any] = (),
    ) -> None:
        """``whole`` gives the step that a plan in tiles is for, made from the same step.

        ``state`` is that of an optimiser.
        """
        outside, free = room.outside_bytes, room.free_bytes
        self.whole, self.state = whole, state
        self.graph, self.able, self.outside, self.free = graph, able, outside, free
        self.budget, self.offload = request.budget, request.offload
        self.wanted = request.cache
        step = [
            repr((request.methods, request.auto, request.cost)),
            repr(sorted(able)),
            environment(kind).key,
            str(outside),
            repr(request.offload),
            str(request.crossing),
            repr(sorted(room.pinned)),
            str(whole is not None),
        ]
        asked = repr((request.budget, request.limits.time_limit, request.limits.seed, free))
        encoded = msgspec.json.encode(graph)
        self.name = _file_name("plan", encoded, [asked, *step])
        self.smallest_name = _file_name("smallest", encoded, step)
        self.first_name = _file_name("first", encoded, [repr(request.limits.time_limit), *step])

    def load(self) -> Plan | None:
        """The plan, or None where there is none, or where it is damaged, not valid, or for something else."""
        plan = self._read(self.name)
        with contextlib.suppress(LowtideError):
            if plan is not None and self._asked_for(plan) and self._fits(plan):
                return plan
        return None

    def smallest(self, error: InfeasibleError) -> Plan:
        """The plan with the smallest peak, where it keeps the budget; else the error, which has that plan.

        It is kept: a budget that an error has named works, however little a search finds the next time.
        """
        known, found = self._read(self.smallest_name), error.plan
        if known is not None and not (self._fits(known) and set(known.offload) <= set(self.offload)):
            known = None
        if isinstance(found, Plan) and (known is None or _peak(found) < _peak(known)):
            known = found
            self._write(self.smallest_name, found)
        error.plan = known
        size = self.budget.resolve(error.plain_peak, self.free)
        if known is None or _peak(known) > size:
            raise error
        return msgspec.structs.replace(known, budget_bytes=size)

    def load_first(self) -> Plan | None:
        """The plan with the smallest peak that was found first, in as much time."""
        plan = self._read(self.first_name)
        return plan if plan is not None and self._fits(plan) else None

    def first(self, error: InfeasibleError) -> Plan:
        """The plan with the smallest peak, which is kept; else the error."""
        if not isinstance(error.plan, Plan):
            raise error
        self._write(self.first_name, error.plan)
        return error.plan

    def _read(self, name: str) -> Plan | None:
        """A valid plan for this step and device."""
        if not self.wanted:
            return None
        with contextlib.suppress(LowtideError):
            plan = read_document(cache_folder() / "plans" / name, Plan)
            if plan.beside_bytes == self.outside and not plan.interrupted:
                valid_plan(plan)
                return plan
        return None

    def _asked_for(self, plan: Plan) -> bool:
        """Whether a plan keeps the budget that is asked for now, with leaves away that may leave."""
        size = self.budget.resolve(plan.plain.peak_bytes, self.free)
        return plan.budget_bytes == size and set(plan.offload) <= set(self.offload)

    def _fits(self, plan: Plan) -> bool:
        """Whether a valid plan is for this step; in tiles that is looked at once it is cut as planned."""
        if self.whole is None:
            return plan.graph == self.graph and set(plan.able) <= self.able
        joint = self.whole(plan)
        refuse_invalid(joint, plan.program, self.state)
        return plan.graph == with_state(joint.graph, self.state)

    def store(self, plan: Plan) -> None:
        """Keep the plan, but none from times that a busy machine disturbed: they are measured again."""
        if not plan.disturbed:
            self._write(self.name, plan)

    def _write(self, name: str, plan: Plan) -> None:
        """Write a plan, whole or not at all; a folder that cannot be written is no reason to fail."""
        if not self.wanted:
            return
        with contextlib.suppress(LowtideError, OSError):
            path = cache_folder() / "plans" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_document(path, plan)


def _peak(plan: Plan) -> int:
    return plan.predicted.peak_bytes


def _file_name(kind: str, graph: bytes, parts: Sequence[str]) -> str:
    digest = hashlib.sha256(graph + "\0".join(parts).encode())
    return f"{kind}-{digest.hexdigest()[:32]}.json"
