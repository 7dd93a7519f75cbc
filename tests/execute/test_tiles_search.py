"""Which ways to cut a step the search tries."""

import pytest
import torch

import lowtide
from lowtide import zoo
from lowtide.errors import InfeasibleError
from lowtide.execute.cutting import Cutter


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
