"""What a plan says of itself, computed once more from its graph, its program and the costs in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import isclose

from lowtide.graph import RESIDENT_ROLES, Graph, Phase
from lowtide.plan.check.checker import Checked
from lowtide.plan.check.graph import facts_of
from lowtide.plan.check.play import tile_bytes
from lowtide.plan.check.rules import Rule
from lowtide.plan.check.time import seconds_of
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Body, Loop, Program, Run, Send
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.plan import Decisions, Plan
from lowtide.units import format_bytes

__all__ = ["Contradiction", "contradictions"]

Contradiction = tuple[Rule, str]
"""A rule of docs/valid-programs.md, and how a plan breaks it."""
_ROUNDING = 1e-6
"""Of a figure: sums in another order differ by less."""


def contradictions(plan: Plan, found: Checked) -> Iterator[Contradiction]:
    """What a plan says that does not follow from the rest of it; ``found`` is what its program takes."""
    loops = {line.op: line for line in plan.program.instructions if isinstance(line, Loop)}
    yield from _predicted(plan, found)
    yield from _of_loops(plan, loops)
    yield from _plain(plan, bool(loops))
    yield from _ratios(plan, bool(loops))
    yield from _sizes(plan)
    yield from _decided(plan, loops)


def _predicted(plan: Plan, found: Checked) -> Iterator[Contradiction]:
    peak, promised = found.peak_bytes + plan.beside_bytes, plan.predicted.peak_bytes
    if peak != promised:
        yield (
            Rule.PREDICTED,
            f"the plan promises a peak of {format_bytes(promised)} ({promised} bytes) and takes "
            f"{format_bytes(peak)} ({peak} bytes)",
        )
    if plan.seconds:
        took = seconds_of(plan.graph, plan.program, plan.seconds, plan.short, plan.link, plan.wire_seconds)
        if not _alike(took, plan.predicted.seconds):
            said = f"the plan promises {plan.predicted.seconds} {_unit(plan)} and takes {took}"
            yield Rule.PREDICTED, said


def _unit(plan: Plan) -> str:
    """What the costs of the plan are counted in."""
    return "units" if plan.cost == "unit" else "seconds"


def _of_loops(plan: Plan, loops: dict[int, Loop]) -> Iterator[Contradiction]:
    """A loop takes what its tiles take: the most bytes of any, and no less than the seconds of all."""
    bodies = plan.program.bodies
    for k, line in loops.items():
        turns = Counter(tile.body for tile in line.tiles)
        label = plan.graph.ops[k].label
        if plan.workspace_bytes:
            most = max(tile_bytes(bodies[n]) for n in turns)
            if plan.workspace_bytes[k] != most:
                said = f"the loop {label!r} takes {most} bytes, and not {plan.workspace_bytes[k]}"
                yield Rule.PREDICTED, said
        if plan.seconds and all(bodies[n].seconds for n in turns):
            took = sum(count * _tile_seconds(bodies[n], plan) for n, count in turns.items())
            if plan.seconds[k] < took * (1 - _ROUNDING):
                said = f"the loop {label!r} takes {took} {_unit(plan)}, and not {plan.seconds[k]}"
                yield Rule.PREDICTED, said


def _tile_seconds(body: Body, plan: Plan) -> float:
    link = None if plan.link is None else replace(plan.link, settles=False)  # a tile is no part of its own
    return seconds_of(body.graph, body.program, body.seconds, {}, link)


def _plain(plan: Plan, tiled: bool) -> Iterator[Contradiction]:
    """What storing everything takes; of a step in tiles, the step without them is not part of the plan."""
    if tiled:
        return
    stored = with_in_place(plan.graph, store_all(plan.graph), plan.able)
    if plan.seconds:
        took = seconds_of(plan.graph, stored, plan.seconds, {}, None, plan.wire_seconds)
        took = took if plan.wire_seconds else sum(plan.seconds)
        if not _alike(took, plan.plain.seconds):
            yield Rule.PLAIN, f"plain.seconds is {plan.plain.seconds}, storing everything takes {took}"
    peak = simulate(plan.graph, stored, workspace_bytes=plan.workspace_bytes).peak_bytes + plan.beside_bytes
    if peak != plan.plain.peak_bytes:
        yield Rule.PLAIN, f"plain.peak_bytes is {plan.plain.peak_bytes}, storing everything takes {peak}"


def _ratios(plan: Plan, tiled: bool) -> Iterator[Contradiction]:
    planned, bound, plain = plan.predicted.seconds, plan.bound.seconds, plan.plain.seconds
    if bound > planned * (1 + _ROUNDING):
        yield Rule.RATIOS, f"the bound of {bound} {_unit(plan)} is above the {planned} that the plan takes"
    gap = (planned - bound) / planned if planned else 0.0
    if not _alike(plan.gap, gap if gap > _ROUNDING else 0.0):
        yield Rule.RATIOS, f"gap is {plan.gap}, from the plan to its bound there are {gap}"
    told = plan.overhead, plan.bound.overhead
    if not any(all(map(_alike, told, right)) for right in _overheads(plan, tiled, planned, bound, plain)):
        yield Rule.RATIOS, f"overheads of {told[0]} and {told[1]} do not follow from the times"


def _overheads(
    plan: Plan, tiled: bool, planned: float, bound: float, plain: float
) -> Iterator[tuple[float, float]]:
    """The overhead of the plan and of its bound, over what they may be told against."""
    if tiled:
        yield (planned / plain - 1, bound / plain - 1) if plain else (0.0, -1.0)
        return
    ops = enumerate(plan.graph.ops)
    forward = sum(plan.seconds[k] for k, op in ops if op.phase is Phase.FORWARD) if plan.seconds else 0.0
    for base in (plain, forward):
        yield (planned - plain) / (base or 1.0), (bound - plain) / (base or 1.0)


def _sizes(plan: Plan) -> Iterator[Contradiction]:
    facts = facts_of(plan.graph)
    smallest, beside = plan.smallest_budget_bytes, plan.beside_bytes
    if smallest > plan.predicted.peak_bytes:
        said = f"smallest_budget_bytes is {smallest}, the plan itself takes {plan.predicted.peak_bytes}"
        yield Rule.SMALLEST, said
    least = facts.least_bytes() + beside
    if smallest < least:
        yield Rule.SMALLEST, f"smallest_budget_bytes is {smallest}, the step ends with {least}"
    resident = facts.leaf_bytes() + beside
    if plan.resident_bytes not in (0, resident):  # plans of older versions do not say it
        yield Rule.SMALLEST, f"resident_bytes is {plan.resident_bytes}, its leaves take {resident}"


def _decided(plan: Plan, loops: dict[int, Loop]) -> Iterator[Contradiction]:
    """How many storages are kept, recomputed and offloaded; of a step in tiles, in one of them or around."""
    tiles = len(next(iter(loops.values())).tiles) if loops else 0
    if plan.decisions.tiles != tiles:
        yield Rule.DECISIONS, f"decisions.tiles is {plan.decisions.tiles}, the program has {tiles}"
    steps = _steps(plan.graph, plan.program)
    if not any(_decisions(graph, program, tiles) == plan.decisions for graph, program in steps):
        yield Rule.DECISIONS, "decisions are not those of the program"


def _steps(graph: Graph, program: Program) -> Iterator[tuple[Graph, Program]]:
    """A step and those of its tiles, with their Programs."""
    yield graph, program
    for body in program.bodies:
        yield from _steps(body.graph, body.program)


def _decisions(graph: Graph, program: Program, tiles: int) -> Decisions:
    """What becomes of storages that forward makes and backward reads, and of leaves that leave."""
    owner, tensors = graph.storages(), graph.tensors
    stay = {owner[t] for t in facts_of(graph).stay}
    forward = {owner[t] for op in graph.ops if op.phase is Phase.FORWARD for t in op.outputs}
    read = {owner[t] for op in graph.ops if op.phase is not Phase.FORWARD for t in op.reads}
    sent = {owner[line.tensor] for line in program.instructions if isinstance(line, Send)}
    runs = [line for line in program.instructions if isinstance(line, Run)]
    later = [graph.ops[line.op] for line in program.backward if isinstance(line, Run)]
    again = {owner[t] for op in later if op.phase is Phase.FORWARD for t in op.outputs}
    asked = (forward & read) - stay
    return Decisions(
        kept=len(asked - again - sent),
        recomputed=len(asked & again - sent),
        offloaded=len(asked & sent) + sum(tensors[t].role in RESIDENT_ROLES for t in sent),
        in_place=sum(line.in_place is not None for line in runs),
        tiles=tiles,
    )


def _alike(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=_ROUNDING, abs_tol=1e-9)
