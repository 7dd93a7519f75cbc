"""The smallest budget that an error names works when it is asked for, however little is found then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InfeasibleError
from lowtide.execute.planning import plan_step


def loss_of(model, x):
    return model(x).square().mean()


def asked(model, x, budget, **options):
    torch._dynamo.reset()
    return lowtide.fit(loss_of, model, x, budget=budget, only="recompute", time_limit=1, **options)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))


def test_a_budget_that_was_named_works_where_the_next_search_finds_nothing(model, monkeypatch):
    x = torch.randn(512, 16)
    with pytest.raises(InfeasibleError) as error:
        asked(model, x, 1000)
    named = error.value.smallest_budget

    def finds_nothing(*_, **__):
        refused = InfeasibleError("nothing", budget=named, smallest_budget=2 * named, floor=0)
        refused.plain_peak = error.value.plain_peak
        raise refused

    monkeypatch.setattr(plan_step, "make_plan", finds_nothing)
    plan = asked(model, x, named).plan
    assert plan.predicted.peak_bytes <= plan.budget_bytes == named
    with pytest.raises(InfeasibleError, match="nothing"):
        asked(model, x, named, cache=False)
    with pytest.raises(InfeasibleError, match="nothing"):
        asked(model, x, named - 1)
