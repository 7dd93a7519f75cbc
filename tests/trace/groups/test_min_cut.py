"""The smallest cut against all cuts of small networks."""

import itertools
import random

import pytest

from lowtide.trace.groups.min_cut import FlowNetwork


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_smallest_of_all_and_the_nearest_to_the_sink(seed):
    draw = random.Random(seed)
    size = draw.randint(2, 7)
    edges = [
        (a, b, draw.choice([1, 2, 3, 5, 1 << 60]))
        for a, b in itertools.permutations(range(size), 2)
        if draw.random() < 0.5
    ]
    network = FlowNetwork()
    for _ in range(size):
        network.node()
    for edge in edges:
        network.edge(*edge)

    def cut(behind):
        return sum(room for a, b, room in edges if a not in behind and b in behind)

    others = range(2, size)
    every = [{1, *chosen} for k in range(size - 1) for chosen in itertools.combinations(others, k)]
    least = min(map(cut, every))
    found = network.sink_side(0, 1)
    assert cut(found) == least
    assert all(found <= behind for behind in every if cut(behind) == least)
