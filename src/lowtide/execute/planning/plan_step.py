"""From a captured step to a Plan: costs, what the device holds, plans that were made before."""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from lowtide.errors import FileError, LowtideError, PlanError
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.host import fits_host, refuse_too_much
from lowtide.execute.memory.optimizer_state import check_optimizer, with_state
from lowtide.execute.runtime.fits import refuse_invalid
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.graph import Graph, Phase
from lowtide.plan.budget import Budget, parse_budget
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.make.search import Progress
from lowtide.plan.offload.parameters import parse_offload
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.short_reruns import short_seconds
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.validate import valid_plan
from lowtide.suggest import did_you_mean
from lowtide.trace.step.joint import Joint

__all__ = [
    "MEANS",
    "Kept",
    "Settings",
    "costs_of",
    "device_of",
    "link_of",
    "measurable",
    "plan_joint",
    "usual_means",
    "warn_interrupted",
]

_MEASURED_SHARE = 0.8
"""Of the free memory: what measuring may take where the plain step does not fit."""
MEANS = ("recompute", "offload", "tile")
AUTO = "auto"
ORIGINS = ("measured", "estimated")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may ask of a plan."""

    budget: Budget
    only: tuple[str, ...] = ("recompute",)
    cost: str = "measured"
    time_limit: float = 10.0
    seed: int = 0
    cache: bool = True
    progress: Progress | None = None
    offload: tuple[str, ...] = ()
    """What may leave the device besides activations."""
    optimizer: Any = None
    crossing: bool = False
    """Whether leaves may be away between forward and backward."""
    auto: bool = False
    """Whether means are chosen here: what leaves all bits as they are, and tiles where nothing else fits."""

    @classmethod
    def of(cls, budget: str | int | Budget, **options: Any) -> Settings:
        """Settings from what users write; a PlanError names what is wrong."""
        only = options.pop("only", AUTO)
        options["auto"] = only in (AUTO, (AUTO,), [AUTO])
        only = "recompute" if options["auto"] else only
        listed = only.split(",") if isinstance(only, str) else only
        chosen = tuple(listed) if isinstance(listed, list | tuple | set | frozenset) else (listed,)
        for means in chosen:
            if means not in MEANS:
                near = did_you_mean(str(means), MEANS)
                raise PlanError(f"there is no means {means!r}; known: {', '.join(MEANS)}, or auto.{near}")
        if set(chosen) == {"tile"}:
            raise PlanError("only='tile': tiles are planned beside another means, as in recompute,tile")
        options["offload"] = parse_offload(options.get("offload", ()))
        check_optimizer(options.get("optimizer"), options["offload"])
        if options["offload"] and "offload" not in chosen:
            chosen = (*chosen, "offload")
        cost = options.get("cost", "measured")
        if cost not in ORIGINS:
            near = did_you_mean(str(cost), ORIGINS)
            raise PlanError(f"costs are {' or '.join(ORIGINS)}, not {cost!r}.{near}")
        limit, seed = options.get("time_limit", 10.0), options.get("seed", 0)
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 <= limit < math.inf:
            raise PlanError(f"time_limit={limit!r}: how long to search is a number of seconds")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= 2**48:
            raise PlanError(f"seed={seed!r}: a seed is a whole number from 0 to {2**48}")
        return cls(parse_budget(budget), chosen, **options)

    def on(self, device: str) -> Settings:
        """The same with means chosen for a kind of device, where that is left to us."""
        if not self.auto:
            return self
        return replace(self, only=tuple(dict.fromkeys([*self.only, *usual_means(device), "tile"])))


def warn_interrupted() -> None:
    """Tell that Ctrl-C has ended a search, where there is a plan all the same."""
    warnings.warn("the search was interrupted: the step runs by the best plan so far", stacklevel=3)


def usual_means(device: str) -> tuple[str, ...]:
    """What leaves all bits as they are and may help on a kind of device."""
    return ("recompute", "offload") if device == "cuda" else ("recompute",)


def plan_joint(
    joint: Any,
    run: Callable[[Marker], object] | None,
    room: Room,
    settings: Settings,
    *,
    state: Sequence[Any] = (),
    pinned: Collection[int] = (),
) -> Plan:
    """The plan for a captured step; ``run`` runs it once with a marker, to measure what is not known.

    ``state`` is that of the optimiser; ``pinned`` are leaves that cannot leave.
    """
    graph: Graph = joint.graph
    device = device_of(graph)
    able = able_in_place(joint)
    targets = [call.target for call in joint.calls]
    costs = costs_of(graph, targets, device, run, settings.cost)
    if settings.budget.share is not None and all(op.phase is Phase.FORWARD for op in graph.ops):
        # a share is one of a training step; evaluation keeps nothing for backward as it is
        settings = replace(settings, budget=Budget(share=1.0))
    graph = with_state(graph, state)
    free = room.free_bytes() if settings.budget.auto else None
    link = link_of(device) if "offload" in settings.only else None
    beside = room.beside_bytes()  # after all that was measured: libraries have taken what they keep
    kept = Kept(graph, able, settings, device, (beside, free), pinned)
    plan = kept.load()
    means = [one for one in settings.only if one != "tile"]
    optional = settings.auto and not settings.offload  # nobody has asked for offload

    def made(means: Sequence[str]) -> Plan:
        return make_plan(
            graph,
            costs,
            settings.budget,
            able=able,
            only=means,
            link=link if "offload" in means else None,
            beside_bytes=beside,
            free_bytes=free,
            time_limit=settings.time_limit,
            seed=settings.seed,
            progress=settings.progress,
            offload=settings.offload,
            pinned=pinned,
            crossing=settings.crossing,
            tiled="tile" in settings.only,
        )

    if plan is None or (optional and not fits_host(graph, plan.program)):
        plan = made(means)
        if optional and not fits_host(graph, plan.program):
            plan = made([one for one in means if one != "offload"])
        if plan.interrupted:
            warn_interrupted()
        else:
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
        tuple(_workspace(cost) for cost in found),
        origin,
        short=short_seconds(graph, found),
        disturbed=sum(cost.disturbed for cost in found),
    )


def measurable(graph: Graph, targets: Sequence[Any], kind: str, room: Room) -> Program | None:
    """A Program to measure a step with: the plain one where it fits, else one planned with estimates."""
    plain = store_all(graph)
    free, beside = int(room.free_bytes() * _MEASURED_SHARE), room.beside_bytes()
    if simulate(graph, plain).peak_bytes + beside <= free:
        return plain
    costs = costs_of(graph, targets, kind, None, "estimated")
    with contextlib.suppress(LowtideError):
        first = make_plan(graph, costs, Budget(bytes=free), beside_bytes=beside)
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


class Kept:
    """A plan that was made before for the same step, device, versions and budget, if it still holds."""

    def __init__(
        self,
        graph: Graph,
        able: frozenset[int],
        settings: Settings,
        kind: str,
        room: tuple[int, int | None],
        pinned: Collection[int],
        whole: Callable[[Plan], Joint] | None = None,
        state: Sequence[Any] = (),
    ) -> None:
        """``whole`` gives the step that a plan in tiles is for, made from the same step.

        ``state`` is that of an optimiser.
        """
        beside, free = room
        self.whole, self.state = whole, state
        self.graph, self.able, self.beside, self.free = graph, able, beside, free
        self.budget, self.offload = settings.budget, settings.offload
        self.wanted = settings.cache
        asked = (
            settings.budget,
            settings.only,
            settings.auto,
            settings.cost,
            settings.time_limit,
            settings.seed,
        )
        parts = [repr(asked), repr(sorted(able)), environment(kind).key, str(beside), str(free)]
        parts += [
            repr(settings.offload),
            str(settings.crossing),
            repr(sorted(pinned)),
            str(whole is not None),
        ]
        digest = hashlib.sha256(msgspec.json.encode(graph) + "\0".join(parts).encode())
        self.name = f"plan-{digest.hexdigest()[:32]}.json"

    def load(self) -> Plan | None:
        """The plan, or None where there is none, or where it is damaged, not valid, or for something else."""
        if not self.wanted:
            return None
        with contextlib.suppress(LowtideError):
            plan = read_document(self._path(), Plan)
            if plan.beside_bytes == self.beside and not plan.interrupted and self._asked_for(plan):
                valid_plan(plan)
                return plan if self._fits(plan) else None
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
        """Keep the plan, whole or not at all; a folder that cannot be written is no reason to fail.

        One from times that a busy machine disturbed is not kept: the next run measures them again.
        """
        if not self.wanted or plan.disturbed:
            return
        with contextlib.suppress(LowtideError, OSError):
            self._path().parent.mkdir(parents=True, exist_ok=True)
            write_document(self._path(), plan)

    def _path(self) -> Path:
        return cache_folder() / "plans" / self.name
