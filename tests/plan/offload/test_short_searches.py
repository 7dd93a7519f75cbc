"""What a search does first where it has little time: it must not end before its best method began."""

import pytest

from lowtide.plan.bounds.cut import Effort
from lowtide.plan.check.checker import check
from lowtide.plan.offload import search as away
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.recompute import portfolio
from lowtide.plan.recompute.annealing import rounds as annealing
from tests.plan.bounds.test_repeated_blocks import problem_of
from tests.planning import searched

LINK = Link(20.0, 20.0, 0.0)


@pytest.fixture(scope="module")
def deep():
    return problem_of(40)


@pytest.fixture
def order(monkeypatch):
    """Which methods a portfolio begins, in order; none of them does anything."""
    begun = []

    def stub(name, result):
        return lambda *given, **options: begun.append(name) or result(*given)

    monkeypatch.setattr(portfolio, "anneal_from", stub("annealing", lambda *given: given[2]))
    monkeypatch.setattr(portfolio, "anneal_first", stub("plain step", lambda *given: None))
    monkeypatch.setattr(portfolio, "anneal", stub("annealing", lambda *given: None))
    monkeypatch.setattr(portfolio, "greedy", stub("greedy", lambda *given: frozenset()))
    monkeypatch.setattr(portfolio._Search, "solve_cuts", stub("cuts", lambda *given: []))
    monkeypatch.setattr(portfolio, "shared", lambda *given: [])
    monkeypatch.setattr(portfolio._Search, "done", lambda self: False)
    return begun


@pytest.mark.parametrize(
    ("effort", "expected"),
    [
        (0.2, ["annealing", "plain step", "cuts", "greedy", "annealing"]),
        (1000.0, ["plain step", "cuts", "greedy", "annealing"]),
    ],
)
def test_a_given_schedule_is_annealed_before_all_else_where_time_is_short(deep, order, effort, expected):
    budget = int(evaluate(deep, ()).peak * 0.6)
    assert portfolio.recompute_or_none(deep, budget, effort=effort, starts=[()]) is None
    assert order == expected


def test_without_a_given_schedule_the_plain_step_is_annealed_first(deep, order):
    budget = int(evaluate(deep, ()).peak * 0.6)
    assert portfolio.recompute_or_none(deep, budget, effort=0.2) is None
    assert order == ["plain step", "cuts", "greedy", "annealing"]


def test_a_given_schedule_that_is_annealed_first_gives_the_same_plan_each_time(deep, monkeypatch):
    monkeypatch.setattr(portfolio._Search, "done", lambda self: False)
    monkeypatch.setattr(portfolio._Search, "solve_cuts", lambda *given, **options: [])
    budget = int(evaluate(deep, ()).peak * 0.6)
    start = portfolio.greedy(deep, budget)
    found = [portfolio.recompute_or_none(deep, budget, effort=0.2, starts=[start]) for _ in range(2)]
    assert found[0].events == found[1].events
    assert found[0].cost < evaluate(deep, start).cost
    check(deep.graph, found[0].program, budget=budget)


def test_one_choice_for_repeated_blocks_is_tried_however_short_the_time_limit(deep, monkeypatch):
    chosen, solve = [], away.solve_cuts

    def solved(asked, effort, **options):
        chosen.append(options)
        return solve(asked, Effort(100, 1000.0, effort.slack), **options)

    monkeypatch.setattr(away, "solve_cuts", solved)
    monkeypatch.setattr(away._Away, "left", lambda _: -1.0)
    monkeypatch.setattr(portfolio._Search, "done", lambda self: self.best is not None)
    budget = int(evaluate(deep, ()).peak * 0.6)
    found = searched(deep, budget, time_limit=0.01, only={"recompute", "offload"}, link=LINK)
    assert [list(options) for options in chosen] == [["ties"]]
    assert found.method.startswith("offload")
    check(deep.graph, found.program, budget=budget)


@pytest.mark.parametrize("known", [True, False])
def test_once_time_is_up_and_a_plan_is_known_nothing_else_begins(deep, monkeypatch, known):
    monkeypatch.setattr(annealing, "_WORK", 1)
    monkeypatch.setattr(portfolio._Search, "solve_cuts", lambda *given, **options: [])
    budget = int(evaluate(deep, ()).peak * 0.6)
    plan = searched(deep, budget, time_limit=1000)
    begun = []
    monkeypatch.setattr(away._Away, "left", lambda _: 0.0)
    monkeypatch.setattr(away._Away, "reuse", lambda self: self.offer(plan if known else None))
    monkeypatch.setattr(away._Away, "alone", lambda self: begun.append("alone") or self.offer(plan))
    monkeypatch.setattr(away, "solve_cuts", lambda *given, **options: begun.append("cuts"))
    found = searched(deep, budget, time_limit=1000, only={"recompute", "offload"}, link=LINK)
    assert begun == ([] if known else ["alone"])
    assert found.events == plan.events


COMPILED_ONLY = pytest.mark.skipif(not portfolio.COMPILED, reason="the kernel is not compiled here")


@pytest.fixture
def few_moves(monkeypatch):
    """Nothing but greedy, and the fewest moves."""
    monkeypatch.setattr(annealing, "_WORK", 1)
    monkeypatch.setattr(portfolio._Search, "solve_cuts", lambda *given, **options: [])
    monkeypatch.setattr(portfolio, "shared", lambda *given: [])
    monkeypatch.setattr(away, "shared", lambda *given: [])


def is_better_than_greedy(problem, budget, found):
    """Whether the schedule is an annealed one, and valid."""
    check(problem.graph, found.program, budget=budget)
    return (
        found.method == "annealing" and found.cost < evaluate(problem, portfolio.greedy(problem, budget)).cost
    )


@COMPILED_ONLY
@pytest.mark.usefixtures("few_moves")
def test_where_time_is_up_after_greedy_its_schedule_is_annealed_all_the_same(deep, monkeypatch):
    monkeypatch.setattr(portfolio._Search, "left", lambda self: -1.0 if self.walked else 1e9)
    budget = int(evaluate(deep, ()).peak * 0.6)
    found = [searched(deep, budget, time_limit=1000) for _ in range(2)]
    assert is_better_than_greedy(deep, budget, found[0])
    assert (found[0].events, found[0].stopped_by_time) == (found[1].events, True)


@COMPILED_ONLY
@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize("only", [{"recompute"}, {"recompute", "offload"}])
def test_where_time_is_up_before_greedy_it_is_tried_after_all(deep, monkeypatch, only):
    monkeypatch.setattr(portfolio._Search, "left", lambda _: -1.0)
    monkeypatch.setattr(away._Away, "left", lambda _: -1.0)
    budget = int(evaluate(deep, ()).peak * 0.6)
    found = searched(deep, budget, time_limit=1000, only=only, link=LINK)
    assert is_better_than_greedy(deep, budget, found)


@pytest.mark.usefixtures("few_moves")
@pytest.mark.parametrize(("name", "value"), [("COMPILED", False), ("_OVERTIME", 0)])
def test_where_a_round_would_be_long_none_begins_once_time_is_up(deep, monkeypatch, name, value):
    monkeypatch.setattr(portfolio, name, value)
    monkeypatch.setattr(portfolio._Search, "left", lambda _: -1.0)
    budget = int(evaluate(deep, ()).peak * 0.6)
    assert searched(deep, budget, time_limit=1000).method == "greedy"
