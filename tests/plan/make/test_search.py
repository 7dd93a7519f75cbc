"""Plans are inside their budget, no bound is above the optimum, and small problems are solved to it."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from lowtide import read
from lowtide.cost.unit import unit_seconds
from lowtide.errors import InfeasibleError
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.bounds.cut import Effort
from lowtide.plan.bounds.lower_bounds import Cuts, smallest_conceivable, surely_infeasible
from lowtide.plan.bounds.relaxation import relax
from lowtide.plan.budget import Budget
from lowtide.plan.make import candidates
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.problem.pauses import as_events, with_pauses
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.in_place import pointwise
from lowtide.plan.program.instructions import Run, Send
from lowtide.plan.program.simulate import simulate
from lowtide.plan.recompute.annealing import rounds as annealing
from lowtide.plan.recompute.greedy import greedy
from lowtide.plan.recompute.shortest_path import exact
from lowtide.plan.recompute.smallest_budget import lowest_in_order, smallest_budget
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result import infeasible
from tests.plan.optimum import optimum
from tests.plan.random_steps import random_step
from tests.planning import plan_for, searched

SEED = Path(__file__).parents[3] / "examples" / "documents" / "000_1953327273121cc3.txt"
PLAIN_PEAK = 7_329_956_112


@pytest.fixture(scope="module")
def unet():
    graph = read(SEED).step.graph
    return build_problem(graph, unit_seconds(graph))


def small_case(seed, forward=(3, 7)):
    graph, seconds, workspace, able = random_step(seed, forward, charges=False)
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able if seed % 2 else ())
    floor, peak = lowest_in_order(problem), evaluate(problem, ()).peak
    return problem, [int(floor + (peak - floor) * k / 4) for k in range(4)], workspace


@pytest.mark.parametrize("seed", range(8))
def test_small_problems_are_solved_at_least_to_the_optimum_of_program_order(seed):
    problem, budgets, workspace = small_case(seed)
    for budget in budgets:
        best = optimum(problem, budget)
        try:
            found = searched(problem, budget)
        except InfeasibleError as error:
            assert best is None
            assert error.smallest_budget > budget
            continue
        assert found.bound <= found.cost
        assert best is None or found.cost <= best
        assert evaluate(found.problem, found.events).cost == found.cost
        timeline = simulate(problem.graph, found.program, workspace_bytes=workspace)
        assert timeline.peak_bytes <= found.peak <= budget


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("any_order", [False, True])
def test_no_bound_exceeds_the_optimum(seed, any_order):
    """That of program order, which bounds for any order do not exceed either."""
    problem, budgets, _ = small_case(seed, (3, 6))
    relaxation = relax(problem)
    in_turn = [(1 << v) - 1 for v in range(len(problem.ops))]
    for budget in budgets:
        best = optimum(problem, budget)
        cuts = Cuts(problem, budget, evaluate(problem, ()).peak_at, relaxation if any_order else None)
        for _ in range(4):
            result = cuts.solve(Effort(nodes=2000, seconds=5))
            if not result.feasible:
                assert best is None
                break
            assert best is None or result.bound <= best
            if result.events is None or not cuts.tighten(result.events):
                break
        path = exact(problem, budget, relaxation.precedence.before if any_order else in_turn)
        assert path.finished
        if any_order:
            assert path.runs is not None or best is None
            assert best is None or path.bound <= best
            continue
        assert (path.runs is None) == (best is None)
        if path.runs is not None:
            paused, events = as_events(problem, path.runs)
            outcome = evaluate(paused, events)
            assert (outcome.cost, path.bound) == (best, best)
            assert outcome.peak <= budget
            # the same where operators that do nothing, as copies from the host do, are there already
            idle = with_pauses(problem, [1] * len(problem.ops))
            line, again = [], set()
            for op in path.runs:
                line += [2 * op + 1] if op in again else [2 * op, 2 * op + 1]
                again.add(op)
            outcome = evaluate(*as_events(idle, line))
            assert (outcome.cost, outcome.peak <= budget) == (best, True)


@pytest.mark.parametrize(("share", "most"), [(0.9, 6), (0.7, 31), (0.5, 85)])
def test_the_unet_document_is_planned_to_proven_optima(unet, share, most):
    assert unet.total_time == 267
    found = searched(unet, int(PLAIN_PEAK * share), time_limit=60)
    assert (found.cost, found.bound, found.gap) == (most, most, 0.0)
    assert simulate(unet.graph, found.program).peak_bytes == found.peak <= int(PLAIN_PEAK * share)


def test_the_unet_document_is_feasible_at_a_third_and_as_far_down_as_anything_can_be(unet):
    graph = unet.graph
    problem = build_problem(graph, unit_seconds(graph), able=pointwise(graph))
    assert evaluate(problem, ()).peak == PLAIN_PEAK
    known = smallest_budget(problem, time_limit=600)  # it ends by itself
    assert known.budget <= 0.33 * PLAIN_PEAK
    assert evaluate(problem, known.events).peak == known.budget
    relaxation = relax(problem)
    floor = smallest_conceivable(relaxation)
    assert not surely_infeasible(problem, relaxation, known.budget)
    # 3% above the largest working set of one operator is out of reach, by less than 0.01%
    assert known.budget < 1.0001 * 1.03 * floor
    assert surely_infeasible(problem, relaxation, int(1.03 * floor))


def test_what_fits_is_stored(unet):
    found = searched(unet, PLAIN_PEAK)
    assert (found.cost, found.bound, found.gap, found.method, found.events) == (
        0,
        0,
        0.0,
        "plain",
        frozenset(),
    )


def test_too_small_a_budget_names_one_that_works(unet):
    with pytest.raises(InfeasibleError, match="smallest budget") as error:
        searched(unet, PLAIN_PEAK // 4, time_limit=600)
    smallest = error.value.smallest_budget
    assert error.value.floor <= smallest <= 1.035 * error.value.floor
    assert evaluate(unet, error.value.known.events).peak == smallest


def test_the_smallest_plan_is_looked_for_once(unet, monkeypatch):
    monkeypatch.setattr(infeasible, "smallest_budget", None)
    graph = unet.graph
    costs = Costs(tuple(unit_seconds(graph)), (), "unit", forward_only=True)
    with pytest.raises(InfeasibleError, match="live at its peak"):
        plan_for(graph, costs, Budget(bytes=PLAIN_PEAK // 4), time_limit=1)


def test_the_same_seed_gives_the_same_plan(unet, monkeypatch):
    monkeypatch.setattr(annealing, "_WORK", 50_000)
    budget = int(PLAIN_PEAK * 0.49)
    found = [searched(unet, budget, seed=3, time_limit=100) for _ in range(2)]
    assert found[0].events == found[1].events
    assert not found[0].stopped_by_time


def test_a_search_that_the_time_limit_ends_says_so(unet):
    graph = unet.graph
    costs = Costs(tuple(unit_seconds(graph)), (), "unit", forward_only=True)
    plan = plan_for(graph, costs, Budget(bytes=int(PLAIN_PEAK * 0.49)), time_limit=0.05)
    assert plan.stopped_by_time
    assert plan.gap > 0
    assert "search     ended by the time limit" in plan.explain()
    assert "ended by the time limit" not in msgspec.structs.replace(plan, gap=0.0).explain()
    whole = plan_for(graph, costs, Budget(bytes=PLAIN_PEAK), time_limit=5)
    assert not whole.stopped_by_time


def test_progress_and_interrupt(unet):
    seen = []

    def watch(seconds, best, bound, gap):
        seen.append((seconds, best, bound, gap))
        if best is not None:
            raise KeyboardInterrupt

    found = searched(unet, int(PLAIN_PEAK * 0.45), progress=watch)
    assert found.interrupted
    assert found.peak <= found.budget
    assert seen[-1][1] == found.overhead_seconds


def test_greedy_keeps_moderate_budgets(unet):
    for share, most in ((0.9, 13), (0.7, 43), (0.5, 112)):
        outcome = evaluate(unet, greedy(unet, int(PLAIN_PEAK * share)))
        assert outcome.peak <= PLAIN_PEAK * share
        assert outcome.cost <= most


@pytest.mark.parametrize("seed", range(10))
def test_pauses_change_nothing_by_themselves(seed):
    graph, seconds, workspace, able = random_step(seed, (3, 9))
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able)
    paused = with_pauses(problem, [k % 3 for k in range(len(problem.ops))])
    events = greedy(problem, int(evaluate(problem, ()).peak * 0.8))
    real = [k for k, op in enumerate(paused.ops) if op >= 0]
    moved = {(real[t], real[v]) for t, v in events}
    before, after = evaluate(problem, events), evaluate(paused, moved)
    assert (before.cost, before.peak) == (after.cost, after.peak)


def test_the_shortest_path_keeps_its_deadline(monkeypatch):
    """Thirty storages of a size, half of which fit: there are too many ways to choose them."""
    looks = itertools.count()
    monkeypatch.setattr(
        "lowtide.plan.recompute.shortest_path.time", SimpleNamespace(monotonic=lambda: 0.01 * next(looks))
    )
    n = 30
    tensors = (Tensor("x", 1, Role.INPUT), *(Tensor(f"a{k}", 10) for k in range(n)))
    forward = tuple(Op(f"f{k}", "k", inputs=(0,), outputs=(k + 1,)) for k in range(n))
    backward = tuple(Op(f"b{k}", "k", Phase.BACKWARD, inputs=(k + 1,)) for k in range(n))
    problem = build_problem(Graph(tensors, forward + backward), [1.0] * (2 * n))
    order = relax(problem).precedence.before
    assert not exact(problem, 10 * n // 2, order, states=10**9, deadline=0.2).finished
    assert 20 < next(looks) < 30, "it ends a few looks at the clock behind its deadline"
    assert not exact(problem, 10 * n // 2, order, states=1000).finished


def test_a_refusal_has_the_plan_for_the_budget_that_it_names(unet):
    graph = unet.graph
    costs = Costs(tuple(unit_seconds(graph)), (), "unit", forward_only=True)
    with pytest.raises(InfeasibleError) as error:
        plan_for(graph, costs, Budget(bytes=PLAIN_PEAK // 4), time_limit=1)
    plan = error.value.plan
    assert plan.budget_bytes == error.value.smallest_budget >= plan.predicted.peak_bytes
    assert simulate(graph, plan.program).peak_bytes == plan.predicted.peak_bytes


def test_a_step_without_operators_is_refused_in_words():
    graph = Graph((Tensor("x", 16, Role.INPUT),), ())
    with pytest.raises(InfeasibleError, match="no plan fits"):
        plan_for(
            graph, Costs((), (), "unit"), Budget(bytes=1), only=("recompute", "offload"), link=Link(1, 1)
        )


@pytest.mark.parametrize("methods", [("recompute",), ("recompute", "offload")])
def test_a_step_of_views_alone_is_refused_in_words(methods):
    given = Tensor("x", 80, Role.INPUT, device="cpu")
    view = Tensor("v", 80, Role.ACTIVATION, alias=0, device="cpu")
    graph = Graph(
        (given, view), (Op("v", "aten.view", Phase.FORWARD, (0,), (1,), device="cpu"),), returned=(1,)
    )
    request = PlanRequest(Budget(bytes=1), methods)
    with pytest.raises(InfeasibleError, match="inputs of the step alone") as told:
        make_plan(graph, Costs((0.0,), (0,)), request, DeviceRoom(link=Link(1e9, 1e9)))
    assert told.value.smallest_budget == told.value.plan.predicted.peak_bytes


@pytest.mark.parametrize("seed", range(20))
def test_where_recomputation_is_not_asked_for_nothing_runs_twice(seed, monkeypatch):
    """Not in the plan of an error either, where programs turn out to need more than was asked for."""
    graph, seconds, workspace, _ = random_step(seed, (9, 14), charges=False)
    costs, link = Costs(tuple(seconds), tuple(workspace)), Link(8.0, 8.0)
    peak = make_plan(graph, costs, PlanRequest(Budget(bytes=1 << 40))).plain.peak_bytes
    real, more = candidates.played, [0]

    def played(graph, costs, program, link):
        timeline = real(graph, costs, program, link)
        sent = more[0] * any(isinstance(line, Send) for line in program.instructions)
        return msgspec.structs.replace(timeline, live_bytes=tuple(x + sent for x in timeline.live_bytes))

    monkeypatch.setattr(candidates, "played", played)
    for share, more[0] in itertools.product((0.5, 0.7, 0.9), (0, 3)):
        request = PlanRequest(Budget(bytes=int(share * peak)), ("offload",)).within(0.2)
        try:
            plan = make_plan(graph, costs, request, DeviceRoom(link=link))
        except InfeasibleError as error:
            plan = error.plan
            assert plan.budget_bytes == error.smallest_budget
        runs = [line.op for line in plan.program.instructions if isinstance(line, Run)]
        anew = [op for op in runs if all(graph.tensors[t].alias is None for t in graph.ops[op].outputs)]
        assert len(anew) == len(set(anew))
