"""A plan for a step that runs as a loop over tiles: each body is a step with a budget of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from lowtide.graph import Graph, Rect
from lowtide.plan.budget import Budget
from lowtide.plan.check import check
from lowtide.plan.lanes import Link
from lowtide.plan.make import Costs, make_plan
from lowtide.plan.memory import Memory
from lowtide.plan.plain import store_all
from lowtide.plan.plan import Bound, Plan, Side
from lowtide.plan.portfolio import Progress
from lowtide.plan.program import Body, Instruction, Loop, Program, Run, Tile
from lowtide.plan.simulate import simulate

__all__ = ["TileStep", "plan_loop", "with_loop"]


@dataclass(frozen=True, slots=True)
class TileStep:
    """The step of a tile, with what it costs."""

    graph: Graph
    costs: Costs
    able: frozenset[int] = frozenset()
    """Operators that may run in place."""


def with_loop(graph: Graph, tiles: Sequence[Tile], bodies: Sequence[Body]) -> Program:
    """The plain Program of a step with a loop in it."""
    plain = store_all(graph)

    def turned(line: Instruction) -> Instruction:
        if isinstance(line, Run) and graph.ops[line.op].kind == "lowtide.loop":
            return Loop(line.op, tiles=tuple(tiles))
        return line

    return Program(tuple(map(turned, plain.forward)), plain.backward, tuple(bodies))


def plan_loop(
    graph: Graph,
    costs: Costs,
    boxes: Sequence[Rect],
    which: Sequence[int],
    steps: Sequence[TileStep],
    budget: int,
    plain: Side,
    *,
    only: Collection[str],
    link: Link | None = None,
    beside_bytes: int = 0,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The plan for a step whose loop runs ``steps[which[k]]`` for ``boxes[k]``, inside ``budget`` bytes.

    ``costs`` are those of the operators around the loop, ``plain`` what the untiled step takes. An
    InfeasibleError says that a tile does not fit. The bound is the time of the plain step: nothing better is
    proven for tiles.
    """
    tiles = [Tile(k, box) for k, box in zip(which, boxes, strict=True)]
    around = _around(graph, costs, tiles, steps)
    turns = Counter(which)
    plans: list[Plan] = []
    for k, step in enumerate(steps):
        resident = simulate(step.graph, store_all(step.graph)).resident_bytes
        plans.append(
            make_plan(
                step.graph,
                step.costs,
                Budget(bytes=max(1, budget - around + resident)),
                able=step.able,
                only=[means for means in only if means != "tile"],
                link=link,
                beside_bytes=beside_bytes,
                time_limit=time_limit * turns[k] / len(which),
                seed=seed,
                progress=progress,
            )
        )
    bodies = [
        Body(step.graph, plan.program, tuple(step.costs.workspace_bytes), step.costs.seconds)
        for step, plan in zip(steps, plans, strict=True)
    ]
    program = with_loop(graph, tiles, bodies)
    seconds = list(costs.seconds)
    for k, op in enumerate(graph.ops):
        if op.kind == "lowtide.loop":
            seconds[k] = sum(plans[k].predicted.seconds for k in which)
    timeline = simulate(graph, program, workspace_bytes=costs.workspace_bytes, seconds=seconds)
    check(graph, program, budget=budget - beside_bytes, workspace_bytes=costs.workspace_bytes)
    planned = sum(timeline.seconds)
    main = plans[turns.most_common(1)[0][0]]
    bound = min(plain.seconds, planned)
    return msgspec.structs.replace(
        main,
        budget_bytes=budget,
        plain=plain,
        predicted=Side(timeline.peak_bytes + beside_bytes, planned),
        overhead=planned / plain.seconds - 1 if plain.seconds else 0.0,
        bound=Bound(bound, bound / plain.seconds - 1 if plain.seconds else 0.0),
        gap=(planned - bound) / planned if planned else 0.0,
        smallest_budget_bytes=timeline.peak_bytes + beside_bytes,
        decisions=msgspec.structs.replace(main.decisions, tiles=len(tiles)),
        solve_seconds=sum(plan.solve_seconds for plan in plans),
        method=f"{len(tiles)} tiles, {main.method}",
        only=tuple(only),
        graph=graph,
        program=program,
        workspace_bytes=tuple(costs.workspace_bytes),
        seconds=tuple(seconds),
        able=(),
        resident_bytes=Memory(graph).resident_bytes + beside_bytes,
        interrupted=any(plan.interrupted for plan in plans),
    )


def _around(graph: Graph, costs: Costs, tiles: Sequence[Tile], steps: Sequence[TileStep]) -> int:
    """Bytes that are live while the loop runs, besides what its tiles take."""
    bodies = [Body(step.graph, Program(())) for step in steps]
    program = with_loop(graph, tiles, bodies)
    timeline = simulate(graph, program, workspace_bytes=costs.workspace_bytes)
    runs = [line.op for line in program.instructions if isinstance(line, Run)]
    return next(
        live
        for op, live in zip(runs, timeline.live_bytes, strict=True)
        if graph.ops[op].kind == "lowtide.loop"
    )
