"""Greedy on steps with many storages, where the order in which they are let go of is used for a while."""

import pytest

from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.reorder import _Line
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.recompute import greedy as module
from lowtide.plan.recompute.greedy import greedy
from tests.plan.written import step


def chain(length):
    """Each operator of backward reads what its operator of forward has read and made."""
    forward = [f"f{k}: a{k} w{k} -> a{k + 1}" for k in range(length)]
    backward = [f"b{k}: g{k + 1} a{k} a{k + 1} w{k} -> g{k} d{k} @backward" for k in reversed(range(length))]
    leaves = " ".join(f"w{k}:parameter" for k in range(length))
    sizes = {f"a{k}": 40 + 4 * (k % 7) for k in range(length + 1)}
    return step(f"a0:input {leaves}", *forward, *backward, returned=f"a{length}", sizes=sizes)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_an_order_that_is_used_for_a_while_is_as_good(share, monkeypatch):
    problem = build_problem(chain(150))
    budget = int(evaluate(problem, ()).peak * share)
    anew = evaluate(problem, greedy(problem, budget))
    monkeypatch.setattr(module, "_MANY", 20)
    kept = evaluate(problem, greedy(problem, budget))
    assert anew.peak <= budget
    assert kept.peak <= budget
    assert 0 < kept.cost <= 1.05 * anew.cost


def test_a_line_is_a_list_whose_members_move():
    listed, line = list(range(9)), _Line(9)
    for v, after in ((5, 0b10), (3, 0), (8, 0b1000000), (1, 0b1), (7, 0b100)):
        at = to = listed.index(v)
        while to and not after >> listed[to - 1] & 1:
            to -= 1
        listed.insert(to, listed.pop(at))
        line.hoist(v, after)
        assert line.members() == listed
    assert _Line(0).members() == []
