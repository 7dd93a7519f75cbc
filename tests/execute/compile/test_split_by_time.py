"""Whole convolutions and split ones are timed by the cost layer, and the plan with the lower time is taken."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost import Cost, Figure, Origin
from lowtide.cost.cache import open_cache
from lowtide.cost.device import cache_folder
from lowtide.cost.measure import measure
from lowtide.cost.probe import environment
from lowtide.cost.signature import signature
from lowtide.execute.planning import step_costs
from lowtide.execute.planning.splitting import Splitting

from ..small import loss_of

MIB = 2**20
LAST = "convolution_backward"
"""The backward of the last convolution."""
TWO_CALLS = f"{LAST}_parameters", f"{LAST}_image"


@pytest.fixture(autouse=True)
def _splits(monkeypatch, tmp_path):
    """Two calls are taken to give the same bits, and nothing is sliced, on every machine."""
    monkeypatch.setattr("lowtide.trace.groups.slices.slices_for", lambda arguments: 1)
    monkeypatch.setattr("lowtide.trace.step.split_convolutions.same_when_split", lambda arguments: True)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


def planned(budget):
    """The plan for three convolutions of different shapes. Costs are cached, plans are not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(16, 8, 3, padding=1))
    options = {"only": "recompute", "time_limit": 0.5, "verify": False, "cache": False}
    return lowtide.fit(loss_of, model, torch.randn(2, 3, 48, 48), budget=budget, **options).plan


def store(graph, seconds, workspace):
    """Have the cache say that the operators of a graph take this, by id; others take 1 ms and no workspace."""
    cache = open_cache(cache_folder(), environment("cpu"))
    for k, op in enumerate(graph.ops):
        figures = seconds.get(op.id, 1e-3), workspace.get(op.id, 0)
        time, space = (Figure(figure, Origin.MEASURED) for figure in figures)
        cache.add(signature(graph, k), Cost(seconds=time, workspace_bytes=space))
    cache.save()


def signatures(graph):
    return {op.id: signature(graph, k) for k, op in enumerate(graph.ops)}


@pytest.fixture
def measured(monkeypatch):
    """What was measured, by signature; times of a busy machine are not cached."""
    found = {}

    def watched(*arguments, names, **options):
        result = measure(*arguments, names=names, **options)
        found.update(zip(names, result.costs, strict=True))
        return result

    monkeypatch.setattr(step_costs, "measure", watched)
    return found


@pytest.fixture
def graphs(measured):
    """The step with whole convolutions, and with the last one split; all of both was measured."""
    whole = planned("100%").graph
    store(whole, {}, {LAST: 64 * MIB})
    split = planned(32 * MIB)
    assert split.program.split == (LAST,)
    return whole, split.graph


def test_the_whole_call_and_both_calls_are_measured(graphs, measured):
    whole, split = graphs
    names = signatures(whole)[LAST], *(signatures(split)[call] for call in TWO_CALLS)
    assert len(set(names)) == 3
    for name in names:
        cost = measured[name]
        assert cost.seconds.value > 0
        assert cost.seconds.origin == cost.workspace_bytes.origin == Origin.MEASURED


@pytest.mark.parametrize(("seconds", "chosen"), [(5e-4, (LAST,)), (5e-2, ())])
def test_convolutions_are_split_where_their_costs_say_that_it_is_faster(seconds, chosen, graphs, monkeypatch):
    whole, split = graphs
    again = {"convolution": 5e-3, "convolution_1": 5e-3}  # what a plan with the whole call recomputes
    store(whole, again, {LAST: 64 * MIB})
    store(split, again | dict.fromkeys(TWO_CALLS, seconds), {})
    with monkeypatch.context() as patched:
        patched.setattr(Splitting, "faster", lambda *_: None)
        budget = planned("100%").plain.peak_bytes - 1
        rival = planned(budget)
    assert rival.overhead > 0.1
    plan = planned(budget)
    assert plan.program.split == chosen
    assert plan.cost == "measured"
    assert (plan.predicted.seconds < rival.predicted.seconds) == bool(chosen)
