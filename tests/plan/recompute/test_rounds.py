"""Rounds of annealing: the same on any number of cores, ended by deadlines and interrupts."""

import threading
import time

import pytest

from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.recompute.annealing import rounds as module
from lowtide.plan.recompute.annealing.rounds import OrderedProblem, anneal, anneal_first, anneal_from
from lowtide.plan.recompute.greedy import greedy
from lowtide.plan.recompute.state import State
from lowtide.plan.request import Limits
from tests.plan.random_steps import random_step

DAY = 86_400.0


def searched(seed, effort=0.001):
    """A search at three quarters of a random step's memory that knows nothing yet."""
    graph, seconds, workspace, able = random_step(seed, (25, 35))
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able)
    budget = (3 * evaluate(problem, ()).peak + problem.resident) // 4
    return State(problem, budget, Limits(DAY, seed), None, effort=effort), OrderedProblem.of(problem)


@pytest.fixture
def short(monkeypatch):
    """Rounds of few moves."""
    monkeypatch.setattr(module, "SHORTEST", 400)
    monkeypatch.setattr(module, "_FRESH", 200)


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_cores_finds_the_same(seed, short, monkeypatch):
    found = []
    for cores in (1, 2, 7):
        monkeypatch.setattr(module, "usable_cores", lambda cores=cores: cores)
        state, line = searched(seed)
        offered = []
        monkeypatch.setattr(state, "report", lambda: offered.append(state.best.cost))  # noqa: B023
        anneal_first(state, line)
        anneal(state, line, [greedy(state.problem, state.budget)])
        found.append((state.best and (state.best.cost, state.best.events), offered))
    assert found[0] == found[1] == found[2]
    assert found[0][1]  # something was found


@pytest.mark.skipif(not module.COMPILED, reason="the kernel in Python holds the interpreter's lock")
def test_rounds_of_a_wave_run_side_by_side(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    state, line = searched(0)
    together = threading.Barrier(4)

    class Together:
        def round(self, *given, **options):
            together.wait(60)
            return line.annealer.round(*given, **options)

    ways = module._fresh(line, 4, 50, 0)
    ended = module._wave(state, OrderedProblem(line.problem, Together(), line.plain), ways)
    assert ended


def test_what_rounds_come_to_is_kept_where_time_is_up(short, monkeypatch):
    state, line = searched(1)

    class Late:
        def round(self, *given, **options):
            state.late = True  # while a round runs
            return line.annealer.round(*given, **{**options, "moves": 20_000})

    anneal(state, OrderedProblem(line.problem, Late(), line.plain), [greedy(state.problem, state.budget)])
    assert state.done()
    assert state.best is not None
    assert state.best.peak <= state.budget


def test_an_interrupt_ends_all_rounds_of_a_wave_and_keeps_what_was_found(short, monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    state, line = searched(2, effort=10.0)
    begun = []

    class Slow:
        def round(self, *given, **options):
            begun.append(time.monotonic())
            return line.annealer.round(*given, **{**options, "moves": 2_000})

    def report():
        raise KeyboardInterrupt

    monkeypatch.setattr(state, "report", report)
    with pytest.raises(KeyboardInterrupt):
        anneal(state, OrderedProblem(line.problem, Slow(), line.plain), [])
    assert state.best is not None
    assert not [one for one in threading.enumerate() if one.name.startswith("lowtide-annealing")]
    assert len(begun) < 32


def test_a_schedule_is_annealed_to_one_that_is_no_worse(short):
    for seed in range(4):
        state, line = searched(seed)
        start = evaluate(state.problem, greedy(state.problem, state.budget))
        if start.peak > state.budget:
            continue
        state.offer(start, "greedy")
        ended = anneal_from(state, line, start.events, moves=2_000, seed=0, hot=2.0, method="blocks")
        assert state.best.cost <= start.cost
        outcome = evaluate(state.problem, ended)
        assert outcome.peak > state.budget or outcome.cost >= state.best.cost
        assert state.method in ("greedy", "blocks")


def test_schedules_that_are_annealed_again_differ():
    ended = [
        module._Ended(excess, cost, frozenset()) for excess, cost in ((5, 1), (0, 3), (0, 3), (0, 2), (7, 0))
    ]
    assert [(one.excess, one.cost) for one in module._kept(ended)] == [(0, 2), (0, 3), (5, 1), (7, 0)]


def test_nothing_is_annealed_first_where_there_is_no_time_for_it(monkeypatch):
    state, line = searched(3, effort=1e-6)
    monkeypatch.setattr(module, "_wave", lambda *given: pytest.fail("annealed"))
    anneal_first(state, line)
