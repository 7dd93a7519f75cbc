"""make_plan: from a graph, its costs and a budget to a Plan that was searched, simulated and checked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Graph, Role, Timeline
from lowtide.plan.bounds.communication import longest_chain
from lowtide.plan.bounds.relaxation import skippable
from lowtide.plan.check.checker import check
from lowtide.plan.make.candidates import (
    Tried,
    at_the_end,
    at_the_lowest,
    plain_time,
    played,
    stored,
    with_leaves_away,
)
from lowtide.plan.make.search import restricted, search
from lowtide.plan.offload.parameters import movable, streamed
from lowtide.plan.problem.problem import Problem, build_problem
from lowtide.plan.problem.reorder import in_order, lean_order
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.beside import with_beside
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import Memory
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.recompute.found import Found
from lowtide.plan.recompute.smallest_budget import smallest_budget
from lowtide.plan.request import DeviceRoom, PlanRequest, PlanTask
from lowtide.plan.result.decisions import decisions_of
from lowtide.plan.result.infeasible import explained
from lowtide.plan.result.plan import Bound, HoldsFor, Plan, Side
from lowtide.units import format_bytes

__all__ = ["make_plan", "plain_peak", "plan_with"]


_ROUNDING = 1e-6
"""A plan that takes so much more than its bound, as a share of the step, is called optimal."""
_SUMMING = 1e-9
"""What adding up seconds may be wrong by, as a share of them."""
_NO_DEVICE = DeviceRoom()


def plain_peak(graph: Graph, costs: Costs, able: Collection[int] = (), program: Program | None = None) -> int:
    """What storing everything takes; ``program`` does so, where it is known."""
    program = program or with_in_place(graph, store_all(graph), able)
    peak = simulate(graph, program, workspace_bytes=costs.workspace_bytes).peak_bytes
    return peak if graph.ops else Memory(graph).resident_bytes


def make_plan(
    graph: Graph,
    costs: Costs,
    request: PlanRequest,
    room: DeviceRoom = _NO_DEVICE,
    *,
    able: Collection[int] = (),
    turned: Callable[[Program], Program] = lambda program: program,
) -> Plan:
    """The fastest Program found whose peak, with what is outside the step, stays inside the budget.

    ``able`` names operators that may run in place. ``turned`` puts loops in the place of operators that stand
    for them. Tiles are planned elsewhere. An InfeasibleError names the smallest budget that works. An
    interrupt (Ctrl-C) gives the best plan so far, if there is one.
    """
    began = time.monotonic()
    problem, others = _problem(graph, costs, able, fine=room.link is not None)
    problem = restricted(problem, request.methods)
    peak = plain_peak(graph, costs, able) + room.outside_bytes
    size = request.budget.resolve(peak, room.free_bytes)
    task = PlanTask(request, room, size, peak, tuple(sorted(able)))
    holds_for = _holds_for(problem, task.methods)
    fits = peak <= size  # whatever a search would find is no faster
    if not fits and not problem.ops:
        raise _nothing_to_save(graph, costs, stored(problem, costs, task), task, holds_for)
    chosen = [] if fits else _sets(graph, movable(graph, request.offload, room.pinned))
    tried = [stored(problem, costs, task)] if fits else []
    limits = request.limits.within(request.limits.time_limit / max(1, len(chosen)))
    bound = 0
    refused: list[tuple[Problem, InfeasibleError, tuple[int, ...]]] = []
    for leaves in chosen:
        there = streamed(problem, leaves, crossing=request.crossing) if leaves else problem
        try:
            found = search(
                there,
                task.step_budget,
                limits,
                methods=task.methods,
                link=room.link,
                others=others if request.crossing or not leaves else (),
            )
            if leaves == chosen[-1]:  # only where all of them may leave the bound holds for any plan
                bound = found.bound
            tried.append(with_leaves_away(there, costs, found, leaves, task))
        except InfeasibleError as error:
            try:
                if not leaves:
                    raise
                tried.append(at_the_lowest(there, costs, error, leaves, task, limits))
            except InfeasibleError as lowest:
                refused.append((there, lowest, leaves))
        except MemoryError as error:
            raise PlanError("the host has no memory left to search for a plan in; free some") from error
        if tried and tried[-1].found.interrupted:
            break
    if not tried:
        there, last, leaves = refused[-1]
        told = _refused(there, last, leaves, task, holds_for)
        works = replace(task, budget=told.smallest_budget)
        with contextlib.suppress(InfeasibleError):
            least = at_the_lowest(there, costs, last, leaves, works, limits)
            told.plan = _plan(graph, costs, _Proven.of(least.found), turned(least.program), works, holds_for)
        told.plain_peak, told.plain_seconds = peak, plain_time(graph, costs, able)
        told.solve_seconds = time.monotonic() - began
        raise told
    best = min(tried, key=lambda one: one.seconds)
    found = replace(best.found, bound=min(bound, best.found.cost))
    seconds = request.smallest_seconds
    if seconds and found.smallest.budget > found.floor and not found.interrupted:
        found = _with_smallest(best.problem, found, seconds, request.limits.seed)
    return _plan(graph, costs, _Proven.of(found), turned(best.program), task, holds_for)


def plan_with(
    graph: Graph, costs: Costs, program: Program, task: PlanTask, method: str = "given"
) -> Plan | None:
    """The Plan that runs a step by a program that is given; None where that is more than the budget.

    A PlanError says that the program is not valid for the step.
    """
    timeline = played(graph, costs, program, task.room.link)
    if timeline.peak_bytes > task.step_budget:
        return None
    proven = _Proven(0.0, timeline.peak_bytes, method, 0.0)
    return _plan(graph, costs, proven, program, task, HoldsFor.EVERY_ORDER, timeline)


def _nothing_to_save(
    graph: Graph, costs: Costs, one: Tried, task: PlanTask, holds_for: HoldsFor
) -> InfeasibleError:
    """The error for a step that runs nothing but views, whose inputs are more than the budget."""
    peak = task.plain_peak
    told = InfeasibleError(
        f"no plan fits {format_bytes(task.budget)} ({task.budget} bytes): the inputs of the step alone take "
        f"{format_bytes(peak)} ({peak} bytes); give more, or take a smaller batch",
        budget=task.budget,
        smallest_budget=peak,
        floor=peak,
        proven=True,
    )
    proven = _Proven.of(one.found)
    told.plan = _plan(graph, costs, proven, one.program, replace(task, budget=peak), holds_for)
    told.plain_peak = peak
    return told


def _sets(graph: Graph, leaves: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Which leaves may leave in each try: none, optimiser state, which nobody reads, all."""
    state = tuple(leaf for leaf in leaves if graph.tensors[leaf].role is Role.OPTIMIZER)
    return list(dict.fromkeys([(), state, leaves]))


