"""What a schedule promises is what its Program takes, byte for byte."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.check.checker import check
from lowtide.plan.offload.trips import with_trips
from lowtide.plan.problem.lower import lower
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.instructions import Run
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import RANDOM_STATE_BYTES, autograd_bytes, simulate
from tests.plan.graphs import training_steps
from tests.plan.program.test_program import values_of
from tests.plan.random_steps import random_step
from tests.plan.trips import some_trips


def some_events(problem, draw, share=0.2):
    n = len(problem.ops)
    return {(t, v) for t in range(n) for v in range(t) if problem.again[v] and draw.random() < share}


@settings(max_examples=60, deadline=None)
@given(training_steps(), st.randoms(use_true_random=False))
def test_odd_graphs_keep_their_promise(graph, draw):
    views = [graph.tensors[op.outputs[0]].alias is not None for op in graph.ops]
    workspace = [0 if view else draw.randint(0, 20) for view in views]
    problem = build_problem(graph, workspace_bytes=workspace)
    events = some_events(problem, draw)
    program = lower(problem, events)
    assert simulate(graph, program, workspace_bytes=workspace).peak_bytes == evaluate(problem, events).peak
    expected = values_of(graph, store_all(graph))
    assert {t: v for t, v in values_of(graph, program).items() if t in expected} == expected


@pytest.mark.parametrize("seed", range(150))
def test_training_steps_keep_their_promise(seed):
    graph, seconds, workspace, able = random_step(seed, (3, 14))
    draw = random.Random(seed)
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able if seed % 2 else ())
    for share in (0.0, 0.05, 0.3):
        events = some_events(problem, draw, share)
        outcome = evaluate(problem, events)
        program = lower(problem, events)
        timeline = simulate(graph, program, workspace_bytes=workspace, seconds=seconds)
        assert timeline.peak_bytes == outcome.peak
        spent = sum(timeline.seconds) - sum(seconds)
        assert spent == pytest.approx(problem.seconds(outcome.cost))
        assert evaluate(problem, outcome.events) == outcome
        last_forward = max(
            k for k, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and op.kind != "view"
        )
        assert Run(last_forward) in [Run(r.op) for r in program.forward if isinstance(r, Run)]
        assert all(graph.ops[r.op].phase is Phase.FORWARD for r in program.forward if isinstance(r, Run))


@pytest.mark.parametrize("seed", range(60))
def test_steps_with_storages_away_keep_their_promise(seed):
    graph, seconds, workspace, able = random_step(seed, (3, 14))
    draw = random.Random(seed)
    whole = build_problem(graph, seconds, workspace_bytes=workspace, able=able if seed % 2 else ())
    problem = with_trips(whole, some_trips(whole, draw))
    for share in (0.0, 0.1, 0.3):
        outcome = evaluate(problem, some_events(problem, draw, share))
        program = lower(problem, outcome.events)
        timeline = simulate(graph, program, workspace_bytes=workspace, seconds=seconds)
        assert timeline.peak_bytes == outcome.peak
        check(graph, program, budget=outcome.peak, workspace_bytes=workspace)


def test_what_stays_through_a_view_is_not_there_twice_when_its_operator_runs_again():
    sizes = [1, 10, 20, 0, 50, 1, 1]
    roles = [Role.PARAMETER] + [Role.ACTIVATION] * 6
    tensors = [
        Tensor(f"t{k}", b, r, alias=1 if k == 3 else None)
        for k, (b, r) in enumerate(zip(sizes, roles, strict=True))
    ]
    lines = [((0,), (1, 2)), ((1,), (3,)), ((0,), (4,)), ((2,), (5,)), ((1,), (6,))]
    phases = [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 2
    ops = [Op(f"op{k}", "k", p, *line) for k, (p, line) in enumerate(zip(phases, lines, strict=True))]
    graph = Graph(tuple(tensors), tuple(ops), returned=(3,))
    problem = build_problem(graph, [1.0] * 5)
    outcome = evaluate(problem, {(2, 0)})
    live = simulate(graph, lower(problem, outcome.events)).live_bytes
    assert [live[k] for k in (0, 2, 3, 4, 5)] == list(outcome.live) == [31, 61, 41, 32, 12]


def test_an_operator_that_updates_its_input_runs_once():
    tensors = (Tensor("x", 4, Role.INPUT), Tensor("y", 4), Tensor("z", 4), Tensor("u", 4))
    ops = (
        Op("make", "k", inputs=(0,), outputs=(1,)),
        Op("read", "k", inputs=(1,), outputs=(2,)),
        Op("update", "k", inputs=(1,), outputs=(1,)),
        Op("late", "k", inputs=(1,), outputs=(3,)),
        Op("end", "k", Phase.BACKWARD, inputs=(1, 2, 3)),
    )
    problem = build_problem(Graph(tensors, ops))
    # neither the first writer, nor the update, nor who read the value before the update
    assert problem.again == (False, False, False, True, False)


def test_free_backward_is_not_run_again():
    graph, _, _, _ = random_step(1)
    seconds = [float(op.phase is Phase.FORWARD) for op in graph.ops]
    problem = build_problem(graph, seconds)
    assert any(problem.again[: problem.split])
    assert not any(problem.again[problem.split :])


def test_a_random_operator_that_runs_again_keeps_its_state():
    tensors = tuple(
        Tensor(str(k), 8, Role.INPUT if k == 0 else Role.ACTIVATION, device="cpu") for k in range(4)
    )
    ops = (
        Op("noise", "k", inputs=(0,), outputs=(1,), device="cpu", random=True),
        Op("next", "k", inputs=(1,), outputs=(2,), device="cpu"),
        Op("back", "k", Phase.BACKWARD, inputs=(1, 2), outputs=(3,), device="cpu"),
    )
    problem = build_problem(Graph(tensors, ops))
    plain = evaluate(problem, ()).live[0]
    assert plain == 16 + autograd_bytes(problem.graph)
    assert evaluate(problem, {(2, 0)}).live[0] == plain + RANDOM_STATE_BYTES


@pytest.mark.parametrize("alias", [None, 4], ids=["read as it is", "read through a view"])
def test_a_gradient_that_is_given_and_returned_stays(alias):
    """Of ``a + b.exp()``, say: the gradient of ``a`` is the one that comes in."""
    tensors = (
        Tensor("a", 8, Role.INPUT),
        Tensor("b", 8, Role.INPUT),
        Tensor("e", 8),
        Tensor("result", 8),
        Tensor("given", 8, Role.GRADIENT, gradient_of=0),
        Tensor("scaled", 8, alias=alias),
        Tensor("of b", 8, Role.GRADIENT, gradient_of=1),
    )
    ops = (
        Op("exp", "aten.exp", inputs=(1,), outputs=(2,)),
        Op("add", "aten.add", inputs=(0, 2), outputs=(3,)),
        Op("scale", "aten.expand" if alias else "aten.mul", Phase.BACKWARD, (4,), (5,)),
        Op("mul", "aten.mul", Phase.BACKWARD, (5, 2), (6,)),
    )
    problem = build_problem(Graph(tensors, ops, returned=(3,)))
    assert evaluate(problem, ()).peak == simulate(problem.graph, lower(problem, ())).peak_bytes
