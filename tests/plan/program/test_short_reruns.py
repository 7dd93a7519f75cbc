"""Second runs that start from what the first one saved: cheaper, planned to the optimum, and checked."""

import functools

import msgspec
import pytest

from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Graph, Op, Phase, Tensor
from lowtide.plan.check.checker import check
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Drop, Program, Run
from lowtide.plan.program.short_reruns import with_joined
from lowtide.plan.program.simulate import simulate
from lowtide.plan.recompute.smallest_budget import lowest_in_order
from tests.plan.optimum import optimum
from tests.plan.random_steps import random_step
from tests.planning import searched

replace = msgspec.structs.replace


def case(seed):
    """A random step in which operators with two results can run again from the second one, in a fourth of the time."""
    graph, seconds, workspace, _ = random_step(seed, (4, 7), charges=False)
    both = [k for k, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and len(op.outputs) == 2]
    ops = tuple(replace(op, short=(1,)) if k in both else op for k, op in enumerate(graph.ops))
    return replace(graph, ops=ops), seconds, workspace, {k: seconds[k] / 4 for k in both}


CASES = [seed for seed in range(40) if case(seed)[3]][:6]


@pytest.mark.parametrize("seed", CASES)
def test_small_problems_with_short_runs_are_solved_at_least_to_the_optimum_of_program_order(seed):
    graph, seconds, workspace, short = case(seed)
    problem = build_problem(graph, seconds, workspace_bytes=workspace, short=short)
    floor, peak = lowest_in_order(problem), evaluate(problem, ()).peak
    for k in range(2):
        budget = int(floor + (peak - floor) * (k + 1) / 4)
        best = optimum(problem, budget)  # in program order
        try:
            found = searched(problem, budget, time_limit=0.5)
        except InfeasibleError:
            assert best is None
            continue
        assert found.bound <= found.cost
        assert best is None or found.cost <= best
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
    floor, peak = lowest_in_order(problem), evaluate(problem, ()).peak
    for k in range(4):
        try:
            return searched(problem, int(floor + (peak - floor) * k / 4), time_limit=0.5).program
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
    plain = tuple(replace(one, short=(), updates=()) for one in graph.ops)
    with pytest.raises(PlanError, match="from what it saved, which it cannot"):
        check(replace(graph, ops=plain), program)


def chain(**fields):
    """A norm, a sum with another tensor, a ReLU."""
    tensors = tuple(Tensor(name, 8, shape=(2,), dtype="float32") for name in "xzysmr")
    ops = (
        Op("norm", "aten._native_batch_norm_legit", Phase.FORWARD, (0,), (2, 4), short=(1,)),
        Op("add", "aten.add", Phase.FORWARD, (2, 1), (3,), **fields),
        Op("relu", "aten.relu", Phase.FORWARD, (3,), (5,)),
    )
    return Graph(tensors, ops)


FIRST = (Run(0), Run(1, in_place=0), Drop((2,)), Run(2, in_place=0), Drop((3, 5)))
AGAIN = (Run(0, short=True), Run(1, in_place=0), Drop((2,)), Run(2, in_place=0))


def flags(program):
    return [line.short for line in program.instructions if isinstance(line, Run)]


def test_what_runs_for_the_first_time_is_not_part_of_a_short_run():
    joined = with_joined(chain(), Program((*FIRST, *AGAIN)), {0, 1, 2})
    assert flags(joined) == [False, False, False, True, True, True]
    early = Program((Run(0), Drop((2,)), *AGAIN))
    assert flags(with_joined(chain(), early, {0, 1, 2})) == [False, True, False, False]


def test_what_is_part_of_a_short_run_stays_so_when_operators_are_put_in_place():
    joined = with_joined(chain(), Program((*FIRST, *AGAIN)), {0, 1, 2})
    assert with_in_place(chain(), joined, ()).forward[-len(AGAIN) :] == joined.forward[-len(AGAIN) :]
    assert with_in_place(chain(), joined, (1, 2)) == joined


@pytest.mark.parametrize(
    ("changed", "graph"),
    [
        (AGAIN, chain(options={"alpha": 2})),
        ((Run(0, short=True), Run(2, in_place=0), Run(1, in_place=0)), chain()),
    ],
    ids=["a multiple", "another order"],
)
def test_the_checker_refuses_parts_that_one_run_does_not_have(changed, graph):
    lines = [replace(line, short=True) if isinstance(line, Run) else line for line in changed]
    check(chain(), Program((*FIRST, *(replace(x, short=True) if isinstance(x, Run) else x for x in AGAIN))))
    with pytest.raises(PlanError):
        check(graph, Program((*FIRST, *lines)))


@pytest.mark.parametrize("places", [[9], [0], "x", [[1]]])
def test_the_checker_refuses_outputs_that_there_are_not(places):
    graph = chain()
    norm = replace(graph.ops[0], short=tuple(places))
    with pytest.raises(PlanError, match="does not list outputs|from what it saved, which it cannot"):
        check(replace(graph, ops=(norm, *graph.ops[1:])), Program((*FIRST, *AGAIN)))
