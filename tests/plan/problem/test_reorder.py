"""Operators in an order that releases storages early: the same values, and never a larger peak."""

import random

import pytest
from msgspec.structs import replace

from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.budget import parse_budget
from lowtide.plan.check.checker import check
from lowtide.plan.problem.lower import lower
from lowtide.plan.problem.precedence import bits, by_rank, precedence
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.reorder import in_order, lean_order, moved
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Run
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from tests.plan.offload.test_trips import values_after
from tests.plan.problem.test_schedule import some_events
from tests.plan.random_steps import random_step
from tests.planning import plan_for


def late_release(**fields):
    """Operator 3 could let go of the large tensor 2 before operator 2 takes memory."""
    sizes = [1, 1, 100, 50, 1]
    tensors = tuple(
        Tensor(f"t{k}", size, Role.INPUT if k == 0 else Role.ACTIVATION) for k, size in enumerate(sizes)
    )
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    ops = (
        Op("loss", "k", forward, (0,), (1,)),
        Op("large", "k", backward, (0,), (2,)),
        Op("other", "k", backward, (0,), (3,)),
        Op("shrink", "k", backward, (2,), (4,), **fields),
        Op("end", "k", backward, (3, 4), ()),
    )
    return Graph(tensors, ops, returned=(1,))


def test_who_lets_go_of_more_than_it_makes_runs_as_soon_as_it_can():
    graph = late_release()
    problem = build_problem(graph)
    assert lean_order(problem) == [0, 1, 3, 2, 4]
    plan = plan_for(graph, Costs((1.0,) * 5), parse_budget("120B"))
    assert [line.op for line in plan.program.instructions if isinstance(line, Run)] == [0, 1, 3, 2, 4]
    assert (plan.predicted.peak_bytes, plan.overhead) == (103, 0.0)


@pytest.mark.parametrize("attribute", ["random", "once", "updates"])
def test_operators_whose_order_shows_stay_in_it(attribute):
    shows = {attribute: [0] if attribute == "updates" else True}
    graph = late_release(**shows)
    assert lean_order(build_problem(graph)) == [0, 1, 3, 2, 4]
    ops = list(graph.ops)
    ops[2] = replace(ops[2], **shows)
    order = lean_order(build_problem(replace(graph, ops=tuple(ops))))
    assert order.index(2) < order.index(3)


def test_who_makes_more_than_it_reads_runs_as_late_as_it_can():
    """Operator 2 makes a large gradient that nobody reads."""
    sizes = [1, 1, 5, 50, 5, 5]
    tensors = [Tensor(f"t{k}", size) for k, size in enumerate(sizes)]
    tensors[0] = replace(tensors[0], role=Role.PARAMETER)
    tensors[3] = replace(tensors[3], role=Role.GRADIENT, gradient_of=0)
    ops = (
        Op("loss", "k", Phase.FORWARD, (0,), (1,)),
        Op("first", "k", Phase.BACKWARD, (1,), (2,)),
        Op("weight", "k", Phase.BACKWARD, (2,), (3,)),
        Op("next", "k", Phase.BACKWARD, (2,), (4,)),
        Op("last", "k", Phase.BACKWARD, (4,), (5,)),
    )
    assert lean_order(build_problem(Graph(tuple(tensors), ops))) == [0, 1, 3, 4, 2]


def test_who_reads_what_a_view_maker_gives_follows_it():
    """Operator 2 gives a view of tensor 1 beside a result of its own; operator 3 reads that view."""
    sizes = [1, 100, 1, 100, 1]
    roles = [Role.INPUT, *[Role.ACTIVATION] * 4]
    tensors = [Tensor(f"t{k}", size, role) for k, (size, role) in enumerate(zip(sizes, roles, strict=True))]
    tensors[3] = replace(tensors[3], alias=1)
    ops = (
        Op("make", "k", Phase.FORWARD, (0,), (1,)),
        Op("both", "k", Phase.BACKWARD, (1,), (2, 3)),
        Op("read", "k", Phase.BACKWARD, (3,), (4,)),
    )
    order = precedence(build_problem(Graph(tuple(tensors), ops)))
    assert order.before == order.planned == (0, 1, 3)
    assert order.after == (6, 4, 0)


def some_order(problem, draw):
    """An order that the planner may choose, drawn at random."""
    planned = precedence(problem).planned
    rank = [draw.random() for _ in planned]
    order = by_rank(planned, rank)
    place = {op: k for k, op in enumerate(order)}
    assert all(place[u] < place[v] for v, mask in enumerate(planned) for u in bits(mask))
    return order


@pytest.mark.parametrize("seed", range(120))
def test_another_order_keeps_its_promise(seed):
    graph, seconds, workspace, able = random_step(seed, (3, 14))
    first = build_problem(graph, seconds, workspace_bytes=workspace, able=able)
    draw = random.Random(seed)
    order = lean_order(first) if seed % 2 else some_order(first, draw)
    problem = in_order(first, order)
    assert sorted(problem.ops) == sorted(first.ops)
    outcome = evaluate(problem, some_events(problem, draw, 0.1))
    program = lower(problem, outcome.events)
    assert simulate(graph, program, workspace_bytes=workspace).peak_bytes == outcome.peak
    check(graph, program, budget=outcome.peak, workspace_bytes=workspace)
    assert values_after(graph, program) == values_after(graph, store_all(graph))


def test_a_second_run_that_would_come_before_the_first_is_left_out():
    order = [0, 2, 1, 3]  # the operators 1 and 2 change places
    assert moved(order, {(2, 1), (3, 1), (3, 2)}) == {(3, 2), (3, 1)}
