"""Programs that were tried for a budget: stored, as they were found, or with leaves away."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import ceil

from lowtide.errors import InfeasibleError
from lowtide.graph import RESIDENT_ROLES, Graph, Timeline
from lowtide.plan import time_shares
from lowtide.plan.bounds.lower_bounds import smallest_conceivable
from lowtide.plan.bounds.relaxation import relax
from lowtide.plan.offload.parameters import with_absences
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.memory import allocated_bytes
from lowtide.plan.program.short_reruns import with_joined
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.recompute.found import LOWEST, Found
from lowtide.plan.recompute.smallest_budget import Smallest, smallest_budget
from lowtide.plan.request import Limits, PlanTask

__all__ = ["Tried", "at_the_end", "at_the_lowest", "plain_time", "played", "stored", "with_leaves_away"]


@dataclass(frozen=True, slots=True)
class Tried:
    """A program inside the budget, with what it takes."""

    problem: Problem
    found: Found
    program: Program
    seconds: float


def stored(problem: Problem, costs: Costs, task: PlanTask) -> Tried:
    """The program that stores everything, which fits."""
    program = with_in_place(problem.graph, store_all(problem.graph), task.able)
    peak = task.plain_peak - task.room.outside_bytes
    found = Found(
        problem=problem,
        budget=task.step_budget,
        events=frozenset(),
        cost=0,
        bound=0,
        peak=peak,
        smallest=Smallest(peak, frozenset(), problem),
        floor=smallest_conceivable(relax(problem), offload="offload" in task.methods),
        method="plain",
        solve_seconds=0.0,
    )
    return Tried(problem, found, program, plain_time(problem.graph, costs, task.able))


def with_leaves_away(
    problem: Problem, costs: Costs, found: Found, leaves: tuple[int, ...], task: PlanTask
) -> Tried:
    """The program that was found, with leaves away where that is what keeps it inside the budget."""
    budget = task.step_budget
    program, timeline = _realised(problem.graph, costs, found, leaves, task, budget)
    if timeline.peak_bytes > budget:
        peak, floor = timeline.peak_bytes, at_the_end(problem)
        known = Smallest(peak, found.events, found.problem)
        raise InfeasibleError("", budget=budget, smallest_budget=peak, floor=floor, known=known)
    seconds = sum(timeline.seconds)
    if leaves:
        waited = (seconds - sum(costs.seconds)) * found.problem.scale * (1 - 1e-9)
        smallest = max(found.smallest.budget, at_the_end(problem))
        found = replace(
            found,
            cost=max(found.cost, ceil(waited)),
            method=f"{found.method}, leaves away",
            smallest=replace(found.smallest, budget=smallest),
        )
    return Tried(problem, found, program, seconds)


def at_the_lowest(
    problem: Problem,
    costs: Costs,
    error: InfeasibleError,
    leaves: tuple[int, ...],
    task: PlanTask,
    limits: Limits,
) -> Tried:
    """The schedule with the lowest peak, with leaves away; the error, told anew, says what that takes.

    Copies of leaves take their time, so a program may need more than the schedule that it comes from. What an
    error names is what a program was seen to take; asked for that, the same schedule is found here.
    """
    known = error.known
    if not isinstance(known, Smallest):
        effort = limits.time_limit
        limit = min(time_shares.SMALLEST_SECONDS, time_shares.SMALLEST * effort)
        known = smallest_budget(problem, time_limit=limit, seed=limits.seed, effort=effort)
    schedule = evaluate(known.problem, known.events)
    found = Found(
        problem=known.problem,
        budget=task.step_budget,
        events=known.events,
        cost=schedule.cost,
        bound=0,
        peak=schedule.peak,
        smallest=known,
        floor=error.floor,
        method=LOWEST,
        solve_seconds=0.0,
    )
    peaks = []
    for aim in (found.budget, known.budget):
        _, timeline = _realised(problem.graph, costs, found, leaves, task, aim)
        peaks.append(timeline.peak_bytes)
        if peaks[-1] <= found.budget:
            lower = aim < found.budget
            aimed = replace(task, budget=aim + task.room.outside_bytes) if lower else task
            return with_leaves_away(problem, costs, found, leaves, aimed)
    raise InfeasibleError(
        str(error),
        budget=error.budget,
        smallest_budget=max(min(peaks), at_the_end(problem)),
        floor=error.floor,
        proven=error.proven,
        known=known,
    ) from error


def _realised(
    graph: Graph,
    costs: Costs,
    found: Found,
    leaves: tuple[int, ...],
    task: PlanTask,
    budget: int,
) -> tuple[Program, Timeline]:
    """The schedule that was found as a program that aims at a budget, and what it does over time."""
    program = with_in_place(graph, found.program, task.able)
    program = with_joined(graph, program, costs.short) if costs.short else program
    if leaves:
        program = with_absences(
            graph,
            program,
            leaves,
            budget,
            costs,
            link=task.room.link,
            crossing=task.request.crossing,
        )
    return program, played(graph, costs, program, task.room.link)


def played(graph: Graph, costs: Costs, program: Program, link: Link | None) -> Timeline:
    """What a program does over time."""
    return simulate(
        graph,
        program,
        workspace_bytes=costs.workspace_bytes,
        seconds=costs.seconds,
        short=costs.short,
        lanes=Lanes(graph, link, costs.wire_seconds),
    )


def plain_time(graph: Graph, costs: Costs, able: Collection[int]) -> float:
    """What storing everything takes, with what waits for communications."""
    if not costs.wire_seconds:
        return sum(costs.seconds)
    return sum(played(graph, costs, with_in_place(graph, store_all(graph), able), None).seconds)


def at_the_end(problem: Problem) -> int:
    """Bytes when the step ends: leaves, all of them back, gradients and results."""
    back = problem.graph.tensors
    leaves = sum(allocated_bytes(t) for t in back if t.role in RESIDENT_ROLES and t.alias is None)
    kept = zip(problem.bytes, problem.kept, strict=True)
    return leaves + sum(size for size, stays in kept if stays)
