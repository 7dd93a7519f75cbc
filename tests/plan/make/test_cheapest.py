"""The cheapest choices, against all of them."""

import itertools
import math
import random

import pytest

from lowtide.errors import PlanError
from lowtide.plan.make.cheapest import MemoryRow, cheapest, cost_of, fastest


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


def drawn(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 3) for _ in range(5)]

    def table(a, b, forbidden):
        rows = [[draw.randint(0, 9) for _ in range(sizes[b])] for _ in range(sizes[a])]
        if forbidden and sizes[a] * sizes[b] > 2:
            rows[0][0] = math.inf
        return rows

    alone = [[draw.randint(0, 9) for _ in range(size)] for size in sizes]
    pairs = {(a, a + 1): table(a, a + 1, draw.random() < 0.3) for a in range(4)}
    bytes_alone = [[draw.randint(0, 9) for _ in range(size)] for size in sizes]
    bytes_pairs = {(a, a + 1): table(a, a + 1, False) for a in range(4)}
    return sizes, alone, pairs, MemoryRow(bytes_alone, bytes_pairs, draw.randint(15, 50))


@pytest.mark.parametrize("seed", range(20))
def test_as_cheap_as_the_best_that_fits_in_memory(seed):
    sizes, alone, pairs, memory = drawn(seed)
    for row in (None, memory):
        every = list(itertools.product(*map(range, sizes)))
        if row is not None:
            every = [one for one in every if cost_of(one, row.alone, row.pairs) <= row.most]
        least = min((cost_of(one, alone, pairs) for one in every), default=math.inf)
        if least == math.inf:
            with pytest.raises(PlanError, match="in this memory"):
                cheapest(alone, pairs, 5.0, row)
            continue
        found = cheapest(alone, pairs, 5.0, row)
        assert found.cost == pytest.approx(least)
        assert found.bound <= least + 1e-6
        assert found.choices in every


class _Parts:
    """Choices that compute, wait, and talk beside what they compute."""

    def __init__(self, seed):
        draw = random.Random(f"parts {seed}")
        sizes = [draw.randint(1, 3) for _ in range(5)]
        scale = draw.choice([0.2, 1.0, 5.0])
        self.every = list(itertools.product(*map(range, sizes)))
        self.first = [[draw.random() for _ in range(size)] for size in sizes]
        self.waits = [[draw.choice([0.0, draw.random()]) for _ in range(size)] for size in sizes]
        self.second = {
            (a, b): [[scale * draw.choice([0.0, draw.random()]) for _ in range(sizes[b])] for _ in range(sizes[a])]
            for a, b in itertools.combinations(range(5), 2)
        }  # fmt: skip

    def weighted(self, first, second):
        rows = [zip(*row, strict=True) for row in zip(self.first, self.waits, strict=True)]
        alone = [[first * one + other for one, other in row] for row in rows]
        return alone, {k: [[second * x for x in row] for row in table] for k, table in self.second.items()}

    def taken(self, choices):
        """The second part goes on beside all of the first."""
        return max(cost_of(choices, *self.weighted(*part)) for part in ((1.0, 0.0), (0.0, 1.0)))


@pytest.mark.parametrize("seed", range(25))
def test_no_choices_take_less_than_the_bound_where_parts_go_on_beside_each_other(seed):
    parts = _Parts(seed)
    found = fastest(parts.weighted, parts.taken, 10.0)
    assert found.cost == parts.taken(found.choices)
    assert found.bound <= min(map(parts.taken, parts.every)) + 1e-6
    added = cheapest(*parts.weighted(1.0, 1.0), 10.0)
    assert found.cost <= parts.taken(added.choices) + 1e-9


def test_choices_whose_parts_hide_each_other_are_found():
    """In more than a few of these the cheapest sum is not the fastest; the bound is near what is found."""
    every = [_Parts(seed) for seed in range(25)]
    found = [fastest(one.weighted, one.taken, 10.0) for one in every]
    sums = [one.taken(cheapest(*one.weighted(1.0, 1.0), 10.0).choices) for one in every]
    assert sum(one.cost < 0.99 * other for one, other in zip(found, sums, strict=True)) > 3
    assert sum(one.bound > 0.8 * one.cost for one in found) > 12


@pytest.mark.parametrize(("first", "chosen"), [(0.985, 0), (0.975, 1)])
def test_the_least_sum_is_kept_where_another_choice_saves_next_to_nothing(first, chosen):
    """What goes on beside takes memory and the link."""

    def weighted(one, other):
        return [[one * 1.0, one * first], [0.0]], {(0, 1): [[0.0], [other * 0.5]]}

    def taken(choices):
        return (1.0, first)[choices[0]]

    assert fastest(weighted, taken, 5.0).choices == (chosen, 0)
