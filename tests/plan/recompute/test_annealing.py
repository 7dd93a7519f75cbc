"""The annealing kernel: exact figures, the same plans compiled or not, and the same plan for the same seed."""

import random

import pytest

from lowtide.plan.offload.trips import with_trips
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.recompute.annealing import kernel as module
from lowtide.plan.recompute.annealing import kernel_python as anneal_pure
from tests.plan.problem.test_schedule import some_events
from tests.plan.random_steps import random_step
from tests.plan.trips import some_trips
from tests.planning import annealed

KERNELS = [anneal_pure.anneal]
if module.COMPILED:
    KERNELS.append(module._kernel)


def case(seed):
    graph, seconds, workspace, able = random_step(seed, (4, 16))
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able)
    draw = random.Random(seed)
    if seed % 3 == 0:
        problem = with_trips(problem, some_trips(problem, draw))
    budget = draw.randint(problem.resident, evaluate(problem, ()).peak)
    return problem, budget, some_events(problem, draw, draw.choice([0.0, 0.1]))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(16))
def test_figures_are_those_of_an_evaluation(kernel, seed, monkeypatch):
    monkeypatch.setattr(module, "_kernel", kernel)
    problem, budget, start = case(seed)
    result = annealed(problem, start, budget, moves=120, seed=seed, hot=8, cold=1, weight=1 << 18)
    last = evaluate(problem, result.last)
    assert last.events == result.last
    assert last.cost == result.last_cost
    assert sum(max(0, live - budget) for live in last.live) == result.excess
    if result.best is not None:
        best = evaluate(problem, result.best)
        assert best.cost == result.cost
        assert best.peak <= budget


@pytest.mark.skipif(not module.COMPILED, reason="the kernel is not compiled here")
@pytest.mark.parametrize("seed", range(24))
def test_compiled_and_pure_give_the_same_plans(seed, monkeypatch):
    problem, budget, start = case(seed)
    results = []
    for kernel in KERNELS:
        monkeypatch.setattr(module, "_kernel", kernel)
        results.append(annealed(problem, start, budget, moves=400, seed=seed, hot=8, cold=1, weight=1 << 18))
    assert results[0] == results[1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_events_that_cannot_be_are_refused(kernel, monkeypatch):
    monkeypatch.setattr(module, "_kernel", kernel)
    problem, budget, _ = case(0)
    with pytest.raises(ValueError, match="contradict"):
        annealed(problem, {(0, 3)}, budget, moves=1, seed=0, hot=1, cold=1)
