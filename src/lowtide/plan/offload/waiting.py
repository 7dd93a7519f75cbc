"""What a plan with trips to the host takes: running again, and waiting for copies, by simulation."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from lowtide.plan.problem.lower import lower
from lowtide.plan.problem.problem import Problem
from lowtide.plan.problem.schedule import Event
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.simulate import simulate

__all__ = ["overhead", "waits_of"]


def overhead(problem: Problem, events: Iterable[Event], link: Link) -> int:
    """Time beyond that of the plain step: running again, and waiting for copies."""
    seconds = _seconds(problem)
    program = lower(problem, events)
    timeline = simulate(problem.graph, program, seconds=seconds, short=_short(problem), link=link)
    return max(0, ceil((sum(timeline.seconds) - sum(seconds)) * problem.scale * (1 - 1e-9)))


def waits_of(problem: Problem, events: Iterable[Event], link: Link) -> dict[int, float]:
    """Seconds that are spent waiting for copies, by storage."""
    lanes = Lanes(problem.graph, link)
    program, seconds = lower(problem, events), _seconds(problem)
    simulate(problem.graph, program, seconds=seconds, short=_short(problem), lanes=lanes)
    number = {tensor: s for s, tensor in enumerate(problem.owner)}
    return {number[tensor]: wait for tensor, wait in lanes.waited.items()}


def _seconds(problem: Problem) -> list[float]:
    """What each operator of the graph takes."""
    seconds = [0.0] * len(problem.graph.ops)
    for op, spent in zip(problem.ops, problem.time, strict=True):
        if op >= 0:
            seconds[op] = problem.seconds(spent)
    return seconds


def _short(problem: Problem) -> dict[int, float]:
    """Seconds of short second runs, by operator of the graph."""
    pairs = zip(problem.ops, problem.repeat, strict=True)
    return {op: problem.seconds(spent) for op, spent in pairs if op in problem.short}
