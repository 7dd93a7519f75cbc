"""What a plan leaves for what an arena loses."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from lowtide.errors import InfeasibleError
from lowtide.execute.graphs import room as rooms
from lowtide.execute.graphs.room import apart, with_arena
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Body, Drop, Loop, Program, Run, Tile
from tests.planning import plan_for

MIB = 1 << 20


def planned(sizes):
    """The plain plan of a chain, forward and backward, whose activations have these sizes."""
    count = len(sizes)
    tensors = [
        Tensor("x", 5 * MIB, Role.INPUT, device="cuda"),
        Tensor("w", 3 * MIB, Role.PARAMETER, device="cuda"),
    ]
    tensors += [Tensor(f"a{k}", size, device="cuda") for k, size in enumerate(sizes)]
    ops = [Op(f"f{k}", "f", inputs=(k + 1 if k else 0, 1), outputs=(k + 2,)) for k in range(count)]
    for k in reversed(range(count)):
        tensors.append(Tensor(f"g{k}", 4, device="cuda"))
        read = (k + 2,) if k == count - 1 else (k + 2, len(tensors) - 2)
        ops.append(Op(f"b{k}", "b", Phase.BACKWARD, read, (len(tensors) - 1,)))
    graph = Graph(tuple(tensors), tuple(ops))
    return plan_for(graph, Costs(seconds=(1.0,) * len(ops)), 1 << 40)


@pytest.mark.parametrize(
    ("sizes", "lost"),
    [
        ([2 * MIB, 4 * MIB], 4),  # and a scalar
        ([MIB, MIB // 2, 512], 4),
        ([3 * MIB, MIB, 2 * MIB, MIB // 4], 4),
    ],
)
def test_small_tensors_of_forward_are_needed_together_with_large_ones(sizes, lost):
    assert apart(planned(sizes)) <= lost + 512


def late(count, spare=0):
    """The plain plan of a step whose one large tensor is gone before so many small ones come.

    Its budget is what it needs, and what it does not use of it.
    """
    tensors = [
        Tensor("x", 5 * MIB, Role.INPUT, device="cuda"),
        Tensor("large", 2 * count * MIB, device="cuda"),
    ]
    ops = [Op("f", "f", inputs=(0,), outputs=(1,))]
    for k in range(count):
        tensors.append(Tensor(f"s{k}", MIB, device="cuda"))
        ops.append(Op(f"f{k}", "f", inputs=(k + 1,), outputs=(k + 2,)))
    tensors.append(Tensor("g", 512, device="cuda"))
    ops.append(Op("b", "b", Phase.BACKWARD, tuple(range(2, count + 2)), (count + 2,)))
    plan = plan_for(Graph(tuple(tensors), tuple(ops)), Costs(seconds=(1.0,) * len(ops)), 1 << 40)
    return replace(plan, budget_bytes=plan.predicted.peak_bytes + spare)


def test_small_tensors_may_need_their_pool_when_the_arena_is_not_full():
    assert apart(late(6)) == 5 * MIB + 512  # the first is made while the large one is there


def room(pages):
    return SimpleNamespace(lost_bytes=pages, graph_bytes=pages, no_graphs="", device=torch.device("cpu"))


def taking(plan, seconds):
    """A plan that is predicted to take so many seconds, where the plain step takes 1."""
    return replace(
        plan, predicted=replace(plan.predicted, seconds=seconds), plain=replace(plan.plain, seconds=1)
    )


def infeasible():
    return InfeasibleError("too small", budget=1, smallest_budget=2, floor=0, holds_for="nothing")


def test_more_is_left_where_an_arena_needs_it():
    asked = []
    there = room(48 * MIB)

    def made():
        asked.append(there.graph_bytes)
        return late(90 if len(asked) == 1 else 80), len(asked)

    _, count = with_arena(made, there, float)
    assert count == 2
    between = late(90).predicted.peak_bytes // 200
    assert asked == [48 * MIB, 89 * MIB + 512 + rooms._WHILE_IT_RUNS + between]
    assert there.lost_bytes == there.graph_bytes == asked[-1]


def test_what_a_plan_does_not_use_is_there_for_its_arena():
    asked, there = [], room(48 * MIB)

    def made():
        asked.append(1)
        return late(90, spare=100 * MIB), None

    with_arena(made, there, float)
    assert asked == [1]


def test_a_budget_that_has_no_more_keeps_its_plan():
    there, plans = room(48 * MIB), [late(90)]

    def made():
        if not plans:
            raise infeasible()
        return plans.pop(), "the first"

    assert with_arena(made, there, float)[1] == "the first"
    assert there.graph_bytes == there.lost_bytes == 48 * MIB
    assert not there.no_graphs


def test_without_graphs_one_plan_is_made():
    there, asked = room(0), []

    def made():
        asked.append(1)
        return taking(late(90), 5.0), None

    with_arena(made, there, float)
    assert asked == [1]


def test_a_budget_without_room_for_graphs_has_a_plan_without_them():
    there, asked = room(48 * MIB), []

    def made():
        asked.append(there.graph_bytes)
        if there.graph_bytes:
            raise infeasible()
        return late(90), None

    assert with_arena(made, there, float)[0].graph.ops
    assert asked == [48 * MIB, 0]
    assert there.graph_bytes == there.lost_bytes == 0
    assert there.no_graphs == "no plan that was found leaves memory for them"


@pytest.mark.parametrize(
    ("beside", "alone", "launch", "chosen"),
    [
        (1.04, 1.0, 0.0, "beside"),  # as good as plain: nothing else is asked for
        (2.0, 1.95, 0.0, "beside"),
        (2.0, 1.6, 0.0, "alone"),
        (2.0, 1.6, 1.95 / 92, "beside"),  # the host would take longer to launch it
        (2.0, None, 0.0, "beside"),
    ],
)
def test_graphs_are_left_out_where_a_plan_without_them_is_faster(beside, alone, launch, chosen):
    there = room(48 * MIB)

    def made():
        if there.graph_bytes:
            return taking(late(90, spare=100 * MIB), beside), "beside"
        if alone is None:
            raise infeasible()
        return taking(late(90), alone), "alone"

    plan, found = with_arena(made, there, lambda kind: launch)
    assert found == chosen
    assert plan.predicted.seconds == (beside if chosen == "beside" else alone)
    assert there.graph_bytes == there.lost_bytes == (48 * MIB if chosen == "beside" else 0)
    told = "a plan that leaves memory for them would take 1.25 times as long"
    assert there.no_graphs == ("" if chosen == "beside" else told)


@pytest.mark.parametrize(("times", "chosen"), [(2.0, "beside"), (1.0, "alone")])
def test_each_plan_is_as_slow_as_its_own_measurements_say(times, chosen):
    """Everything took twice as long when the first plan was measured, or it really is the slower one."""
    there = room(48 * MIB)

    def made():
        if not there.graph_bytes:
            return taking(late(90), 1.2), "alone"
        plan = taking(late(90, spare=100 * MIB), 2.4)
        return replace(plan, plain=replace(plan.plain, seconds=times)), "beside"

    assert with_arena(made, there, lambda kind: 0.0)[1] == chosen


def test_whoever_ends_a_search_has_the_plan_that_it_found():
    there, asked = room(48 * MIB), []

    def made():
        asked.append(there.graph_bytes)
        return replace(taking(late(90, spare=100 * MIB), 5.0), interrupted=True), None

    assert with_arena(made, there, float)[0].interrupted
    assert asked == [48 * MIB]


def test_operators_in_tiles_are_launched_once_for_each_tile():
    inner = Body(Graph((), ()), Program((Run(0), Drop(()), Run(1)), (Run(2),)))
    whole = (Tile(0, ()), Tile(0, ()), Tile(1, ()))
    other = Body(Graph((), ()), Program((Run(0),)))
    program = Program((Run(0), Loop(1, tiles=whole)), (Run(2),), bodies=(inner, other))
    assert rooms._launches(program) == 2 + 2 * 3 + 1
