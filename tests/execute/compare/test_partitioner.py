"""PyTorch's partitioner as a baseline, and the other baselines on the same captured steps."""

import warnings

import pytest
import torch
from torch import nn

from lowtide import capture, zoo
from lowtide.errors import PlanError
from lowtide.execute.compare.partitioner import partitioned, partitioner
from lowtide.plan.baselines import BASELINES, run_seconds
from lowtide.plan.check.checker import check
from lowtide.plan.program.simple import recompute_all, store_all
from lowtide.plan.program.simulate import simulate

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = ("convpool", "gpt2:batch=8,layers=1,width=32,heads=4,length=32,vocab=64")


@pytest.fixture(scope="module", params=STEPS)
def joint(request):
    return captured(request.param)


def captured(address):
    built = zoo.build(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(built.loss, built.model, *built.batch).joint


def seconds_of(graph):
    return [1.0 + sum(graph.tensors[t].bytes for t in op.outputs) / 1e5 for op in graph.ops]


def peak(graph, program):
    return simulate(graph, program).peak_bytes


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_what_it_saves_makes_a_program(joint, share):
    before = [(node.name, node.args) for node in next(iter(joint.tensor_of)).graph.nodes]
    program = partitioned(joint, share)
    check(joint.graph, program)
    assert [(node.name, node.args) for node in next(iter(joint.tensor_of)).graph.nodes] == before


def test_at_a_budget_of_nothing_it_makes_everything_again(joint):
    seconds = seconds_of(joint.graph)
    least = run_seconds(partitioned(joint, 0.0), seconds)
    assert least > run_seconds(store_all(joint.graph), seconds)
    assert least == pytest.approx(run_seconds(recompute_all(joint.graph), seconds), rel=0.1)


def test_the_budget_holds(joint):
    graph, seconds = joint.graph, seconds_of(joint.graph)
    plain = peak(graph, store_all(graph))
    assert peak(graph, partitioner(joint, seconds, plain)) <= plain
    with pytest.raises(PlanError, match="no plan inside the budget"):
        partitioner(joint, seconds, plain // 10)


def test_baselines_plan_captured_steps(joint):
    graph, seconds = joint.graph, seconds_of(joint.graph)
    plain = peak(graph, store_all(graph))
    saved = sum(graph.tensors[t].bytes for t in graph.saved_for_backward())
    found = 0
    for budget in (plain, plain * 9 // 10, plain * 7 // 10):
        for planner in BASELINES.values():
            try:
                program = planner(graph, seconds, budget)
            except PlanError:
                continue
            found += 1
            assert check(graph, program, budget=budget).peak_bytes <= budget
    assert found >= (8 if len(graph.ops) > 40 and saved > plain / 2 else 4)


def test_steps_it_fails_on_are_named():
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3))
    )
    joint = capture(lambda x: model(x).sum(), torch.zeros(2, 3, 16, 16)).joint
    with pytest.raises(PlanError, match="partitioner fails at a budget of 0.5"):
        partitioned(joint, 0.5)
    check(joint.graph, partitioned(joint, 1.0))
