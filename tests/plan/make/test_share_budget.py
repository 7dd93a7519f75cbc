"""One budget for a step in several graphs, against trying every combination of plans."""

import itertools
import random

import pytest

from lowtide.errors import InfeasibleError
from lowtide.plan.make.share_budget import GraphCall, GraphPlan, SharedGraph, share_budget, shared_peak


def graph(plans):
    """A graph with these plans, of which the fastest one that fits is given."""
    plans = sorted(plans, key=lambda one: one.seconds)

    def chosen(peak):
        return next(one for one in plans if one.peak_bytes <= peak)

    return SharedGraph(min(one.peak_bytes for one in plans), max(one.peak_bytes for one in plans), chosen)


def some(rng, count):
    """Plans of a graph: the more it holds, the faster it is."""
    plain = rng.randint(20, 60)
    return [
        GraphPlan(plain - 4 * k, max(0, plain // 2 - 4 * k), 1.0 + k * rng.uniform(0.05, 0.2), k)
        for k in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_step_in_several_graphs_stays_inside_its_budget(seed):
    rng = random.Random(seed)
    plans = [some(rng, 4) for _ in range(rng.randint(1, 4))]
    graphs = [graph(one) for one in plans]
    order = [rng.randrange(len(graphs)) for _ in range(rng.randint(0, 3))] + list(range(len(graphs)))
    calls = [GraphCall(k, rng.randint(0, 10)) for k in order]
    every = [(shared_peak(calls, one), one) for one in itertools.product(*plans)]
    budgets = sorted({peak for peak, _ in every})
    for budget in budgets[:: max(1, len(budgets) // 8)]:
        found = share_budget(graphs, calls, budget)
        assert shared_peak(calls, found) <= budget
        if budget >= shared_peak(calls, [one[0] for one in plans]):
            assert [one.plan for one in found] == [0] * len(plans)
    with pytest.raises(InfeasibleError) as refused:
        share_budget(graphs, calls, budgets[0] - 1)
    assert refused.value.smallest_budget == budgets[0]
    assert shared_peak(calls, share_budget(graphs, calls, refused.value.smallest_budget)) <= budgets[0]


def test_what_is_left_over_goes_to_the_last_graph_first():
    first = graph([GraphPlan(40, 30, 1.0, "plain"), GraphPlan(20, 2, 2.0, "small")])
    last = graph([GraphPlan(40, 30, 1.0, "plain"), GraphPlan(20, 2, 2.0, "small")])
    calls = [GraphCall(0, 0), GraphCall(1, 0)]
    found = share_budget([first, last], calls, 42)
    assert [one.plan for one in found] == ["small", "plain"]


def test_a_graph_that_is_called_again_holds_its_part_twice():
    plans = [GraphPlan(10, 8, 1.0, None)]
    assert shared_peak([GraphCall(0, 1), GraphCall(0, 3)], plans) == 3 + 8 + 10
