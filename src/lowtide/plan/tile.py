"""A plan for a step that runs as a loop over tiles: each body is a step with a budget of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from lowtide.graph import LOOP, Graph, Rect
from lowtide.plan.budget import Budget
from lowtide.plan.check import check
from lowtide.plan.in_place import with_in_place
from lowtide.plan.lanes import Link
from lowtide.plan.make import Costs, make_plan
from lowtide.plan.memory import Memory
from lowtide.plan.plain import store_all
from lowtide.plan.plan import Bound, Plan, Side
from lowtide.plan.portfolio import Progress
from lowtide.plan.program import Body, Instruction, Loop, Program, Run, Tile
from lowtide.plan.simulate import inside_bytes, simulate

__all__ = ["TileStep", "plan_loop"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TileStep:
    """The step of a tile, with what it costs."""

    graph: Graph
    costs: Costs
    able: frozenset[int] = frozenset()
    """Operators that may run in place."""


def plan_loop(
    graph: Graph,
    costs: Costs,
    boxes: Sequence[Rect],
    which: Sequence[int],
    steps: Sequence[TileStep],
    budget: int,
    plain: Side,
    *,
    cut: Sequence[str] = (),
    channels_last: bool = False,
    able: Collection[int] = (),
    only: Collection[str],
    link: Link | None = None,
    beside_bytes: int = 0,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The plan for a step with a loop: ``steps[which[k]]`` for ``boxes[k]``, inside ``budget`` bytes.

    ``costs`` are those of the operators around the loop, ``plain`` what the untiled step takes. Where the
    loop is all of the step, its tiles get what is left of the budget; where it begins at ``cut`` tensors,
    they run plainly, and what is around them is planned. An InfeasibleError says that something does not
    fit. ``channels_last`` is how tiles were cut (:class:`Loop`). Nothing is proven about how fast tiles can
    be: the bound is 0 seconds.
    """
    asked: dict[str, Any] = {"link": link, "beside_bytes": beside_bytes, "seed": seed, "progress": progress}
    means = [one for one in only if one != "tile"]
    loop = next(k for k, op in enumerate(graph.ops) if op.kind == LOOP)
    turns = Counter(which)
    programs: dict[int, Program] = {}
    plans: dict[int, Plan] = {}
    around = budget - _around(graph, costs, loop, able)
    for k in sorted(range(len(steps)), key=lambda k: -_plain_peak(steps[k])):  # what may not fit comes first
        step = steps[k]
        if cut:
            programs[k] = with_in_place(step.graph, store_all(step.graph), step.able)
            continue
        room = Budget(bytes=max(1, around + Memory(step.graph).resident_bytes))
        share = 0.8 * time_limit * turns[k] / len(which)
        plan = make_plan(step.graph, step.costs, room, able=step.able, only=means, time_limit=share, **asked)
        plans[k], programs[k] = plan, plan.program
    bodies = [
        Body(step.graph, programs[k], tuple(step.costs.workspace_bytes), step.costs.seconds)
        for k, step in enumerate(steps)
    ]
    spent = [_seconds(body, link) for body in bodies]
    whole = Costs(
        _with(costs.seconds, loop, sum(spent[k] for k in which)),
        _with(costs.workspace_bytes, loop, max(map(inside_bytes, bodies))),
        steps[0].costs.origin,
        short=costs.short,
    )
    share = time_limit if cut else 0.2 * time_limit
    outer = make_plan(graph, whole, Budget(bytes=budget), able=able, only=means, time_limit=share, **asked)
    tiles = tuple(Tile(k, box) for k, box in zip(which, boxes, strict=True))
    turning = Loop(loop, tiles=tiles, cut=tuple(cut), channels_last=channels_last)
    program = _with_loop(outer.program, turning, bodies)
    check(graph, program, budget=budget - beside_bytes, workspace_bytes=whole.workspace_bytes)
    planned = outer.predicted.seconds
    told = plans.get(turns.most_common(1)[0][0], outer)
    return msgspec.structs.replace(
        outer,
        plain=plain,
        overhead=planned / plain.seconds - 1 if plain.seconds else 0.0,
        bound=Bound(0.0, -1.0),
        gap=1.0,
        smallest_budget_bytes=min(outer.predicted.peak_bytes, outer.smallest_budget_bytes),
        decisions=msgspec.structs.replace(told.decisions, tiles=len(tiles)),
        method=f"{len(tiles)} tiles, {told.method}",
        only=tuple(only),
        program=program,
    )


def _plain_peak(step: TileStep) -> int:
    program = store_all(step.graph)
    return simulate(step.graph, program, workspace_bytes=step.costs.workspace_bytes).peak_bytes


def _around(graph: Graph, costs: Costs, loop: int, able: Collection[int]) -> int:
    """Bytes that are live while the loop runs, besides what its tiles take."""
    program = with_in_place(graph, store_all(graph), able)
    workspace = _with(costs.workspace_bytes, loop, 0)
    timeline = simulate(graph, program, workspace_bytes=workspace)
    runs = [line.op for line in program.instructions if isinstance(line, Run)]
    return timeline.live_bytes[runs.index(loop)]


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _seconds(body: Body, link: Link | None) -> float:
    workspace = body.workspace_bytes
    timeline = simulate(body.graph, body.program, workspace_bytes=workspace, seconds=body.seconds, link=link)
    return sum(timeline.seconds)


def _with_loop(program: Program, loop: Loop, bodies: Sequence[Body]) -> Program:
    """The Program with the operator run as a loop."""

    def turned(line: Instruction) -> Instruction:
        return loop if isinstance(line, Run) and line.op == loop.op else line

    forward, backward = tuple(map(turned, program.forward)), tuple(map(turned, program.backward))
    return Program(forward, backward, tuple(bodies))
