"""The planners of others: every Program is valid and inside its budget, and costs what can be counted by hand."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.errors import PlanError
from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate
from lowtide.plan.baselines import BASELINES, best, run_seconds
from lowtide.plan.baselines.checkmate import MOST_OPERATORS, checkmate
from lowtide.plan.baselines.chen import chen
from lowtide.plan.baselines.common import keeping, segmented, unrepeatable
from lowtide.plan.baselines.dtr import dtr
from lowtide.plan.baselines.keep_all import keep_all
from lowtide.plan.baselines.lower_sets import MOST_SETS, lower_sets_approximate, lower_sets_exact
from lowtide.plan.check.checker import check
from lowtide.plan.program.instructions import Run
from lowtide.plan.program.simple import kept_throughout, recompute_all, store_all
from lowtide.plan.program.simulate import simulate
from tests.plan.baselines.graphs import chain, unit_seconds
from tests.plan.graphs import training_steps


def peak(graph, program, workspace=()):
    return simulate(graph, program, workspace_bytes=workspace).peak_bytes


def again(program, seconds):
    """What is computed more than once."""
    return run_seconds(program, seconds) - sum(seconds)


def planned(planner, graph, seconds, budget, workspace=()):
    """The Program, held to its promise, or None."""
    try:
        program = planner(graph, seconds, budget, workspace_bytes=workspace)
    except PlanError:
        return None
    check(graph, program, budget=budget, workspace_bytes=workspace)
    assert peak(graph, program, workspace) <= budget
    return program


def in_stages(graph, program):
    """Whether between two first runs operators run again once at most, in program order."""
    first, last = set(), -1
    for line in program.instructions:
        if isinstance(line, Run):
            if line.op <= last:
                return False
            last = line.op
            if line.op not in first and line.op == len(first):
                first.add(line.op)
                last = -1
    return True


def stays_through_a_view(graph):
    """Whether one of several results of an operator stays through a view: the integer program counts it again
    where the operator runs again for another result."""
    kept, owner = set(kept_throughout(graph)), graph.storages()
    stays = {owner[t] for t in kept} - kept
    return any(len(op.outputs) > 1 and stays.intersection(op.outputs) for op in graph.ops)


def test_the_names_and_their_order_are_pinned():
    assert list(BASELINES) == ["keep-all", "chen", "lower-sets-exact", "lower-sets", "dtr", "checkmate"]


@pytest.mark.parametrize("name", BASELINES)
def test_with_the_memory_of_the_plain_program_nothing_need_run_again(name):
    graph = chain(6)
    seconds = unit_seconds(graph)
    program = planned(BASELINES[name], graph, seconds, peak(graph, store_all(graph)))
    assert again(program, seconds) <= (3 if name == "chen" else 0)


def test_keeping_all_fails_a_byte_below_the_plain_peak():
    graph = chain(5)
    plain = peak(graph, store_all(graph))
    assert keep_all(graph, unit_seconds(graph), plain) == store_all(graph)
    with pytest.raises(PlanError, match="smallest found takes 9 B"):
        keep_all(graph, unit_seconds(graph), plain - 1)


@pytest.mark.parametrize("name", BASELINES)
def test_where_nothing_fits_it_is_said(name):
    graph = chain(5)
    with pytest.raises(PlanError):
        BASELINES[name](graph, unit_seconds(graph), 4)


def test_square_root_segments_of_a_chain():
    # 16 operators in 4 segments: 3 of them make the 3 inside again; the last one is still there.
    graph = chain(16)
    program = segmented(graph, [k // 4 for k in range(16)])
    check(graph, program)
    assert again(program, unit_seconds(graph)) == 9
    # input, parameter, loss; 3 cuts and the 3 others of the last segment; incoming and outgoing gradient
    assert peak(graph, program) == 3 + 3 + 3 + 2
    budget = peak(graph, program)
    assert again(chen(graph, unit_seconds(graph), budget), unit_seconds(graph)) == 9


@pytest.mark.parametrize("less", range(1, 9))
def test_lower_sets_of_a_chain_make_one_more_again_for_each_byte(less):
    graph = chain(16)
    budget = peak(graph, store_all(graph)) - less
    for planner in (lower_sets_exact, lower_sets_approximate):
        assert again(planned(planner, graph, unit_seconds(graph), budget), unit_seconds(graph)) == less


def test_eviction_goes_on_where_segments_have_ended():
    graph = chain(8)
    seconds = unit_seconds(graph)
    assert planned(chen, graph, seconds, 6) is None
    assert again(planned(dtr, graph, seconds, 6), seconds) == 21  # 1 + 2 + ... + 6: nothing is kept


def test_eviction_prefers_what_is_cheap_large_and_stale():
    tensors = [Tensor("x", 1, Role.INPUT), Tensor("cheap", 8), Tensor("dear", 8), Tensor("end", 8)]
    tensors += [Tensor("loss", 1), Tensor("dx", 1, Role.GRADIENT, gradient_of=0)]
    ops = [Op(f"f{k}", "f", inputs=(0,), outputs=(k,)) for k in (1, 2, 3)]
    ops.append(Op("loss", "f", inputs=(3,), outputs=(4,)))
    ops.append(Op("back", "b", Phase.BACKWARD, inputs=(1, 2), outputs=(5,)))
    graph = validate(Graph(tuple(tensors), tuple(ops), returned=(4,)))
    program = planned(dtr, graph, [1.0, 50.0, 1.0, 1.0, 0.0], 20)
    assert [line.op for line in program.instructions if isinstance(line, Run)] == [0, 1, 2, 3, 0, 4]


def test_checkmate_on_a_chain_by_hand():
    graph = chain(4)
    seconds = unit_seconds(graph)
    costs = [planned(checkmate, graph, seconds, budget) for budget in (8, 7, 6, 5)]
    assert [None if one is None else again(one, seconds) for one in costs] == [0, 1, 3, None]


def test_checkmate_refuses_large_steps_and_little_time():
    large = chain(MOST_OPERATORS)
    with pytest.raises(PlanError, match="up to 40"):
        checkmate(large, unit_seconds(large), 1000)
    graph = chain(18)
    with pytest.raises(PlanError, match="was not solved in 0.001 s"):
        checkmate(graph, unit_seconds(graph), 8, time_limit=0.001)


def test_too_many_lower_sets_are_refused():
    tensors = [Tensor("x", 1, Role.INPUT), *(Tensor(f"t{k}", 1) for k in range(12))]
    ops = tuple(Op(f"f{k}", "f", inputs=(0,), outputs=(k + 1,)) for k in range(12))
    graph = Graph(tuple(tensors), ops)
    assert MOST_SETS < 2**12
    with pytest.raises(PlanError, match="more than 1000 lower sets"):
        lower_sets_exact(graph, [1.0] * 12, 100)
    assert planned(lower_sets_approximate, graph, [1.0] * 12, 100)


def test_a_workspace_counts():
    graph = chain(6)
    seconds, workspace = unit_seconds(graph), [3] * len(graph.ops)
    plain = peak(graph, store_all(graph), workspace)
    for planner in BASELINES.values():
        assert planned(planner, graph, seconds, plain - 1, workspace) != store_all(graph)


def test_what_is_written_over_runs_once():
    tensors = (
        Tensor("x", 4, Role.INPUT),
        Tensor("a", 4),
        Tensor("b", 4),
        Tensor("c", 4),
        Tensor("dx", 4, Role.GRADIENT, gradient_of=0),
    )
    ops = (
        Op("a", "f", inputs=(0,), outputs=(1,)),
        Op("early", "f", inputs=(1,), outputs=(2,)),
        Op("over", "f", inputs=(1,), outputs=(1,)),
        Op("late", "f", inputs=(1,), outputs=(3,)),
        Op("back", "b", Phase.BACKWARD, inputs=(2, 3), outputs=(4,)),
    )
    graph = validate(Graph(tensors, ops))
    assert unrepeatable(graph) == {0, 1, 2}
    program = keeping(graph, ())
    check(graph, program)
    assert [line.op for line in program.backward if isinstance(line, Run)] == [3, 4]
    for budget in range(12, 25):
        for planner in BASELINES.values():
            planned(planner, graph, [1.0] * 5, budget)


def test_the_best_is_the_cheapest_and_the_first_of_equals():
    graph = chain(8)
    seconds = unit_seconds(graph)
    assert best(graph, seconds, 12) == ("keep-all", store_all(graph))
    name, program = best(graph, seconds, 7)
    assert (name, again(program, seconds)) == ("dtr", 7)
    with pytest.raises(PlanError, match="no baseline .*keep-all: .*chen: .*checkmate: "):
        best(graph, seconds, 4)


@given(training_steps(), st.data())
@settings(max_examples=25, deadline=None)
def test_checkmate_is_never_above_the_others(graph, data):
    assume(not stays_through_a_view(graph))
    seconds = [float(data.draw(st.integers(0, 9))) for _ in graph.ops]
    workspace = data.draw(st.sampled_from([(), [data.draw(st.integers(0, 20)) for _ in graph.ops]]))
    plain = peak(graph, store_all(graph), workspace)
    least = min(plain, peak(graph, recompute_all(graph, each_use=True), workspace))
    budget = data.draw(st.integers(max(1, 2 * least - plain), plain))
    optimum = planned(checkmate, graph, seconds, budget, workspace)
    for name, planner in BASELINES.items():
        program = planned(planner, graph, seconds, budget, workspace)
        if program is not None and in_stages(graph, program):
            assert optimum is not None, name
            assert run_seconds(optimum, seconds) <= run_seconds(program, seconds) + 1e-6, name
