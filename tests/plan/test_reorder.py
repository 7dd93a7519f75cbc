"""Operators in an order that releases storages early: the same values, and never a larger peak."""

import random

import pytest

from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.budget import parse_budget
from lowtide.plan.check import check
from lowtide.plan.lower import lower
from lowtide.plan.make import Costs, make_plan
from lowtide.plan.plain import store_all
from lowtide.plan.problem import build_problem
from lowtide.plan.program import Run
from lowtide.plan.reorder import early_order
from lowtide.plan.schedule import evaluate
from lowtide.plan.simulate import simulate
from tests.plan.random_steps import random_step
from tests.plan.test_offload import values_after
from tests.plan.test_schedule import some_events


def late_release(**attributes):
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
        Op("shrink", "k", backward, (2,), (4,), attributes=attributes),
        Op("end", "k", backward, (3, 4), ()),
    )
    return Graph(tensors, ops, attributes={"returned": [1]})


def test_who_lets_go_of_more_than_it_makes_runs_as_soon_as_it_can():
    graph = late_release()
    problem = build_problem(graph)
    assert early_order(problem) == [0, 1, 3, 2, 4]
    plan = make_plan(graph, Costs((1.0,) * 5), parse_budget("120B"))
    assert [line.op for line in plan.program.instructions if isinstance(line, Run)] == [0, 1, 3, 2, 4]
    assert (plan.predicted.peak_bytes, plan.overhead) == (103, 0.0)


@pytest.mark.parametrize("attribute", ["random", "once", "updates"])
def test_operators_whose_order_shows_stay(attribute):
    problem = build_problem(late_release(**{attribute: [0] if attribute == "updates" else True}))
    assert early_order(problem) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(120))
def test_another_order_keeps_its_promise(seed):
    graph, seconds, workspace, able = random_step(seed, (3, 14))
    order = early_order(build_problem(graph, seconds, workspace_bytes=workspace, able=able))
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able, order=order)
    assert sorted(problem.ops) == sorted(order)
    outcome = evaluate(problem, some_events(problem, random.Random(seed), 0.1))
    program = lower(problem, outcome.events)
    assert simulate(graph, program, workspace_bytes=workspace).peak_bytes == outcome.peak
    check(graph, program, budget=outcome.peak, workspace_bytes=workspace)
    assert values_after(graph, program) == values_after(graph, store_all(graph))
