"""One budget for a step in several graphs, against trying every combination of plans."""

import itertools
import random

import pytest

from lowtide.errors import InfeasibleError
from lowtide.plan.make.share_budget import (
    CallSequence,
    GraphCall,
    GraphPlan,
    SharedGraph,
    least_plans,
    only_plan,
    share_budget,
    shared_peak,
)


def graph(plans):
    """A graph with these plans, of which the fastest one that fits is given."""
    plans = sorted(plans, key=lambda one: one.seconds)

    def within(peak, held):
        for one in plans:
            if one.peak_bytes <= peak and one.held_bytes <= held:
                return one
        raise InfeasibleError("", budget=peak, smallest_budget=0, floor=0)

    def least(others):
        return min(plans, key=lambda one: max(one.peak_bytes, one.held_bytes + others))

    return SharedGraph(plans[0], 0, within, least)


def some(rng, count):
    """Plans of a graph: the more it holds, the faster it is."""
    plain = rng.randint(20, 60)
    return [
        GraphPlan(plain - 4 * k, max(0, plain // 2 - 4 * k), 1.0 + k * rng.uniform(0.05, 0.2), k)
        for k in range(count)
    ]


def steps(seed):
    rng = random.Random(seed)
    plans = [some(rng, 4) for _ in range(rng.randint(1, 4))]
    order = [rng.randrange(len(plans)) for _ in range(rng.randint(0, 3))] + list(range(len(plans)))
    return plans, [CallSequence([GraphCall(k, rng.randint(0, 10)) for k in order])]


@pytest.mark.parametrize("seed", range(60))
def test_a_step_in_several_graphs_stays_inside_its_budget(seed):
    plans, calls = steps(seed)
    graphs = [graph(one) for one in plans]
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


@pytest.mark.parametrize("seed", range(60))
def test_plans_may_hold_less_and_take_more(seed):
    plans, calls = steps(seed)
    rng = random.Random(seed)
    for one in plans:  # a plan of its own that holds nothing, and runs forward again in its backward
        one.append(GraphPlan(one[0].peak_bytes + rng.randint(0, 4), 0, 2.0, "nothing"))
    graphs = [graph(one) for one in plans]
    least = shared_peak(calls, least_plans(graphs, calls))
    best = min(shared_peak(calls, one) for one in itertools.product(*plans))
    assert best <= least <= 1.2 * best
    for budget in (least, (least + shared_peak(calls, [one[0] for one in plans])) // 2):
        assert shared_peak(calls, share_budget(graphs, calls, budget)) <= budget


def test_what_is_left_over_goes_to_the_last_graph_first():
    first = graph([GraphPlan(40, 30, 1.0, "plain"), GraphPlan(20, 2, 2.0, "small")])
    last = graph([GraphPlan(40, 30, 1.0, "plain"), GraphPlan(20, 2, 2.0, "small")])
    calls = [CallSequence([GraphCall(0, 0), GraphCall(1, 0)])]
    found = share_budget([first, last], calls, 42)
    assert [one.plan for one in found] == ["small", "plain"]


def test_layers_that_hold_little_fit_where_layers_that_take_little_do_not():
    layer = graph(
        [GraphPlan(10, 9, 1.0, "plain"), GraphPlan(8, 7, 1.2, "low"), GraphPlan(11, 1, 1.4, "lean")]
    )
    calls = [CallSequence([GraphCall(0, 0)] * 8)]
    assert [one.plan for one in share_budget([layer], calls, 20)] == ["lean"]
    assert [one.plan for one in share_budget([layer], calls, 80)] == ["plain"]


def test_a_graph_that_is_called_again_holds_its_part_twice():
    plans = [GraphPlan(10, 8, 1.0, None)]
    assert shared_peak([CallSequence([GraphCall(0, 1), GraphCall(0, 3)])], plans) == 3 + 8 + 10


def test_what_is_there_when_forward_ends_counts_too():
    plans = [GraphPlan(10, 8, 1.0, None)]
    assert shared_peak([CallSequence([GraphCall(0, 1)], 20)], plans) == 28


def branching(seed):
    """A first graph, then one of two others, then a last one."""
    rng = random.Random(seed)
    plans = [some(rng, 4) for _ in range(4)]
    ways = [[0, 1, 3], [0, 2, 3]]
    return plans, [
        CallSequence([GraphCall(k, rng.randint(0, 10)) for k in way], rng.randint(0, 20)) for way in ways
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_way_through_the_branches_of_a_step_fits(seed):
    plans, ways = branching(seed)
    graphs = [graph(one) for one in plans]
    every = {one: shared_peak(ways, one) for one in itertools.product(*plans)}
    assert all(peak == max(shared_peak([way], one) for way in ways) for one, peak in every.items())
    budgets = sorted(set(every.values()))
    for budget in budgets[:: max(1, len(budgets) // 6)]:
        assert shared_peak(ways, share_budget(graphs, ways, budget)) <= budget
    with pytest.raises(InfeasibleError) as refused:
        share_budget(graphs, ways, budgets[0] - 1)
    assert refused.value.smallest_budget == budgets[0]


@pytest.mark.parametrize("seed", range(30))
def test_a_graph_with_one_plan_keeps_it(seed):
    plans, ways = branching(seed)
    kept = plans[1][1]
    graphs = [graph(plans[0]), only_plan(kept, 0), graph(plans[2]), graph(plans[3])]
    budgets = sorted({shared_peak(ways, (a, kept, *b)) for a, *b in itertools.product(plans[0], *plans[2:])})
    for budget in budgets[:: max(1, len(budgets) // 6)]:
        found = share_budget(graphs, ways, budget)
        assert found[1] is kept
        assert shared_peak(ways, found) <= budget


def test_more_on_the_device_counts_all_the_time():
    plans = [GraphPlan(10, 8, 1.0, None)]
    assert shared_peak([CallSequence([GraphCall(0, 1)], 20).with_more(5)], plans) == 33
    assert shared_peak([CallSequence([GraphCall(0, 1)]).with_more(5)], plans) == 16
