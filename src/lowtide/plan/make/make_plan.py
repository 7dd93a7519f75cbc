"""make_plan: from a graph, its costs and a budget to a Plan that was searched, simulated and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from math import inf

from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Graph, Role
from lowtide.plan.bounds.relaxation import skippable
from lowtide.plan.budget import Budget
from lowtide.plan.check.checker import check
from lowtide.plan.make.candidates import (
    Asked,
    Tried,
    at_the_end,
    at_the_lowest,
    played,
    stored,
    with_leaves_away,
)
from lowtide.plan.make.search import Found, Progress, search
from lowtide.plan.offload.parameters import movable, streamed
from lowtide.plan.problem.problem import Problem, build_problem
from lowtide.plan.problem.reorder import in_order, lean_order
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import Memory
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.recompute.smallest_budget import smallest_budget
from lowtide.plan.result.decisions import decisions_of
from lowtide.plan.result.infeasible import explained
from lowtide.plan.result.plan import Bound, HoldsFor, Plan, Side
from lowtide.units import format_bytes

__all__ = ["make_plan", "plain_peak"]


_ROUNDING = 1e-6
"""A plan that takes so much more than its bound, as a share of the step, is called optimal."""
_SUMMING = 1e-9
"""What adding up seconds may be wrong by, as a share of them."""


def plain_peak(graph: Graph, costs: Costs, able: Collection[int] = ()) -> int:
    """What storing everything takes."""
    program = with_in_place(graph, store_all(graph), able)
    return simulate(graph, program, workspace_bytes=costs.workspace_bytes).peak_bytes


def make_plan(
    graph: Graph,
    costs: Costs,
    budget: Budget,
    *,
    able: Collection[int] = (),
    only: Collection[str] = ("recompute",),
    link: Link | None = None,
    beside_bytes: int = 0,
    free_bytes: int | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
    look_for_smallest: float = 0.0,
    offload: Collection[str] = (),
    pinned: Collection[int] = (),
    crossing: bool = True,
    tiled: bool = False,
    turned: Callable[[Program], Program] = lambda program: program,
) -> Plan:
    """The fastest Program found whose peak, with what is beside it on the device, stays inside the budget.

    ``able`` names operators that may run in place; ``link`` is needed for offload; ``free_bytes`` is what the
    budget ``auto`` stands for. An InfeasibleError names the smallest budget that works; for a plan that was
    found, it is looked for in ``look_for_smallest`` more seconds. An interrupt (Ctrl-C) gives the best plan
    so far, if there is one.

    ``offload`` says which leaves may leave the device, ``pinned`` which of them may not after all, and
    ``crossing`` whether they may be away between forward and backward. ``tiled`` says that whoever asks tries
    tiles too, should this be infeasible. ``turned`` puts loops in the place of operators that stand for them.
    """
    if not 0 <= time_limit < inf:
        raise PlanError(f"a time limit of {time_limit}: how long to search is a number of seconds")
    began = time.monotonic()
    problem, others = _problem(graph, costs, able, fine=link is not None)
    holds_for = _holds_for(problem, only)
    peak = plain_peak(graph, costs, able) + beside_bytes
    size = budget.resolve(peak, free_bytes)
    asked = Asked(size, peak, tuple(only), beside_bytes, tuple(sorted(able)), link, tuple(offload))
    fits = peak <= size  # whatever a search would find is no faster
    chosen = [] if fits else _sets(graph, movable(graph, offload, pinned))
    tried = [stored(problem, costs, asked)] if fits else []
    bound = 0

    def lowest(there: Problem, error: InfeasibleError, leaves: tuple[int, ...]) -> Tried:
        if not leaves:
            raise error
        effort = time_limit / len(chosen)
        return at_the_lowest(there, costs, error, leaves, asked, crossing=crossing, effort=effort, seed=seed)

    refused: list[tuple[Problem, InfeasibleError, tuple[int, ...]]] = []
    for leaves in chosen:
        there = streamed(problem, leaves, crossing=crossing) if leaves else problem
        try:
            found = search(
                there,
                size - beside_bytes,
                time_limit=time_limit / len(chosen),
                seed=seed,
                progress=progress,
                only=only,
                link=link,
                others=others if crossing or not leaves else (),
            )
            if leaves == chosen[-1]:  # only where all of them may leave the bound holds for any plan
                bound = found.bound
            tried.append(with_leaves_away(there, costs, found, leaves, asked, crossing=crossing))
        except InfeasibleError as error:
            try:
                tried.append(lowest(there, error, leaves))
            except InfeasibleError as last:
                refused.append((there, last, leaves))
        except MemoryError as error:
            raise PlanError("the host has no memory left to search for a plan in; free some") from error
        if tried and tried[-1].found.interrupted:
            break
    if not tried:
        told = _refused(*refused[-1], asked, tiled, time_limit, holds_for)
        told.plain_peak, told.plain_seconds = peak, sum(costs.seconds)
        told.solve_seconds = time.monotonic() - began
        raise told
    best = min(tried, key=lambda one: one.seconds)
    found = replace(best.found, bound=min(bound, best.found.cost))
    if look_for_smallest and found.smallest.budget > found.floor and not found.interrupted:
        found = _with_smallest(best.problem, found, look_for_smallest, seed)
    return _plan(graph, costs, found, turned(best.program), asked, holds_for)


def _sets(graph: Graph, leaves: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Which leaves may leave in each try: none, optimiser state, which nobody reads, all."""
    state = tuple(leaf for leaf in leaves if graph.tensors[leaf].role is Role.OPTIMIZER)
    return list(dict.fromkeys([(), state, leaves]))


