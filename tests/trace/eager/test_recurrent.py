"""Recurrent modules of torch end a graph where they are called, and nothing else is left out for them."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import GraphBreakError
from tests.execute.breaks.test_subgraphs import left_behind, same


class Tagger(nn.Module):
    """The recurrent module is read before any operator runs."""

    def __init__(self, kind):
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(50, 16), kind(16, 16, batch_first=True)
        self.head = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 50))

    def forward(self, x):
        self.recurrent.flatten_parameters()
        state = torch.zeros(1, x.shape[0], self.recurrent.hidden_size)
        state = (state, state) if isinstance(self.recurrent, nn.LSTM) else state
        hidden, _ = self.recurrent(self.embed(x), state)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


def loss_of(model, x):
    return model(x)


def test_what_is_around_them_is_planned():
    torch.manual_seed(0)
    model, x = Tagger(nn.LSTM), torch.randint(50, (8, 16))
    expected = left_behind(model, loss_of, x, 1)
    step = lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.2, cache=False)
    assert sum(len(plan.graph.ops) for plan in step.plans) > 10  # the head and the loss
    assert "RNN, GRU, or LSTM" in step.explain()
    assert same(left_behind(model, step, x, 1), expected)


def test_the_call_is_refused_where_one_graph_is_asked_for():
    model, x = Tagger(nn.GRU), torch.randint(50, (8, 16))
    with pytest.raises(GraphBreakError, match=r"test_recurrent\.py:\d+: .*RNN, GRU, or LSTM"):
        lowtide.fit(loss_of, model, x, budget="100%", time_limit=0.2, cache=False, fullgraph=True)
