"""The cheapest choices, against all of them."""

import itertools
import random

import pytest

from lowtide.plan.make.cheapest import cheapest, cost_of


@pytest.mark.parametrize("seed", range(12))
def test_as_cheap_as_the_best_of_all(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 6)
    alone = [[draw.choice([0.0, draw.random()]) for _ in range(draw.randint(1, 3))] for _ in range(count)]
    pairs = {}
    for a, b in itertools.combinations(range(count), 2):
        if draw.random() < 0.6:
            pairs[a, b] = [[draw.choice([0.0, draw.random()]) for _ in alone[b]] for _ in alone[a]]
    found = cheapest(alone, pairs, 10.0)
    every = itertools.product(*(range(len(costs)) for costs in alone))
    best = min(cost_of(choices, alone, pairs) for choices in every)
    assert found.cost == pytest.approx(best)
    assert found.cost == cost_of(found.choices, alone, pairs)
    assert found.bound <= best + 1e-6
