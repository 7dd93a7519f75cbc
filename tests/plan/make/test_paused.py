"""A plan that leaves room to others between its forward and its backward."""

import pytest

from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.budget import Budget
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.make.paused import PausedStep
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Run
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import PlanRequest

SIZE = 100


def chain(count):
    """So many operators in a row, and their backward, each of which reads what forward made."""
    tensors = [Tensor("x", SIZE, Role.INPUT), *(Tensor(f"a{k}", SIZE) for k in range(count))]
    ops = [Op(f"f{k}", "aten.sin", inputs=(k,), outputs=(k + 1,)) for k in range(count)]
    gradient = len(tensors)
    tensors.append(Tensor("given", SIZE, Role.GRADIENT))
    for k in reversed(range(count)):
        tensors.append(Tensor(f"g{k}", SIZE, Role.GRADIENT, gradient_of=0 if k == 0 else None))
        ops.append(Op(f"b{k}", "aten.cos", Phase.BACKWARD, (gradient, k), (len(tensors) - 1,)))
        gradient = len(tensors) - 1
    return Graph(tuple(tensors), tuple(ops), returned=(count,))


def held(graph, program):
    """Bytes that are there when forward ends."""
    there = {k for k, t in enumerate(graph.tensors) if t.role is Role.INPUT or t.id == "given"}
    for line in program.forward:
        if isinstance(line, Run):
            there |= set(graph.ops[line.op].outputs)
        elif isinstance(line, Drop):
            there -= set(line.tensors)
    return SIZE * len(there)


@pytest.mark.parametrize("others", [0, 300, 500])
def test_what_is_held_leaves_room_to_others(others):
    graph = chain(8)
    costs = Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops))
    step = PausedStep.of(graph, costs, (), others)
    request = PlanRequest(Budget(bytes=900)).within(1.0)
    program = step.without(make_plan(step.graph, step.costs, request).program)
    assert held(graph, program) <= 900 - others
    assert simulate(graph, program).peak_bytes <= 900
    assert {line.op for line in program.instructions if isinstance(line, Run)} == set(range(len(graph.ops)))


def test_figures_are_those_of_the_step_itself_again():
    graph = chain(3)
    costs = Costs(tuple(map(float, range(6))), tuple(range(6)), short={1: 0.5, 4: 0.25})
    step = PausedStep.of(graph, costs, (0, 5), 10)
    again, able = step.figures(
        step.costs.seconds, step.costs.workspace_bytes, step.costs.short, sorted(step.able)
    )
    assert (again.seconds, again.workspace_bytes, again.short) == (
        costs.seconds,
        costs.workspace_bytes,
        costs.short,
    )
    assert able == {0, 5}
    assert step.graph.ops[step.place].kind == "lowtide.pause"
