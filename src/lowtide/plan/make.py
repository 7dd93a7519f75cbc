"""make_plan: from a graph, its costs and a budget to a Plan that was searched, simulated and checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Graph, Phase
from lowtide.plan.budget import Budget
from lowtide.plan.check import check
from lowtide.plan.in_place import with_in_place
from lowtide.plan.infeasible import explained
from lowtide.plan.lanes import Link
from lowtide.plan.plain import kept_throughout, store_all
from lowtide.plan.plan import Bound, Decisions, Plan, Side
from lowtide.plan.problem import Problem, build_problem
from lowtide.plan.program import Program, Run, Send
from lowtide.plan.reorder import early_order
from lowtide.plan.schedule import evaluate
from lowtide.plan.search import Found, Progress, search
from lowtide.plan.simulate import simulate
from lowtide.plan.smallest import smallest_budget

__all__ = ["Costs", "make_plan", "plain_peak"]


_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """What operators take, and where the figures come from."""

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...] = ()
    origin: str = "measured"
    forward_only: bool = False
    """Whether overhead is told against forward alone, as unit costs do: backward is free there."""

    def plain_seconds(self, graph: Graph) -> float:
        """The time that overhead is told against."""
        ops = enumerate(graph.ops)
        return sum(self.seconds[k] for k, op in ops if not self.forward_only or op.phase is Phase.FORWARD)


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
) -> Plan:
    """The fastest Program found whose peak, with what is beside it on the device, stays inside the budget.

    ``able`` names operators that may run in place; ``link`` is needed for offload; ``free_bytes`` is what the
    budget ``auto`` stands for. An InfeasibleError names the smallest budget that works; for a plan that was
    found, it is looked for in ``look_for_smallest`` more seconds. An interrupt (Ctrl-C) gives the best plan
    so far, if there is one.
    """
    problem = _problem(graph, costs, able)
    peak = plain_peak(graph, costs, able) + beside_bytes
    size = budget.resolve(peak, free_bytes)
    try:
        found = search(
            problem,
            size - beside_bytes,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
            only=only,
            link=link,
        )
    except InfeasibleError as error:
        raise explained(problem, error, size, beside_bytes, able) from None
    except MemoryError as error:
        raise PlanError("the host has no memory left to search for a plan in; free some") from error
    if look_for_smallest and found.smallest.budget > found.smallest.floor and not found.interrupted:
        found = _with_smallest(problem, found, look_for_smallest, seed)
    program = with_in_place(graph, found.program, able)
    return _plan(
        graph, costs, found, program, size, peak, tuple(only), beside_bytes, tuple(sorted(able)), link
    )


def _problem(graph: Graph, costs: Costs, able: Collection[int]) -> Problem:
    """The problem, with storages released early where another order of the operators does that."""
    workspace = costs.workspace_bytes
    problem = build_problem(graph, costs.seconds, workspace_bytes=workspace, able=able)
    order = early_order(problem)
    if order == list(problem.ops):
        return problem
    other = build_problem(graph, costs.seconds, workspace_bytes=workspace, able=able, order=order)
    before, after = evaluate(problem, ()), evaluate(other, ())
    return other if after.peak <= before.peak and sum(after.live) < sum(before.live) else problem


def _with_smallest(problem: Problem, found: Found, seconds: float, seed: int) -> Found:
    """The same, with the smallest budget that could be found; an interrupt ends the looking, not the plan."""
    try:
        better = smallest_budget(problem, time_limit=seconds, seed=seed)
    except KeyboardInterrupt:
        return replace(found, interrupted=True)
    return replace(found, smallest=min(found.smallest, better, key=lambda one: one.budget))


def _plan(
    graph: Graph,
    costs: Costs,
    found: Found,
    program: Program,
    budget: int,
    peak: int,
    only: tuple[str, ...],
    beside: int,
    able: tuple[int, ...],
    link: Link | None,
) -> Plan:
    timeline = simulate(
        graph, program, workspace_bytes=costs.workspace_bytes, seconds=costs.seconds, link=link
    )
    check(graph, program, budget=budget - beside, workspace_bytes=costs.workspace_bytes)
    plain_seconds = costs.plain_seconds(graph)
    everything = sum(costs.seconds)
    planned = sum(timeline.seconds) if timeline.seconds else everything
    bound = everything + found.bound_seconds
    base = plain_seconds or 1.0
    return Plan(
        budget_bytes=budget,
        plain=Side(peak, everything),
        predicted=Side(timeline.peak_bytes + beside, planned),
        overhead=(planned - everything) / base,
        bound=Bound(bound, found.bound_seconds / base),
        gap=_gap(planned, bound),
        smallest_budget_bytes=found.smallest.budget + beside,
        decisions=_decisions(graph, program),
        solve_seconds=found.solve_seconds,
        checked=True,
        method=found.method,
        cost=costs.origin,
        only=only,
        beside_bytes=beside,
        graph=graph,
        program=program,
        workspace_bytes=tuple(costs.workspace_bytes),
        seconds=costs.seconds,
        able=able,
        interrupted=found.interrupted,
        link=link,
    )


def _gap(planned: float, bound: float) -> float:
    """What may be left to gain, as a share of the planned time; rounding is none."""
    left = max(0.0, planned - bound)
    return left / planned if left > _ROUNDING * planned else 0.0


def _decisions(graph: Graph, program: Program) -> Decisions:
    """What became of the storages that forward makes and backward reads."""
    storage = graph.storages()
    kept = {storage[t] for t in kept_throughout(graph)}
    forward = {storage[t] for op in graph.ops if op.phase is Phase.FORWARD for t in op.outputs}
    later = {storage[t] for op in graph.ops if op.phase is not Phase.FORWARD for t in op.reads}
    asked = (forward & later) - kept
    again = {
        storage[t]
        for line in program.backward
        if isinstance(line, Run) and graph.ops[line.op].phase is Phase.FORWARD
        for t in graph.ops[line.op].outputs
    }
    sent = {storage[line.tensor] for line in program.instructions if isinstance(line, Send)}
    in_place = sum(isinstance(line, Run) and line.in_place is not None for line in program.instructions)
    return Decisions(
        kept=len(asked - again - sent),
        recomputed=len((asked & again) - sent),
        offloaded=len(asked & sent),
        in_place=in_place,
    )
