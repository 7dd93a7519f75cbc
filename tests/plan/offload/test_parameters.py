"""Parameters and optimiser state on the host: when they leave, and when they are back."""

import pytest

from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.budget import parse_budget
from lowtide.plan.check.checker import check
from lowtide.plan.offload.parameters import movable, streamed, with_absences
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import parse_offload
from tests.plan.random_steps import random_step
from tests.planning import plan_for

BOTH = ("parameters", "optimizer")
FAST = Link(1e9, 1e9)

# x ─ f(w) ─ y ─ g ─ z ─ │ ─ dg ─ dz ─ df(w) ─ dw, with 100 bytes of optimiser state beside
STEP = Graph(
    (
        Tensor("x", 4, Role.INPUT),
        Tensor("w", 50, Role.PARAMETER),
        Tensor("y", 10),
        Tensor("z", 60),
        Tensor("dz", 60, Role.GRADIENT),
        Tensor("dw", 50, Role.GRADIENT, gradient_of=1),
        Tensor("state", 100, Role.OPTIMIZER),
        Tensor("wt", 50, alias=1),
    ),
    (
        Op("t", "view", inputs=(1,), outputs=(7,)),
        Op("f", "f", inputs=(0, 7), outputs=(2,)),
        Op("g", "g", inputs=(2,), outputs=(3,)),
        Op("dg", "dg", Phase.BACKWARD, inputs=(3,), outputs=(4,)),
        Op("df", "df", Phase.BACKWARD, inputs=(4, 0, 7), outputs=(5,)),
    ),
)
SECONDS = (0.0, 1.0, 1.0, 1.0, 1.0)
PLAIN = store_all(STEP)


def absent(budget, **options):
    return with_absences(
        STEP, PLAIN, movable(STEP, BOTH), budget, Costs(SECONDS), link=options.pop("link", FAST), **options
    )


def test_words_that_users_write():
    assert parse_offload("optimizer,parameters") == BOTH
    assert parse_offload(["parameters"]) == ("parameters",)
    assert parse_offload(None) == parse_offload("") == ()
    with pytest.raises(PlanError, match="Did you mean 'parameters'"):
        parse_offload("parameter")


def test_what_may_leave():
    assert movable(STEP, BOTH) == (1, 6)
    assert movable(STEP, ("optimizer",)) == (6,)
    assert movable(STEP, BOTH, pinned=(1,)) == (6,)
    assert movable(STEP, ()) == ()
    changed = Graph(STEP.tensors, STEP.ops, updated=(1,))
    assert movable(changed, BOTH) == (6,)


def test_nothing_leaves_where_there_is_room():
    peak = simulate(STEP, PLAIN).peak_bytes
    assert absent(peak) == PLAIN


def test_leaves_are_gone_where_the_budget_asks_for_it_and_back_in_the_end():
    plain = simulate(STEP, PLAIN).peak_bytes
    program = absent(plain - 20)
    assert any(isinstance(line, Send) for line in program.forward)
    assert sum(isinstance(line, Fetch) for line in program.instructions) == sum(
        isinstance(line, Drop) and set(line.tensors) <= {1, 6} for line in program.instructions
    )
    peak = simulate(STEP, program).peak_bytes
    assert peak <= plain - 20
    assert check(STEP, program, offload=BOTH).peak_bytes == peak


def test_without_times_a_copy_starts_before_its_drop():
    program = with_absences(STEP, PLAIN, movable(STEP, BOTH), 0, Costs(()))
    assert check(STEP, program, offload=BOTH).peak_bytes == simulate(STEP, program).peak_bytes


def test_without_crossing_all_are_there_between_the_parts():
    plain = simulate(STEP, PLAIN).peak_bytes
    program = absent(plain - 20, crossing=False)
    away = set()
    for line in program.forward:
        if isinstance(line, Drop):
            away |= set(line.tensors) & {1, 6}
        elif isinstance(line, Fetch):
            away.discard(line.tensor)
    assert not away


def test_a_slow_link_is_waited_for():
    plain = simulate(STEP, PLAIN).peak_bytes
    program = absent(plain - 20, link=Link(10.0, 10.0))
    took = sum(simulate(STEP, program, seconds=SECONDS, link=Link(10.0, 10.0)).seconds)
    assert took > 10
    assert sum(simulate(STEP, program, seconds=SECONDS, link=FAST).seconds) < 4.001


