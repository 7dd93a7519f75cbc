"""A search that starts over: which heights it asks for, what it may call proven, and when it ends."""

import time

import numpy as np
import pytest

from lowtide.plan.address import omnimalloc_search
from lowtide.plan.address import place as placing
from lowtide.plan.address.boxes import boxes_of
from lowtide.plan.address.omnimalloc_search import ORDERS, Solver, search, solver_of
from lowtide.plan.address.place import place
from lowtide.plan.address.restarts import search_again
from tests.plan.address.instances import least_arena, overlaps, random_allocations


class _Known:
    """Finds a height in one order alone, with enough nodes, and proves nothing below it if it may."""

    def __init__(self, least, order, nodes, proves=False):
        self.least, self.order, self.nodes, self.proves = least, order, nodes, proves
        self.asked = []

    def below(self, height, orders, seconds, nodes=None):
        self.asked.append((height, tuple(orders), nodes))
        enough = self.order in orders and (nodes is None or nodes >= self.nodes)
        found = np.array([self.least]) if enough and self.least < height else None
        return found, self.proves and nodes is None and self.order in orders


def searched(solver, heights, seconds=5.0, groups=(("a",), ("b",), ("c",))):
    taken = []

    def take(offsets):
        taken.append(int(offsets[0]))
        return taken[-1]

    proven = search_again(solver, groups, take, heights, deadline=time.perf_counter() + seconds)
    return taken, proven


def test_the_order_that_reaches_the_bound_is_found_with_the_nodes_that_it_needs():
    solver = _Known(100, "b", 20_000)
    taken, proven = searched(solver, (100, 180))
    assert (taken[-1], proven) == (100, True)
    assert solver.asked[-1] == (101, ("b",), 32_000)
    nodes = [nodes for _, _, nodes in solver.asked if nodes is not None]
    assert nodes[:3] == [500, 500, 500]


def test_heights_between_are_asked_for_where_the_bound_is_out_of_reach():
    solver = _Known(140, "c", 400, proves=True)
    taken, proven = searched(solver, (100, 180))
    assert (taken[-1], proven) == (140, True)
    assert (101, ("c",), 500) in solver.asked
    assert (160, ("c",), 500) in solver.asked


def test_nothing_is_asked_twice_that_found_nothing():
    solver = _Known(0, "nobody", 1)
    searched(solver, (100, 180), seconds=0.2)
    limited = [one for one in solver.asked if one[2] is not None]
    assert limited
    assert len(set(limited)) == len(limited)


def test_nothing_is_searched_once_the_bound_is_reached_or_the_time_is_over():
    solver = _Known(0, "a", 1)
    assert searched(solver, (100, 100)) == ([], True)
    assert searched(solver, (100, 180), seconds=-1.0) == ([], False)
    assert not solver.asked


@pytest.mark.parametrize("seed", range(12))
def test_the_solver_finds_what_there_is_and_proves_that_there_is_no_more(seed):
    asked = [one for one in random_allocations(seed, 6) if one.bytes]
    if not asked:
        return
    boxes, least = boxes_of(asked, 1), least_arena(asked)
    solver = solver_of(boxes)
    assert isinstance(solver, Solver)
    found, _ = solver.below(least + 1, ORDERS[:2], 5.0)
    assert boxes.height(found) == least
    assert solver.below(least, ORDERS[:2], 5.0) == (None, True)
    assert not solver.below(least, ORDERS[:2], 5.0, 500)[1]
    assert boxes.height(solver.greedy(1.0, 1)) >= least
    places, _ = search(boxes, 0.5)
    assert boxes.height(places) >= least


def test_a_version_of_omnimalloc_without_these_names_still_searches(monkeypatch):
    monkeypatch.setattr(placing, "solver_of", lambda boxes: None)
    asked = random_allocations(5, 12)
    found = place(asked, time_limit=0.3)
    assert not overlaps(found.allocations)
    assert found.arena_bytes <= found.greedy_bytes


def test_missing_names_are_seen(monkeypatch):
    from omnimalloc import _cpp

    monkeypatch.delattr(_cpp, "try_solve_many")
    assert omnimalloc_search.solver_of(boxes_of(random_allocations(5, 12), 1)) is None