def _refused(
    there: Problem,
    error: InfeasibleError,
    leaves: tuple[int, ...],
    asked: Asked,
    tiled: bool,
    time_limit: float,
    holds_for: HoldsFor,
) -> InfeasibleError:
    """The error in the user's terms; where leaves may leave, they must fit in again when the step ends."""
    end = at_the_end(there) + asked.beside
    told = explained(
        there,
        error,
        asked.budget,
        asked.beside,
        asked.able,
        tiled=tiled,
        time_limit=time_limit,
        holds_for=holds_for,
        only=asked.only,
    )
    if not leaves or end <= asked.budget:
        return told
    said = (
        f"no plan fits {format_bytes(asked.budget)} ({asked.budget} bytes): when the step ends, all that "
        f"left is back beside the gradients, which takes {format_bytes(end)} ({end} bytes); give more than "
        "that, or take a model or an optimiser that needs less"
    )
    return InfeasibleError(
        said,
        budget=asked.budget,
        smallest_budget=max(end, told.smallest_budget),
        floor=max(end, told.floor),
        proven=True,
    )


def _problem(
    graph: Graph, costs: Costs, able: Collection[int], *, fine: bool
) -> tuple[Problem, list[list[int]]]:
    """The problem in program order or in a lean one, and the other of the two.

    The lean one comes first where it needs less; the other is given by the numbers of the first.
    """
    problem = build_problem(
        graph, costs.seconds, workspace_bytes=costs.workspace_bytes, able=able, short=costs.short, fine=fine
    )
    order = lean_order(problem)
    if order == sorted(order):
        return problem, []
    other = in_order(problem, order)
    before, after = evaluate(problem, ()), evaluate(other, ())
    if after.peak > before.peak or sum(after.live) >= sum(before.live):
        return problem, [order]
    place = {op: v for v, op in enumerate(order)}
    return other, [[place[op] for op in range(len(order))]]


def _holds_for(problem: Problem, only: Collection[str]) -> HoldsFor:
    """What is proven of a plan with these means holds for these programs."""
    once = "recompute" in only and not all(problem.asked)
    return HoldsFor.BACKWARD_ONCE if once else HoldsFor.EVERY_ORDER


def _with_smallest(problem: Problem, found: Found, seconds: float, seed: int) -> Found:
    """The same, with the smallest budget that could be found; an interrupt ends the looking, not the plan."""
    try:
        better = smallest_budget(problem, time_limit=seconds, seed=seed)
    except KeyboardInterrupt:
        return replace(found, interrupted=True)
    better = replace(better, budget=max(better.budget, at_the_end(problem)))
    return replace(found, smallest=min(found.smallest, better, key=lambda one: one.budget))


def _plan(
    graph: Graph, costs: Costs, found: Found, program: Program, asked: Asked, holds_for: HoldsFor
) -> Plan:
    workspace, beside = costs.workspace_bytes, asked.beside
    timeline = played(graph, costs, program, asked.link)
    check(
        graph,
        program,
        budget=asked.budget - beside,
        workspace_bytes=workspace,
        offload=asked.offload,
        able=asked.able,
    )
    plain_seconds = costs.plain_seconds(graph)
    everything = sum(costs.seconds)
    planned = sum(timeline.seconds) if timeline.seconds else everything
    needed = everything - sum(costs.seconds[k] for k in skippable(graph))
    bound = needed + found.bound_seconds
    if planned < bound <= planned * (1 + _SUMMING):
        bound = planned
    base = plain_seconds or 1.0
    return Plan(
        budget_bytes=asked.budget,
        plain=Side(asked.plain_peak, everything),
        predicted=Side(timeline.peak_bytes + beside, planned),
        overhead=(planned - everything) / base,
        bound=Bound(bound, (bound - everything) / base, holds_for),
        gap=_gap(planned, bound),
        smallest_budget_bytes=min(found.smallest.budget, timeline.peak_bytes) + beside,
        decisions=decisions_of(graph, program),
        solve_seconds=found.solve_seconds,
        checked=True,
        method=found.method,
        cost=costs.origin,
        only=asked.only,
        beside_bytes=beside,
        graph=graph,
        program=program,
        workspace_bytes=tuple(costs.workspace_bytes),
        seconds=costs.seconds,
        short=dict(costs.short),
        able=asked.able,
        offload=asked.offload,
        resident_bytes=Memory(graph).resident_bytes + beside,
        interrupted=found.interrupted,
        link=asked.link,
        disturbed=costs.disturbed,
    )


def _gap(planned: float, bound: float) -> float:
    """What may be left to gain, as a share of the planned time; rounding is none."""
    left = max(0.0, planned - bound)
    return left / planned if left > _ROUNDING * planned else 0.0