def test_the_search_sees_leaves_only_where_they_are_read():
    problem = build_problem(STEP, SECONDS)
    other = streamed(problem, (1, 6))
    assert [a - b for a, b in zip(problem.fixed, other.fixed, strict=True)] == [150] * 4
    assert [b - a for a, b in zip(problem.workspace, other.workspace, strict=True)] == [50, 0, 0, 50]
    other = streamed(problem, (1, 6), crossing=False)
    assert [a - b for a, b in zip(problem.fixed, other.fixed, strict=True)] == [150, 0, 150, 150]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (Program((Drop((1,)), *PLAIN.forward), PLAIN.backward), "'w', which was not sent"),
        (Program((Send(1), Drop((1,)), *PLAIN.forward), PLAIN.backward), "'w', which is on the host"),
        (Program((Send(6), Drop((6,)), *PLAIN.forward), PLAIN.backward), "ends with 'state' on the host"),
        (Program((Send(6), Drop((6,)), Drop((6,)), *PLAIN.forward), PLAIN.backward), "which is on the host"),
        (Program((Send(6), Drop((6,)), Send(6), *PLAIN.forward), PLAIN.backward), "is not there"),
        (Program((Send(0), *PLAIN.forward), PLAIN.backward), "'x' to the host, which must stay"),
        (Program((Send(6), Fetch(6), *PLAIN.forward), PLAIN.backward), "fetches 'state', which is there"),
        (
            Program((*PLAIN.forward, Send(1), Drop((1,))), PLAIN.backward),
            "'df' reads 'wt', which is on the host",
        ),
    ],
)
def test_what_leaves_wrongly_is_named(program, said):
    with pytest.raises(PlanError, match=said):
        check(STEP, program, offload=BOTH)


def test_nothing_leaves_that_is_not_allowed():
    program = Program((Send(6), Drop((6,)), *PLAIN.forward), (*PLAIN.backward, Fetch(6)))
    assert check(STEP, program, offload=("optimizer",))
    with pytest.raises(PlanError, match="'state' to the host, which must stay"):
        check(STEP, program, offload=("parameters",))


def with_state(seed):
    graph, seconds, workspace, able = random_step(seed)
    state = Tensor("state", 60, Role.OPTIMIZER, device="cpu")
    return (
        Graph((*graph.tensors, state), graph.ops, returned=graph.returned, updated=graph.updated),
        seconds,
        workspace,
        able,
    )


@pytest.mark.parametrize("crossing", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_simulation_and_checker_agree_on_random_steps(seed, crossing):
    graph, seconds, workspace, _ = with_state(seed)
    plain = store_all(graph)
    peak = simulate(graph, plain, workspace_bytes=workspace).peak_bytes
    for share in (0.95, 0.8, 0.6):
        budget = int(peak * share)
        program = with_absences(
            graph, plain, movable(graph, BOTH), budget, Costs(tuple(seconds), tuple(workspace)),
            link=Link(30.0, 20.0), crossing=crossing,
        )  # fmt: skip
        runs = [line for line in program.instructions if isinstance(line, Run)]
        assert runs == [line for line in plain.instructions if isinstance(line, Run)]
        found = simulate(graph, program, workspace_bytes=workspace).peak_bytes
        assert check(graph, program, workspace_bytes=workspace, offload=BOTH).peak_bytes == found
        assert found <= peak


@pytest.mark.parametrize("seed", range(6))
def test_what_state_takes_is_room_for_the_step(seed):
    graph, seconds, workspace, able = with_state(seed)
    costs = Costs(tuple(seconds), tuple(workspace))
    options = {"able": able, "only": ("recompute", "offload"), "link": Link(1e6, 1e6), "time_limit": 1.0}
    whole = plan_for(graph, costs, parse_budget("100%"), **options)
    end = sum(t.bytes for t in graph.tensors if t.role is not Role.ACTIVATION and t.alias is None)
    budget = max(whole.predicted.peak_bytes - 60, end)
    plan = plan_for(graph, costs, parse_budget(budget), offload=BOTH, **options)
    assert plan.predicted.peak_bytes <= budget
    assert plan.overhead < 1e-3
    assert plan.offload == BOTH
    assert plan.bound.overhead <= plan.overhead


def test_a_budget_below_what_the_step_ends_with_is_refused():
    options = {"only": ("offload",), "link": FAST, "offload": BOTH, "time_limit": 0.5}
    with pytest.raises(InfeasibleError, match="when the step ends") as caught:
        plan_for(STEP, Costs(SECONDS, ()), parse_budget("180B"), **options)
    assert caught.value.smallest_budget == 204
    plan = plan_for(STEP, Costs(SECONDS, ()), parse_budget(204), **options)
    assert plan.predicted.peak_bytes == 204


def test_a_plan_says_what_left_and_what_is_resident():
    plain = simulate(STEP, PLAIN).peak_bytes
    costs = Costs(SECONDS, ())
    budget = parse_budget(plain - 20)
    plan = plan_for(STEP, costs, budget, only=("offload",), link=FAST, offload=BOTH, outside_bytes=7)
    assert plan.resident_bytes == 154 + 7
    assert plan.decisions.offloaded >= 1
    assert "state" in plan.explain()
    assert "resident" in plan.explain()
    view = plan.as_json()
    assert view["offload"] == BOTH
    assert view["resident_bytes"] == 161
    with pytest.raises(InfeasibleError):
        plan_for(STEP, costs, budget, only=("recompute",), link=FAST, outside_bytes=7)