def _refused(
    there: Problem, error: InfeasibleError, leaves: tuple[int, ...], task: PlanTask, holds_for: HoldsFor
) -> InfeasibleError:
    """The error in the user's terms; where leaves may leave, they must fit in again when the step ends."""
    end = at_the_end(there) + task.room.outside_bytes
    told = explained(there, error, task, holds_for)
    if not leaves or end <= task.budget:
        return told
    said = (
        f"no plan fits {format_bytes(task.budget)} ({task.budget} bytes): when the step ends, all that "
        f"left is back beside the gradients, which takes {format_bytes(end)} ({end} bytes); give more than "
        "that, or take a model or an optimiser that needs less"
    )
    return InfeasibleError(
        said,
        budget=task.budget,
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


def _holds_for(problem: Problem, methods: Collection[str]) -> HoldsFor:
    """What is proven of a plan with these methods holds for these programs."""
    once = "recompute" in methods and not all(problem.asked)
    return HoldsFor.BACKWARD_ONCE if once else HoldsFor.EVERY_ORDER


def _with_smallest(problem: Problem, found: Found, seconds: float, seed: int) -> Found:
    """The same, with the smallest budget that could be found; an interrupt ends the looking, not the plan."""
    try:
        better = smallest_budget(problem, time_limit=seconds, seed=seed)
    except KeyboardInterrupt:
        return replace(found, interrupted=True)
    better = replace(better, budget=max(better.budget, at_the_end(problem)))
    return replace(found, smallest=min(found.smallest, better, key=lambda one: one.budget))


@dataclass(frozen=True, slots=True)
class _Proven:
    """What is known of a program besides what it does."""

    bound_seconds: float
    """Seconds that every schedule inside the budget adds at least."""
    smallest: int
    """A budget that is known to work."""
    method: str
    solve_seconds: float
    interrupted: bool = False
    stopped_by_time: bool = False

    @classmethod
    def of(cls, found: Found) -> _Proven:
        """What a search found out."""
        seconds, smallest = found.bound_seconds, found.smallest.budget
        ended = found.interrupted, found.stopped_by_time
        return cls(seconds, smallest, found.method, found.solve_seconds, *ended)


def _plan(
    graph: Graph,
    costs: Costs,
    found: _Proven,
    program: Program,
    task: PlanTask,
    holds_for: HoldsFor,
    timeline: Timeline | None = None,
) -> Plan:
    workspace, outside = costs.workspace_bytes, task.room.outside_bytes
    given, program = program, with_beside(graph, program, workspace, costs.on_their_way)
    if timeline is None or program != given:
        timeline = played(graph, costs, program, task.room.link)
    peak = timeline.peak_bytes if graph.ops else Memory(graph).resident_bytes
    check(
        graph,
        program,
        budget=task.step_budget,
        workspace_bytes=workspace,
        offload=task.request.offload,
        able=task.able,
    )
    everything = plain_time(graph, costs, task.able)
    planned = sum(timeline.seconds) if timeline.seconds else everything
    left_out = skippable(graph)
    needed = sum(costs.seconds) - sum(costs.seconds[k] for k in left_out)
    bound = max(needed + found.bound_seconds, longest_chain(graph, costs, left_out))
    if planned < bound <= planned * (1 + _SUMMING):
        bound = planned
    base = (costs.plain_seconds(graph) if costs.forward_only else everything) or 1.0
    return Plan(
        budget_bytes=task.budget,
        plain=Side(task.plain_peak, everything),
        predicted=Side(peak + outside, planned),
        overhead=(planned - everything) / base,
        bound=Bound(bound, (bound - everything) / base, holds_for),
        gap=_gap(planned, bound),
        smallest_budget_bytes=min(found.smallest, peak) + outside,
        decisions=decisions_of(graph, program),
        solve_seconds=found.solve_seconds,
        checked=True,
        method=found.method,
        cost=costs.origin,
        only=task.methods,
        beside_bytes=outside,
        graph=graph,
        program=program,
        workspace_bytes=tuple(costs.workspace_bytes),
        seconds=costs.seconds,
        short=dict(costs.short),
        wire_seconds=dict(costs.wire_seconds),
        able=task.able,
        offload=task.request.offload,
        resident_bytes=Memory(graph).resident_bytes + outside,
        interrupted=found.interrupted,
        stopped_by_time=found.stopped_by_time,
        link=task.room.link,
        disturbed=costs.disturbed,
    )


def _gap(planned: float, bound: float) -> float:
    """What may be left to gain, as a share of the planned time; rounding is none."""
    left = max(0.0, planned - bound)
    return left / planned if left > _ROUNDING * planned else 0.0
