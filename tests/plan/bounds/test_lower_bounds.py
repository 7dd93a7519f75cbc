"""What is proven holds for every program that the checker accepts, not only for those the planner makes."""

import pytest
from msgspec.structs import replace

from lowtide.errors import InfeasibleError
from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate
from lowtide.plan.bounds.lower_bounds import smallest_conceivable
from lowtide.plan.bounds.relaxation import relax, skippable
from lowtide.plan.budget import Budget
from lowtide.plan.check.checker import check
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simulate import simulate
from lowtide.plan.recompute.smallest_budget import lowest_in_order
from lowtide.plan.result.plan import HoldsFor
from tests import fuzz_bounds
from tests.plan.every_order import EveryOrder
from tests.plan.random_steps import random_step
from tests.plan.tiny_steps import tiny_step
from tests.planning import plan_for, solved

F, B = Phase.FORWARD, Phase.BACKWARD


def step(sizes, ops, *, roles=None, gradient_of=None, alias=None, returned=()):
    """A graph: bytes by tensor, operators as phase, inputs and outputs."""
    tensors = tuple(
        Tensor(
            f"t{k}",
            size,
            (roles or {}).get(k, Role.ACTIVATION),
            gradient_of=(gradient_of or {}).get(k),
            alias=(alias or {}).get(k),
        )
        for k, size in enumerate(sizes)
    )
    made = tuple(Op(f"op{k}", "k", *one) for k, one in enumerate(ops))
    return validate(Graph(tensors, made, returned=tuple(returned)))


