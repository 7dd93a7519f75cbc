"""Which ways to cut a step the search tries."""

from functools import partial

import msgspec
import pytest
import torch
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.errors import InfeasibleError
from lowtide.execute.cutting import Cutter
from lowtide.plan import tile


def test_tokens_that_attend_to_each_other_hold_no_loops(monkeypatch):
    """A tile of one token would compute those before it again; there are as many different ones as tokens."""
    torch._dynamo.reset()
    tried, cut_up = [], Cutter.cut_up

    def counted(self, tiling, boxes, channels_last, inner=None):
        tried.append(inner)
        return cut_up(self, tiling, boxes, channels_last, inner)

    monkeypatch.setattr(Cutter, "cut_up", counted)
    built = zoo.build("gpt2:batch=2,layers=2,width=32,heads=4,length=16,vocab=512")
    with pytest.raises(InfeasibleError):
        lowtide.fit(
            built.loss,
            built.model,
            *built.batch,
            budget="20%",
            only="recompute,tile",
            cost="estimated",
            time_limit=1,
            cache=False,
        )
    assert tried == [None] * len(tried)


def test_ctrl_c_ends_the_search_with_the_best_plan_so_far(monkeypatch):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
    fit = partial(
        lowtide.fit,
        lambda model, x: model(x).square().mean(),
        model,
        torch.randn(1, 1, 48, 48),
        budget="40%",
        only="recompute,tile",
        cost="estimated",
        time_limit=1,
        cache=False,
    )
    limits, make_plan = [], tile.make_plan

    def stopped(*args, time_limit, **how):
        """As if Ctrl-C came while the first tile was planned."""
        limits.append(time_limit)
        plan = make_plan(*args, time_limit=time_limit, **how)
        return msgspec.structs.replace(plan, interrupted=len(limits) == 1)

    monkeypatch.setattr(tile, "make_plan", stopped)
    plan = fit().plan
    assert plan.interrupted
    assert plan.decisions.tiles
    assert limits[0] > 0
    assert limits[1:] == [0.0] * len(limits[1:])
