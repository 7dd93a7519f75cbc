"""Programs in another order run to the same bits."""

import random

import pytest
import torch
from torch import nn

from lowtide.execute.compare.compare import compare
from lowtide.plan.address.reorder import OrderedStep, place_in_any_order
from lowtide.plan.program.simple import offload_all, recompute_all, store_all
from tests.plan.address.test_reorder import shuffled


class Branches(nn.Module):
    """Ways that do not depend on each other, with random numbers, statistics and views."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(12, width) for width in (8, 24, 16, 24))
        self.norm = nn.BatchNorm1d(24)
        self.out = nn.Linear(72, 5)

    def forward(self, x):
        a, b, c, d = (way(x) for way in self.ways)
        b = torch.dropout(self.norm(b).relu(), 0.4, self.training)
        c = torch.dropout(c.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16).sigmoid(), 0.2, self.training)
        return self.out(torch.cat([a.tanh(), b, c, d.exp()], 1))


def loss(model, x):
    return model(x).square().mean()


def run(planner):
    torch.manual_seed(1)
    return compare(Branches(), (torch.randn(16, 12),), loss, planner, in_place=False, repeats=0)


@pytest.mark.parametrize("simple", [store_all, recompute_all, offload_all])
def test_any_order_that_is_offered_gives_the_same_bits(simple):
    draw, seen = random.Random(simple.__name__), []

    def planner(graph):
        seen.append((simple(graph), shuffled(graph, simple(graph), draw)))
        return seen[-1][1]

    found = run(planner)
    assert found.bitwise
    assert found.loss_equal
    given, other = seen[-1]
    assert [line for line in given.instructions if line in other.instructions] != list(other.instructions)


def test_the_order_with_the_smaller_arena_gives_the_same_bits_and_takes_no_more():
    found = []

    def planner(graph):
        found.append(
            place_in_any_order(OrderedStep(graph, store_all(graph)), time_limit=60.0, most_orders=60)
        )
        return found[-1].program

    measured = run(planner)
    assert measured.bitwise
    assert found[-1].addresses.arena_bytes <= found[-1].given_bytes
    assert measured.predicted_peak_bytes <= run(store_all).predicted_peak_bytes
