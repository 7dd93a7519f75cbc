"""Ctrl-C ends a search: with the best plan so far where there is one, soon, and with a plan that holds."""

import _thread
import itertools
import threading
import time
from dataclasses import replace

import pytest

from lowtide import read
from lowtide.cost.unit import unit_seconds
from lowtide.errors import PlanError
from lowtide.plan.bounds import lower_bounds as bounds
from lowtide.plan.bounds.highs import run_solver
from lowtide.plan.bounds.lower_bounds import smallest_conceivable
from lowtide.plan.bounds.relaxation import relax
from lowtide.plan.budget import Budget
from lowtide.plan.check.checker import check
from lowtide.plan.make import make_plan as making
from lowtide.plan.make import sweep
from lowtide.plan.make.search import Link
from lowtide.plan.offload import search as away
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.costs import Costs
from lowtide.plan.recompute import optimal, portfolio
from lowtide.plan.request import DeviceRoom, Limits, PlanRequest
from tests.conftest import document_path
from tests.plan.random_steps import random_step
from tests.planning import plan_for, searched


@pytest.fixture(scope="module")
def unet():
    return read(document_path("000")).step.graph


def unit(graph):
    return Costs(tuple(unit_seconds(graph)), (), "unit", forward_only=True)


def interrupt(*_, **__):
    raise KeyboardInterrupt


class Interrupting:
    """A function that is interrupted at its nth call."""

    def __init__(self, function, calls):
        self.function, self.left = function, calls

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("only", [("recompute",), ("recompute", "offload")])
@pytest.mark.parametrize("call", [1, 2])
def test_in_the_middle_of_a_cut_program(unet, call, only, monkeypatch):
    for module in (bounds, away):
        monkeypatch.setattr(module, "solve_cuts", Interrupting(module.solve_cuts, call))
    plan = plan_for(
        unet,
        unit(unet),
        Budget(share=0.5),
        only=only,
        link=Link(1e8, 1e8),
        smallest_seconds=2.0,
        time_limit=60,
    )
    assert plan.interrupted
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    check(unet, plan.program, budget=plan.budget_bytes)
    assert "interrupted" in plan.explain()


@pytest.mark.parametrize("call", [1, 2])
def test_while_the_host_is_tried(unet, monkeypatch, call):
    """The plan that was interrupted counts, and nothing is tried afterwards."""
    calls = []

    def one(*args, **kwargs):
        found = recompute_or_none(*args, **kwargs)
        calls.append(found)
        return replace(found, interrupted=True) if len(calls) == call else found

    recompute_or_none = away.recompute_or_none
    monkeypatch.setattr(away, "recompute_or_none", one)
    problem = build_problem(unet, unit_seconds(unet))
    budget = int(evaluate(problem, ()).peak * 0.5)
    found = searched(problem, budget, only={"recompute", "offload"}, link=Link(1e8, 1e8), time_limit=30)
    assert found.interrupted
    assert len(calls) == call
    assert found.bound <= found.cost
    assert found.peak <= budget


def test_while_the_smallest_budget_is_looked_for(unet, monkeypatch):
    monkeypatch.setattr(making, "smallest_budget", interrupt)
    plan = plan_for(unet, unit(unet), Budget(share=0.9), smallest_seconds=2.0)
    assert plan.interrupted
    assert plan.gap == 0


def test_with_nothing_found_it_passes_through(unet, monkeypatch):
    monkeypatch.setattr(portfolio._Search, "work", interrupt)
    for only in ({"recompute"}, {"recompute", "offload"}):
        with pytest.raises(KeyboardInterrupt):
            plan_for(unet, unit(unet), Budget(share=0.5), only=only, link=Link(1e8, 1e8))


def test_a_plan_with_pauses_is_whole_when_it_is_shown(monkeypatch):
    """The shortest path gives events of a problem of its own, which must be there once they are."""
    graph, seconds, workspace, _ = random_step(3, (3, 7), charges=False)
    problem = build_problem(graph, seconds, workspace_bytes=workspace)
    paused = replace(problem)

    def as_events(*args):
        return paused, original(*args)[1]

    original = optimal.as_events
    monkeypatch.setattr(optimal, "as_events", as_events)
    relaxation = relax(problem)
    floor, peak = smallest_conceivable(relaxation), evaluate(problem, ()).peak
    run = portfolio._Search(problem, (floor + peak) // 2, Limits(progress=interrupt), relaxation)
    with pytest.raises(KeyboardInterrupt):
        run.exactly(10_000)
    assert run.found().problem is paused
    assert run.found().method == "exact"


def test_a_sweep_ends_with_the_budgets_so_far(unet, monkeypatch):
    shares = []

    def planned(graph, costs, request, room, **options):
        shares.append(request.budget.share)
        if request.budget.share < 0.85:
            raise KeyboardInterrupt
        return making.make_plan(graph, costs, request, room, **options)

    monkeypatch.setattr(sweep, "make_plan", planned)
    found = sweep.sweep(unet, unit(unet), PlanRequest(Budget(share=1.0)), DeviceRoom())
    assert shares == [1.0, 0.9, 0.8]
    assert found.interrupted
    assert len(found.points) == 2
    assert all(a.overhead <= b.overhead for a, b in itertools.pairwise(found.points))


def test_a_sweep_ends_with_the_plan_that_was_interrupted(unet, monkeypatch):
    monkeypatch.setattr(making, "smallest_budget", interrupt)
    request = PlanRequest(Budget(share=1.0), smallest_seconds=1.0)
    found = sweep.sweep(unet, unit(unet), request, DeviceRoom(), shares=(0.95, 0.9, 0.8))
    assert found.interrupted
    assert len(found.points) == 1


class Endless:
    """A solver that asks whether to stop, and does nothing else; Ctrl-C comes while it runs."""

    def __init__(self):
        self.cbMipInterrupt = self.cbSimplexInterrupt = self
        self.stopped = False

    def subscribe(self, callback):
        self.callback = callback

    def interrupt(self):
        self.stopped = True

    def run(self):
        _thread.interrupt_main()
        end = time.monotonic() + 20
        while not self.stopped and time.monotonic() < end:
            self.callback(self)
            time.sleep(0.01)


def test_the_solver_is_told_to_stop_and_waited_for():
    solver = Endless()
    with pytest.raises(KeyboardInterrupt):
        run_solver(solver)
    assert solver.stopped
    assert not any(thread.name == "lowtide-solver" and thread.is_alive() for thread in threading.enumerate())


def test_what_the_solver_raises_is_raised():
    solver = Endless()
    solver.run = lambda: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(MemoryError):
        run_solver(solver)


def test_a_host_without_memory_is_said(unet, monkeypatch):
    monkeypatch.setattr(portfolio._Search, "work", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(PlanError, match="the host has no memory left"):
        plan_for(unet, unit(unet), Budget(share=0.5))