def reordered_step():
    """In its own order it takes 34 s inside 29 bytes; with gradients released early, 41 s."""
    sizes = [3, 7, 2, 1, 10, 1, 1, 10, 2, 1, 7]
    ops = [
        (F, (0,), (1,)), (F, (1,), (2,)), (F, (2, 3), (4,)), (F, (4,), (5,)), (B, (), (6,)),
        (B, (6, 4, 5), (7,)), (B, (7,), (8,)), (B, (7,), (9,)), (B, (8, 1, 2), (10,)),
    ]  # fmt: skip
    graph = step(sizes, ops, roles={0: Role.INPUT, 3: Role.PARAMETER}, gradient_of={9: 3})
    return graph, (5.0, 5.0, 5.0, 10.0, 0.0, 2.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(("budget", "seconds"), [(29, 34.0), (28, 34.0), (27, 39.0), (26, 39.0)])
def test_a_plan_is_optimal_in_every_order(budget, seconds):
    graph, times = reordered_step()
    plan = plan_for(graph, Costs(times), Budget(bytes=budget))
    assert (plan.predicted.seconds, plan.gap) == (seconds, 0.0)
    assert plan.bound.seconds == pytest.approx(seconds)
    assert plan.bound.holds_for is HoldsFor.EVERY_ORDER
    assert "proven optimal by recomputation, in any order of the operators" in plan.explain()
    assert sum(times) + EveryOrder(graph, times).best(budget)[0] == seconds


def test_a_refusal_names_the_programs_it_is_proven_for():
    graph, times = reordered_step()
    with pytest.raises(
        InfeasibleError, match="none exists below 26 B.*in any order of the operators"
    ) as error:
        plan_for(graph, Costs(times), Budget(bytes=25), time_limit=2)
    assert (error.value.proven, error.value.smallest_budget, error.value.holds_for) == (
        True,
        26,
        "every order",
    )
    assert EveryOrder(graph, times).best(25) is None


def test_where_backward_is_free_nothing_is_proven_of_running_it_again():
    graph, times = reordered_step()
    free = tuple(t if op.phase is F else 0.0 for t, op in zip(times, graph.ops, strict=True))
    plan = plan_for(graph, Costs(free), Budget(bytes=28))
    assert plan.bound.holds_for is HoldsFor.BACKWARD_ONCE
    assert "with backward run once" in plan.explain()
    with pytest.raises(InfeasibleError, match="with backward run once"):
        plan_for(graph, Costs(free), Budget(bytes=20), time_limit=1)


# programs that no planner here makes: what is proven holds for them as well


def gradient_through_a_view():
    """A weight's gradient is a view: its storage is dropped and made again before the view is."""
    graph = step(
        [1, 1, 1, 10, 1, 10, 1],
        [(F, (0,), (1,)), (B, (1,), (2,)), (B, (2,), (3, 4)), (B, (4,), (6,)), (B, (3,), (5,))],
        roles={0: Role.PARAMETER, 5: Role.GRADIENT},
        gradient_of={5: 0},
        alias={5: 3},
        returned=[1],
    )
    backward = (Run(1), Run(2), Drop((3,)), Run(3), Drop((4, 6)), Run(2), Run(4))
    return graph, Program((Run(0),), backward), (0, 0, 0, 20, 0)


def made_again_before_it_is_updated():
    """What is updated in the end is dropped meanwhile, as it was before the update."""
    graph = step(
        [1, 10, 1, 1],
        [(F, (0,), (1,)), (F, (1,), (2,)), (F, (2,), (3,)), (F, (1, 3), (1,))],
        roles={0: Role.INPUT},
        returned=[1],
    )
    lines = (Run(0), Run(1), Drop((1,)), Run(2), Drop((2,)), Run(0), Run(3))
    return replace(graph, returned=()), Program(lines), (0, 0, 20, 0)


def a_view_that_nobody_reads():
    """An operator that only gives a view, of two storages it reads, does not run at all."""
    graph = step(
        [1, 10, 10, 10],
        [(F, (0,), (1,)), (F, (0,), (2,)), (F, (1, 2), (3,))],
        roles={0: Role.INPUT},
        alias={3: 1},
    )
    return graph, Program((Run(0), Drop((1,)), Run(1))), ()


WITNESSES = [
    gradient_through_a_view,
    made_again_before_it_is_updated,
    a_view_that_nobody_reads,
]


@pytest.mark.parametrize("witness", WITNESSES)
def test_nothing_is_proven_against_a_program_that_exists(witness):
    graph, program, workspace = witness()
    seconds = [1.0] * len(graph.ops)
    peak = check(graph, program, workspace_bytes=workspace).peak_bytes
    took = sum(simulate(graph, program, seconds=seconds).seconds)
    problem = build_problem(graph, seconds, workspace_bytes=workspace)
    assert smallest_conceivable(relax(problem)) <= peak
    planned = solved(problem, peak, range(len(problem.ops)))
    assert lowest_in_order(problem) > peak or not planned.feasible, "the planner finds it too"
    try:
        plan = plan_for(graph, Costs(tuple(seconds), tuple(workspace)), Budget(bytes=peak), time_limit=1)
    except InfeasibleError as error:
        assert not error.proven
        assert error.floor <= peak
    else:
        assert plan.bound.seconds <= took


# copies to the host


def two_on_the_host(view_seconds):
    """Two storages must be away while operator 3 runs, and the lane to the host is slow."""
    graph = step(
        [1, 10, 1, 10, 1, 1, 1, 1, 1],
        [
            (F, (0,), (1, 2)), (F, (0,), (3, 4)), (F, (0,), (5,)), (F, (2, 4, 5), (6,)), (B, (3,), (7,)),
            (B, (1,), (8,)),
        ],
        roles={0: Role.INPUT},
        alias={5: 0},
    )  # fmt: skip
    seconds = (1.0, 1.0, view_seconds, 1.0, 1.0, 1.0)
    program = Program(
        (Run(0), Send(1), Run(1), Send(3), Run(2), Drop((1, 3)), Run(3), Drop((2, 4, 6))),
        (Fetch(3), Run(4), Drop((3, 7)), Fetch(1), Run(5)),
    )
    return graph, seconds, program, (0, 0, 0, 25, 0, 0)


@pytest.mark.parametrize(
    ("link", "view_seconds"),
    [
        (Link(1.0, 1e9), 0.0),
        (Link(1.0, 1e9, 1.0), 0.0),  # a copy goes on while the next is handed over
        (Link(1.0, 1e9), 5.0),  # and while views are made
        (Link(1.0, 1.0, 0.5, 0.01), 2.0),
    ],
)
def test_no_bound_with_copies_is_above_a_plan(link, view_seconds):
    graph, seconds, program, workspace = two_on_the_host(view_seconds)
    peak = check(graph, program, workspace_bytes=workspace).peak_bytes
    took = sum(simulate(graph, program, workspace_bytes=workspace, seconds=seconds, link=link).seconds)
    costs = Costs(seconds, workspace)
    plan = plan_for(graph, costs, Budget(bytes=peak), only=["offload"], link=link, time_limit=1)
    took = min(took, plan.predicted.seconds)
    assert 20 < plan.bound.seconds <= took
    problem = build_problem(graph, seconds, workspace_bytes=workspace, again=(), fine=True)
    for cut in range(len(problem.ops)):
        result = solved(problem, peak, [cut], link=link, relaxation=relax(problem))
        assert result.feasible
        assert sum(seconds) + problem.seconds(result.bound) <= took


def test_times_are_rounded_down():
    graph, _, workspace, _ = random_step(1, (4, 6))
    for seconds in ([1 / 3, 1e-7, 0.1, 2.0], [1.0, 2.0, 3.0, 1.0]):
        times = (seconds * len(graph.ops))[: len(graph.ops)]
        problem = build_problem(graph, times, workspace_bytes=workspace)
        for op, units in zip(problem.ops, problem.time, strict=True):
            exact = times[op] * problem.scale
            assert units <= exact * (1 + 1e-9)
            assert exact < units + 1


def test_what_nobody_needs_is_left_out():
    graph = step(
        [1, 5, 5, 5, 1],
        [(F, (0,), (1,)), (F, (1,), (2,)), (F, (2,), (3,)), (F, (2,), (4,))],
        roles={0: Role.INPUT},
        alias={2: 1, 3: 2},
    )
    assert skippable(graph) == {2}


# brute force


@pytest.mark.parametrize("seed", range(14))
def test_the_reference_gives_programs_that_may_run(seed):
    graph, seconds, workspace, able = tiny_step(seed)
    truth = EveryOrder(graph, seconds, workspace, able)
    plain = simulate(graph, Program(tuple(map(Run, range(len(graph.ops))))), workspace_bytes=workspace)
    charged = graph.updated or any(op.random for op in graph.ops)
    for share in (0.8, 0.6):
        budget = int(plain.peak_bytes * share)
        best = truth.best(budget)
        if best is not None:
            program = truth.program(best[1])
            check(graph, program, budget=None if charged else budget, workspace_bytes=workspace)
            took = simulate(graph, program, workspace_bytes=workspace, seconds=seconds).seconds
            assert sum(took) == pytest.approx(sum(seconds) + best[0])


@pytest.mark.parametrize("first", [0, 16])
def test_proofs_against_every_order(first):
    told = fuzz_bounds.run(8, first)
    assert sum(told.values()) == 8
    assert told["recompute optimal"] >= 1


@pytest.mark.parametrize("number", [7083, 8431])
def test_what_comes_from_the_host_may_arrive_behind_the_next_cut(number):
    """It has its memory at the cut, and is copied while the operator of the cut runs.

    A bound above the best program fails in there; a slow machine may find no proof in time.
    """
    assert set(fuzz_bounds.run(1, number)) <= {"offload optimal", "offload not proven"}
