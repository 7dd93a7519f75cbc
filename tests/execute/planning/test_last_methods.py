"""Methods that are tried where nothing fits by the others: offload, where graphs are captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.errors import InfeasibleError
from lowtide.execute.fit import fitted
from lowtide.execute.planning import plan_step
from lowtide.plan.request import PlanRequest


@pytest.fixture
def refusing(monkeypatch):
    """Nothing fits by recomputation alone; the methods that were asked for."""
    asked, make_plan = [], plan_step.make_plan

    def refuses(graph, costs, request, room, **options):
        asked.append(request.methods)
        if "offload" not in request.methods:
            refused = InfeasibleError("too small", budget=1, smallest_budget=2, floor=0)
            refused.plain_peak = 2
            raise refused
        assert room.link is not None
        return make_plan(graph, costs, request, room, **options)

    monkeypatch.setattr(plan_step, "make_plan", refuses)
    return asked


def planned(**options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
    request = PlanRequest.of("60%", only="recompute", time_limit=1, cache=False)
    asked = PlanRequest(request.budget, limits=request.limits, cache=False, **options)
    return fitted(lambda model, x: model(x).square().mean(), (model, torch.randn(512, 16)), asked).plan


def test_they_are_tried_last(refusing):
    plan = planned(last=("offload",))
    assert refusing == [("recompute",), ("recompute", "offload")]
    assert plan.predicted.peak_bytes <= plan.budget_bytes


def test_they_are_not_tried_where_they_do_not_fit_the_host(refusing, monkeypatch):
    monkeypatch.setattr(plan_step, "fits_host", lambda *_: False)
    with pytest.raises(InfeasibleError, match="too small"):
        planned(last=("offload",))


def test_others_are_not_tried(refusing):
    with pytest.raises(InfeasibleError, match="too small"):
        planned()
    assert refusing == [("recompute",)]


@pytest.mark.parametrize(("graphs", "device", "methods", "last"), [
    ("auto", "cuda", ("recompute", "tile"), ("offload",)),
    ("auto", "cpu", ("recompute", "tile"), ()),
    ("off", "cuda", ("recompute", "offload", "tile"), ()),
])  # fmt: skip
def test_graphs_offload_last(graphs, device, methods, last):
    asked = PlanRequest.of("50%", graphs=graphs).on(device)
    assert (asked.methods, asked.last) == (methods, last)
    every = asked.as_last
    assert every is None if not last else every.methods == (*methods, *last)
