"""Rounds of annealing: the same on any number of cores, ended by deadlines and interrupts."""

import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.recompute.annealing import rounds as module
from lowtide.plan.recompute.annealing.rounds import OrderedProblem, anneal, anneal_first, anneal_from
from lowtide.plan.recompute.greedy import greedy
from lowtide.plan.recompute.smallest_budget import lowest_in_order
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


def noted(state, costs):
    """Note what the best costs."""
    costs.append(state.best.cost)


@pytest.fixture
def short(monkeypatch):
    """Rounds of few moves."""
    monkeypatch.setattr(module, "SHORTEST", 400)
    monkeypatch.setattr(module, "_FRESH", 200)
    monkeypatch.setattr(module, "_LONG", 2_000)


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_cores_finds_the_same(seed, short, monkeypatch):
    found = []
    for cores in (1, 2, 7):
        monkeypatch.setattr(module, "usable_cores", lambda cores=cores: cores)
        state, line = searched(seed)
        offered = []
        monkeypatch.setattr(state, "report", partial(noted, state, offered))
        anneal_first(state, line, longest=True)
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
    anneal_first(state, line, longest=False)


@pytest.mark.skipif(not module.COMPILED, reason="so many moves take the kernel in Python a minute")
@pytest.mark.parametrize(("number", "size", "share"), [(2, (120, 130), 0.15), (14, (170, 180), 0.3)])
def test_a_long_round_finds_what_short_ones_do_not(number, size, share):
    graph, seconds, workspace, able = random_step(number, size)
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able)
    least = lowest_in_order(problem)
    budget = int(least + share * (evaluate(problem, ()).peak - least))
    state, line = State(problem, budget, Limits(DAY, 0), None, effort=2.0), OrderedProblem.of(problem)
    anneal_first(state, line, longest=False)
    assert state.best is None
    anneal_first(state, line, longest=True)
    assert state.best is not None
    assert state.best.peak <= budget


def test_without_threads_the_same_is_found(short, monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    found = []

    def refused(*given):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    for stopped in (False, True):
        if stopped:
            monkeypatch.setattr(module.ThreadPoolExecutor, "submit", refused)
        state, line = searched(2)
        anneal(state, line, [greedy(state.problem, state.budget)])
        found.append(state.best and (state.best.cost, state.best.events))
    assert found[0] == found[1]
    assert found[0] is not None


def test_an_error_of_who_watches_is_not_taken_for_a_lack_of_threads(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "COMPILED", True)
    state, line = searched(2)
    good = evaluate(state.problem, greedy(state.problem, state.budget))

    def report():
        raise RuntimeError("the window is closed")

    def run(state, line, one, known, over):
        return module._Ended(0, good.cost, good.events, better=one.seed == 1)

    monkeypatch.setattr(state, "report", report)
    monkeypatch.setattr(module, "_run", run)
    with pytest.raises(RuntimeError, match="window"):  # at the last of two rounds
        module._wave(state, line, module._fresh(line, 2, 50, 0))


def test_a_thread_that_outlives_the_main_one_plans_too(tmp_path):
    program = (
        "import threading\n"
        "from tests.plan.recompute.test_rounds import anneal, greedy, searched\n"
        "def plan():\n"
        "    threading.main_thread().join()\n"
        "    state, line = searched(2)\n"
        "    anneal(state, line, [greedy(state.problem, state.budget)])\n"
        "    print('found', state.best is not None)\n"
        "threading.Thread(target=plan).start()\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "found True\n", done.stderr


def test_the_kernel_in_python_can_be_interrupted(short, monkeypatch):
    monkeypatch.setattr(module, "COMPILED", False)
    state, line = searched(0)
    where = set()

    class Noted:
        def round(self, *given, **options):
            where.add(threading.current_thread())
            return line.annealer.round(*given, **options)

    anneal(state, OrderedProblem(line.problem, Noted(), line.plain), [])
    assert where == {threading.current_thread()}


def test_what_other_rounds_have_found_is_taken_where_one_is_interrupted(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 3)
    monkeypatch.setattr(module, "COMPILED", True)
    state, line = searched(0)
    good = evaluate(state.problem, greedy(state.problem, state.budget))
    assert good.peak <= state.budget
    others = threading.Barrier(3)

    def run(state, line, one, known, over):
        others.wait(60)
        if one.seed == 0:
            raise KeyboardInterrupt
        return module._Ended(0, good.cost, good.events, better=True)

    monkeypatch.setattr(module, "_run", run)
    with pytest.raises(KeyboardInterrupt):
        module._wave(state, line, module._fresh(line, 3, 50, 0))
    assert state.best == good
