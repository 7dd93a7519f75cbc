"""Second runs that start from what the first one saved: cheaper, planned to the optimum, and checked."""

import functools

import msgspec
import pytest

from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Phase
from lowtide.plan.bounds import smallest_conceivable
from lowtide.plan.check import check
from lowtide.plan.problem import build_problem
from lowtide.plan.program import Drop, Program, Run
from lowtide.plan.schedule import evaluate
from lowtide.plan.search import search
from lowtide.plan.simulate import simulate
from tests.plan.optimum import optimum
from tests.plan.random_steps import random_step

replace = msgspec.structs.replace


def case(seed):
    """A random step in which operators with two results can run again from the second one, in a fourth of the time."""
    graph, seconds, workspace, _ = random_step(seed, (4, 7), charges=False)
    both = [k for k, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and len(op.outputs) == 2]
    ops = tuple(
        replace(op, attributes=op.attributes | {"short": [1]}) if k in both else op
        for k, op in enumerate(graph.ops)
    )
    return replace(graph, ops=ops), seconds, workspace, {k: seconds[k] / 4 for k in both}


CASES = [seed for seed in range(40) if case(seed)[3]][:6]


@pytest.mark.parametrize("seed", CASES)
def test_small_problems_with_short_runs_are_solved_to_their_optimum(seed):
    graph, seconds, workspace, short = case(seed)
    problem = build_problem(graph, seconds, workspace_bytes=workspace, short=short)
    floor, peak = smallest_conceivable(problem), evaluate(problem, ()).peak
    for k in range(2):
        budget = int(floor + (peak - floor) * (k + 1) / 4)
        best = optimum(problem, budget)
        if best is None:
            with pytest.raises(InfeasibleError):
                search(problem, budget)
            continue
        found = search(problem, budget)
        assert (found.cost, found.bound <= best) == (best, True)
        timeline = simulate(graph, found.program, workspace_bytes=workspace, seconds=seconds, short=short)
        assert timeline.peak_bytes <= budget
        assert sum(timeline.seconds) - sum(seconds) == pytest.approx(problem.seconds(found.cost))
        check(graph, found.program, budget=budget, workspace_bytes=workspace)


def test_some_of_these_plans_have_short_runs():
    found = [plan_of(seed) for seed in CASES]
    assert sum(line.short for program in found for line in program.instructions if isinstance(line, Run)) >= 3


@functools.cache
def plan_of(seed):
    graph, seconds, workspace, short = case(seed)
    problem = build_problem(graph, seconds, workspace_bytes=workspace, short=short)
    floor, peak = smallest_conceivable(problem), evaluate(problem, ()).peak
    for k in range(4):
        try:
            return search(problem, int(floor + (peak - floor) * k / 4), time_limit=1).program
        except InfeasibleError:
            continue
    raise AssertionError


def short_line(program):
    lines = program.instructions
    return next((k for k, line in enumerate(lines) if isinstance(line, Run) and line.short), None)


def test_the_checker_refuses_a_short_run_that_cannot_be():
    seed = next(seed for seed in CASES if short_line(plan_of(seed)) is not None)
    graph, program = case(seed)[0], plan_of(seed)
    at = short_line(program)
    lines, cut = list(program.instructions), len(program.forward)
    check(graph, program)

    def with_lines(changed, forward=cut):
        return Program(tuple(changed[:forward]), tuple(changed[forward:]))

    op = graph.ops[lines[at].op]
    first = next(k for k, line in enumerate(lines) if isinstance(line, Run) and line.op == lines[at].op)
    early = [*lines[:first], Run(lines[at].op, short=True), *lines[first + 1 :]]
    with pytest.raises(PlanError, match="from what it saved, which it cannot"):
        check(graph, with_lines(early))
    lost = [*lines[:at], Drop((op.outputs[1],)), *lines[at:]]
    with pytest.raises(PlanError, match="which is not there"):
        check(graph, with_lines(lost, cut + (at < cut)))
    plain = tuple(replace(one, attributes={}) for one in graph.ops)
    with pytest.raises(PlanError, match="from what it saved, which it cannot"):
        check(replace(graph, ops=plain), program)
