"""What a plan leaves for pages that are not full."""

from types import SimpleNamespace

import pytest

from lowtide.errors import InfeasibleError
from lowtide.execute.graphs import room as rooms
from lowtide.execute.graphs.room import lost_in_pages, with_pages
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.program.costs import Costs
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
        ([2 * MIB, 4 * MIB], 0),
        ([3 * MIB, 3 * MIB], 2 * MIB),
        ([MIB, MIB // 2, 5], 0),  # these lie together
        ([2 * MIB + 1] * 4, 4 * (2 * MIB - 512)),
        ([3 * MIB] * 50, 50 * MIB),
    ],
)
def test_each_large_tensor_takes_whole_pages(sizes, lost):
    assert lost_in_pages(planned(sizes)) == lost


def room(pages):
    return SimpleNamespace(page_bytes=pages, graph_bytes=pages)


def test_more_is_left_where_pages_need_it():
    asked = []
    there = room(48 * MIB)

    def made():
        asked.append(there.graph_bytes)
        return planned([3 * MIB] * (90 if len(asked) == 1 else 80))

    with_pages(made, there)
    assert asked == [48 * MIB, 90 * MIB + rooms._WHILE_IT_RUNS]
    assert there.page_bytes == there.graph_bytes == asked[-1]


def test_a_budget_that_has_no_more_keeps_its_plan():
    there, plans = room(48 * MIB), [planned([3 * MIB] * 90)]

    def made():
        if not plans:
            raise InfeasibleError("too small", budget=1, smallest_budget=2, floor=0, holds_for="nothing")
        return plans.pop()

    assert with_pages(made, there).graph.ops
    assert there.graph_bytes == there.page_bytes == 48 * MIB


def test_without_graphs_one_plan_is_made():
    there, asked = room(0), []

    def made():
        asked.append(1)
        return planned([3 * MIB] * 90)

    with_pages(made, there)
    assert asked == [1]


def test_a_budget_without_room_for_graphs_has_a_plan_without_them():
    there, asked = room(48 * MIB), []

    def made():
        asked.append(there.graph_bytes)
        if there.graph_bytes:
            raise InfeasibleError("too small", budget=1, smallest_budget=2, floor=0, holds_for="nothing")
        return planned([3 * MIB] * 90)

    assert with_pages(made, there).graph.ops
    assert asked == [48 * MIB, 0]
    assert there.graph_bytes == there.page_bytes == 0
