"""A plan for a step that runs in loops over tiles: each body is a step with a budget of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec

from lowtide.errors import InfeasibleError
from lowtide.graph import LOOP, RESIDENT_ROLES, Graph, Rect
from lowtide.plan import time_shares
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Body, Instruction, Loop, Program, Run, Tile
from lowtide.plan.program.memory import Memory, allocated_bytes
from lowtide.plan.program.simple import kept_throughout, store_all
from lowtide.plan.program.simulate import inside_bytes, simulate
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Bound, HoldsFor, Plan, Side

__all__ = ["Inside", "LoopedStep", "TileStep", "least_bytes", "plan_loop"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TileStep:
    """The step of a tile, with what it costs."""

    graph: Graph
    costs: Costs
    able: frozenset[int] = frozenset()
    """Operators that may run in place."""
    inside: Inside | None = None
    """Loops that are part of it."""
    issue: float = 0.0
    """Seconds in which the host hands an operator to the device, on average: it may be what takes longest."""

    @property
    def disturbed(self) -> int:
        """How many of its operators were measured while the machine was busy."""
        inner = self.inside.steps if self.inside else ()
        return self.costs.disturbed + sum(step.disturbed for step in inner)

    @property
    def seconds(self) -> float:
        """What it takes where nothing is run again."""
        pairs = zip(self.graph.ops, self.costs.seconds, strict=True)
        around = sum(seconds for op, seconds in pairs if op.kind != LOOP)
        around = max(around, self.issue * len(self.graph.ops))
        inner = self.inside
        return around + (sum(inner.steps[k].seconds for one in inner.which for k in one) if inner else 0.0)


@dataclass(frozen=True, slots=True)
class Inside:
    """Loops inside the step of a tile, which end at one of its tensors."""

    boxes: Sequence[Rect]
    end: str
    which: Sequence[Sequence[int]]
    """For each loop the step of every box."""
    steps: Sequence[TileStep]


@dataclass(frozen=True, slots=True)
class LoopedStep:
    """A step with loops over tiles, and what is around them."""

    graph: Graph
    costs: Costs
    """Those of the operators around the loops."""
    boxes: Sequence[Rect]
    which: Sequence[Sequence[int]]
    """For each loop the step of every box."""
    steps: Sequence[TileStep]
    able: frozenset[int] = frozenset()
    """Operators around the loops that may run in place."""
    cut: Sequence[str] = ()
    """Tensors at which the loops begin."""
    end: str = ""
    """The tensor at which they end; the loss where there is none."""
    channels_last: bool = False
    """How images lie in memory inside tiles (:class:`Loop`)."""
    whole: bool = True
    """Whether the loops are the whole step."""

    @property
    def disturbed(self) -> int:
        """How many operators were measured while the machine was busy."""
        return self.costs.disturbed + sum(step.disturbed for step in self.steps)


def plan_loop(looped: LoopedStep, plain: Side, request: PlanRequest, room: DeviceRoom) -> Plan:
    """The plan for a step with loops inside a budget in bytes; ``plain`` is what the untiled step takes.

    Tiles get what is left of the budget. Where the loops are not the whole step, what is around them is
    planned: those that begin at ``cut`` tensors run plainly, so that little is left to others. An
    InfeasibleError says that something does not fit. Nothing is proven about how fast tiles can be: the bound
    is 0 seconds.
    """
    graph, costs, which, steps = looped.graph, looped.costs, looped.which, looped.steps
    budget, time_limit = request.budget.bytes or 1, request.limits.time_limit
    plainly = request.without("tile")
    loops = [k for k, op in enumerate(graph.ops) if op.kind == LOOP]
    turns = Counter(k for one in which for k in one)
    programs: dict[int, Program] = {}
    plans: dict[int, Plan] = {}
    there, inside = _around(graph, costs, loops, looped.able), room.of_tiles()
    left = {k: budget - live for live, one in zip(there, which, strict=True) for k in one}
    began, untried = time.monotonic(), turns.total()
    for k in sorted(range(len(steps)), key=lambda k: -_plain_peak(steps[k])):  # what may not fit comes first
        step = steps[k]
        share, untried = turns[k] / untried, untried - turns[k]
        fits = _plain_peak(step) - Memory(step.graph).resident_bytes <= left[k]
        if not looped.whole and (looped.cut or fits):
            programs[k] = with_in_place(step.graph, store_all(step.graph), step.able)
            continue
        size = Budget(bytes=max(1, left[k] + Memory(step.graph).resident_bytes))
        now = max(
            time_shares.LOOP_SHORTEST * time_limit,
            began + time_shares.LOOP_BODIES * time_limit - time.monotonic(),
        )
        if step.inside is None:
            asked = replace(plainly, budget=size).within(share * now)
            plan = make_plan(step.graph, step.costs, asked, inside, able=step.able)
        else:
            asked = replace(request, budget=size).within(share * now)
            plan = plan_loop(_with_inner(step, step.inside), Side(0, 0.0), asked, inside)
        plans[k], programs[k] = plan, plan.program
        if plan.interrupted:  # the others still need a plan
            time_limit = 0.0
    bodies = [_body(step, programs[k], plans.get(k)) for k, step in enumerate(steps)]
    summed, lines = _with_bodies(looped, loops, bodies, inside.link)
    _refuse_large(graph, loops, summed.workspace_bytes, budget - room.outside_bytes)
    around = max((1 - time_shares.LOOP_BODIES) * time_limit, began + time_limit - time.monotonic())
    outer = make_plan(
        graph,
        summed,
        plainly.within(around),
        room,
        able=looped.able,
        turned=partial(_with_loops, loops=lines, bodies=bodies),
    )
    planned = outer.predicted.seconds
    told = plans.get(Counter(which[-1]).most_common(1)[0][0], outer)
    return msgspec.structs.replace(
        outer,
        plain=plain,
        overhead=planned / plain.seconds - 1 if plain.seconds else 0.0,
        bound=Bound(0.0, -1.0, HoldsFor.NOTHING),
        gap=1.0,
        smallest_budget_bytes=min(outer.predicted.peak_bytes, outer.smallest_budget_bytes),
        decisions=msgspec.structs.replace(told.decisions, tiles=len(looped.boxes)),
        method=f"{len(looped.boxes)} tiles, {told.method}",
        only=request.methods,
        interrupted=outer.interrupted or any(plan.interrupted for plan in plans.values()),
        stopped_by_time=outer.stopped_by_time or any(plan.stopped_by_time for plan in plans.values()),
    )


def _with_bodies(
    looped: LoopedStep, loops: Sequence[int], bodies: Sequence[Body], link: Link | None
) -> tuple[Costs, dict[int, Loop]]:
    """What operators take once loops take what their bodies do, and the instructions of the loops."""
    steps = looped.steps
    spent = [_seconds(body, link, step.issue) for body, step in zip(bodies, steps, strict=True)]
    inside = [inside_bytes(body) for body in bodies]
    seconds, workspace = looped.costs.seconds, looped.costs.workspace_bytes
    lines: dict[int, Loop] = {}
    for loop, one in zip(loops, looped.which, strict=True):
        seconds = _with(seconds, loop, sum(spent[k] for k in one))
        workspace = _with(workspace, loop, max(inside[k] for k in one))
        tiles = tuple(Tile(k, box) for k, box in zip(one, looped.boxes, strict=True))
        lines[loop] = Loop(
            loop, tiles=tiles, cut=tuple(looped.cut), end=looped.end, channels_last=looped.channels_last
        )
    known, origin = looped.costs, steps[0].costs.origin
    beside = known.short, known.wire_seconds, looped.disturbed, known.on_their_way
    return Costs(seconds, workspace, origin, False, *beside), lines


def least_bytes(graph: Graph) -> int:
    """What is there when the step ends, however it is cut: leaves, results and gradients."""
    owner = graph.storages()
    held: dict[int, int] = {}
    for t in kept_throughout(graph):
        held[owner[t]] = max(held.get(owner[t], 0), graph.tensors[t].bytes)
    return sum(min(size, graph.tensors[t].bytes) for t, size in held.items())


def _with_inner(step: TileStep, inner: Inside) -> LoopedStep:
    """The step of a tile that has loops inside."""
    return LoopedStep(
        step.graph,
        step.costs,
        inner.boxes,
        inner.which,
        inner.steps,
        able=step.able,
        end=inner.end,
        whole=False,
    )


def _body(step: TileStep, program: Program, plan: Plan | None) -> Body:
    """With what its operators take; of loops inside, the plan knows."""
    known = step.costs if plan is None or step.inside is None else plan
    able = tuple(sorted(step.able))
    return Body(step.graph, program, tuple(known.workspace_bytes), tuple(known.seconds), able)


def _plain_peak(step: TileStep) -> int:
    program = store_all(step.graph)
    return simulate(step.graph, program, workspace_bytes=step.costs.workspace_bytes).peak_bytes


def _around(graph: Graph, costs: Costs, loops: Sequence[int], able: Collection[int]) -> list[int]:
    """Bytes that are live while each loop runs, besides what its tiles take."""
    program = with_in_place(graph, store_all(graph), able)
    workspace = costs.workspace_bytes
    for loop in loops:
        workspace = _with(workspace, loop, 0)
    timeline = simulate(graph, program, workspace_bytes=workspace)
    runs = [line.op for line in program.instructions if isinstance(line, Run)]
    return [timeline.live_bytes[runs.index(loop)] for loop in loops]


def _refuse_large(graph: Graph, loops: Sequence[int], workspace: Sequence[int], budget: int) -> None:
    """Raise an InfeasibleError where a loop with what it reads and gives takes more than the budget."""
    owner = graph.storages()
    resident = Memory(graph).resident_bytes
    for loop in loops:
        op = graph.ops[loop]
        there = [graph.tensors[t] for t in {owner[t] for t in (*op.reads, *op.outputs)}]
        least = resident + workspace[loop]
        least += sum(allocated_bytes(tensor) for tensor in there if tensor.role not in RESIDENT_ROLES)
        if least > budget:
            raise InfeasibleError("a tile is too large", budget=budget, smallest_budget=least, floor=0)


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _seconds(body: Body, link: Link | None, issue: float) -> float:
    """What a tile takes, on the device or on the host that hands it over, whichever takes longer."""
    workspace = body.workspace_bytes
    timeline = simulate(body.graph, body.program, workspace_bytes=workspace, seconds=body.seconds, link=link)
    return max(sum(timeline.seconds), issue * len(timeline.seconds))


def _with_loops(program: Program, loops: Mapping[int, Loop], bodies: Sequence[Body]) -> Program:
    """The Program with some operators run as loops."""

    def turned(line: Instruction) -> Instruction:
        return loops.get(line.op, line) if isinstance(line, Run) else line

    forward, backward = tuple(map(turned, program.forward)), tuple(map(turned, program.backward))
    return Program(forward, backward, tuple(bodies))
