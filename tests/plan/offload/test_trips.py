"""Copies to the host and back: clocks by hand, and plans that keep their budget and their values."""

from dataclasses import replace

import msgspec
import pytest

from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.budget import parse_budget
from lowtide.plan.check.checker import check
from lowtide.plan.check.time import seconds_of
from lowtide.plan.offload.trips import Trip, hurried, trips, with_trips
from lowtide.plan.problem.lower import lower
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simple import kept_throughout, store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import DeviceRoom
from tests.plan import written
from tests.plan.random_steps import random_step
from tests.planning import plan_for, searched


def values_after(graph, program):
    """Run a program on symbols, host included; nobody reads what is neither made nor fetched."""
    table = {k: t.id for k, t in enumerate(graph.tensors) if not any(k in op.outputs for op in graph.ops)}
    host = {}
    for line in program.instructions:
        if isinstance(line, Drop):
            for tensor in line.tensors:
                del table[tensor]
        elif isinstance(line, Send):
            host[line.tensor] = table[line.tensor]
        elif isinstance(line, Fetch):
            assert line.tensor not in table
            table[line.tensor] = host[line.tensor]
        else:
            op = graph.ops[line.op]
            made = tuple(table[t] for t in op.reads)
            for position, tensor in enumerate(op.outputs):
                table[tensor] = (op.id, position, made)
    return {t: v for t, v in table.items() if t in set(kept_throughout(graph))}


CHAIN = Graph(
    (Tensor("x", 1, Role.INPUT), Tensor("a", 10), Tensor("b", 10), Tensor("c", 10)),
    (
        Op("first", "k", inputs=(0,), outputs=(1,)),
        Op("second", "k", inputs=(1,), outputs=(2,)),
        Op("third", "k", inputs=(2,), outputs=(3,)),
        Op("last", "k", Phase.BACKWARD, inputs=(1, 3)),
    ),
)
TRIP = Program(
    (Run(0), Send(1), Run(1), Drop((1,)), Run(2), Drop((2,))),
    (Fetch(1), Run(3), Drop((1, 3))),
)


@pytest.mark.parametrize(
    ("link", "took"),
    [
        # out from 1 s on for 2 s: the drop at 2 s waits 1 s; back from 4 s on for 5 s
        (Link(5.0, 2.0), (1.0, 1.0, 2.0, 6.0)),
        (Link(10.0, 1e9), (1.0, 1.0, 1.0, 1.0)),
        (Link(1e9, 1e9, 0.25), (1.0, 1.25, 1.0, 1.25)),
        (Link(1e9, 1e9, 0.25, 0.05), (1.0, 1.75, 1.0, 1.75)),
        (None, (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_clocks(link, took):
    timeline = simulate(CHAIN, TRIP, seconds=[1.0] * 4, link=link)
    assert timeline.seconds == pytest.approx(took)
    assert timeline.live_bytes == (11, 21, 21, 21)


LATE = Program((Run(0), Send(1), Run(1), Run(2), Drop((2,))), (Run(3), Drop((1, 3))))


@pytest.mark.parametrize(
    ("link", "took"),
    [
        # out from 1 s on for 4 s: forward, which would end at 3 s, waits 2 s; nobody else does
        (Link(2.5, 1e9, settles=True), (1.0, 1.0, 1.0, 3.0)),
        (Link(2.5, 1e9), (1.0, 1.0, 1.0, 1.0)),
        (Link(5.0, 1e9, settles=True), (1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_a_forward_that_ends_with_its_copies_waits_for_them(link, took):
    assert simulate(CHAIN, LATE, seconds=[1.0] * 4, link=link).seconds == pytest.approx(took)
    assert seconds_of(CHAIN, LATE, [1.0] * 4, {}, link) == pytest.approx(sum(took))


def test_what_comes_back_and_is_let_go_of_unread_is_waited_for_where_forward_ends():
    lines = (Run(0), Send(1), Run(1), Drop((1,)), Fetch(1), Drop((1,)), Run(2), Drop((2,)))
    program, link = Program(lines, (Run(3), Drop((3,)))), Link(1e9, 2.5, settles=True)
    last = msgspec.structs.replace(CHAIN.ops[3], inputs=(3,))
    graph = msgspec.structs.replace(CHAIN, ops=(*CHAIN.ops[:3], last))
    took = simulate(graph, program, seconds=[1.0] * 4, link=link).seconds  # back from 2 s on for 4 s
    assert took == pytest.approx((1.0, 1.0, 1.0, 4.0))
    assert seconds_of(graph, program, [1.0] * 4, {}, link) == pytest.approx(7.0)


@pytest.mark.parametrize("seed", range(16))
def test_planner_and_checker_tell_the_same_time_where_forward_ends_with_its_copies(seed):
    graph, seconds, workspace, able = random_step(seed, (4, 14))
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able)
    cut = evaluate(problem, ()).peak_at
    away = {s: cut for s, p in enumerate(problem.producer) if 0 <= p < cut}
    for rate in (3.0, 10.0, 40.0):
        link = Link(rate, 20.0, settles=True)
        program = lower(with_trips(problem, trips(problem, away, replace(link, settles=False))), ())
        took = sum(simulate(graph, program, seconds=seconds, link=link).seconds)
        assert took == pytest.approx(seconds_of(graph, program, seconds, {}, link))
        without = seconds_of(graph, program, seconds, {}, replace(link, settles=False))
        assert took >= without - 1e-9


def test_tiles_do_not_end_with_their_copies():
    room = DeviceRoom(7, 9, Link(1.0, 2.0, settles=True), (3,))
    assert room.of_tiles() == DeviceRoom(7, 9, Link(1.0, 2.0), (3,))
    assert DeviceRoom(7).of_tiles() == DeviceRoom(7)


def test_what_was_never_sent_is_not_fetched():
    with pytest.raises(PlanError, match="never sent"):
        simulate(CHAIN, Program((Run(0), Fetch(2))))
    with pytest.raises(PlanError, match="does not hold"):
        simulate(CHAIN, Program((Send(1),)))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("hurry", [False, True])
def test_trips_keep_their_promise(seed, hurry):
    graph, seconds, workspace, able = random_step(seed, (4, 14))
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able if seed % 2 else ())
    plain = evaluate(problem, ())
    cut = plain.peak_at
    away = {s: cut for s, p in enumerate(problem.producer) if 0 <= p < cut}
    taken = trips(problem, away, Link(20.0, 20.0))
    if hurry:
        taken = hurried(problem, taken, away, plain.live, int(plain.peak * 0.7))
    moved = with_trips(problem, taken)
    outcome = evaluate(moved, ())
    program = lower(moved, ())
    assert simulate(graph, program, workspace_bytes=workspace).peak_bytes == outcome.peak <= plain.peak
    assert values_after(graph, program) == values_after(graph, store_all(graph))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("only", [{"offload"}, {"recompute", "offload"}])
def test_plans_with_offload(seed, only, settles):
    graph, seconds, workspace, able = random_step(seed, (6, 12))
    problem = build_problem(graph, seconds, workspace_bytes=workspace, able=able)
    link = Link(15.0, 15.0, *((0.01, 0.002) if seed % 2 else (0.0, 0.0)), settles=settles)
    budget = int(evaluate(problem, ()).peak * 0.8)
    try:
        found = searched(problem, budget, only=only, link=link, time_limit=2)
    except InfeasibleError:
        return
    timeline = simulate(graph, found.program, workspace_bytes=workspace, seconds=seconds, link=link)
    assert timeline.peak_bytes <= found.peak <= budget
    assert found.bound <= found.cost
    assert problem.seconds(found.cost) == pytest.approx(
        sum(timeline.seconds) - sum(seconds), abs=1e-6 + 1 / problem.scale
    )
    assert values_after(graph, found.program) == values_after(graph, store_all(graph))
    if "recompute" not in only:
        runs = [
            line.op
            for line in found.program.instructions
            if isinstance(line, Run) and graph.ops[line.op].kind != "view"
        ]
        assert len(runs) == len(set(runs))


def test_offload_needs_a_link_and_means_need_names():
    problem = build_problem(CHAIN)
    with pytest.raises(PlanError, match="link"):
        searched(problem, 25, only={"offload"})
    with pytest.raises(PlanError, match="tiles"):
        searched(problem, 25, only={"tiles"})


def test_waiting_is_no_whole_number_of_units():
    """All operators take a second; copies of a few bytes take less, and no bound may say otherwise."""
    link = Link(1000.0, 1000.0)
    seconds = (1.0,) * len(CHAIN.ops)
    for share in ("60%", "75%", "90%"):
        try:
            plan = plan_for(CHAIN, Costs(seconds), parse_budget(share), only=["offload"], link=link)
        except InfeasibleError:
            continue
        assert plan.bound.seconds <= plan.predicted.seconds * (1 + 1e-6)
        if plan.decisions.offloaded:
            break
    else:
        pytest.fail("nothing was offloaded")
    assert 0 < plan.predicted.seconds - sum(seconds) < 1


def test_a_storage_leaves_once_its_last_update_is_done():
    graph = written.step(
        "x:input", "f: x -> a", "g: a -> b", "up: a b -> a", "h: b -> c", "k: a c -> y", returned="y"
    )
    problem = build_problem(graph, [1.0] * 5)
    (storage,) = (s for s, t in enumerate(problem.owner) if graph.tensors[t].id == "a")
    program = lower(with_trips(problem, [Trip(storage, gone=3, back=4, late=4)]), ())
    check(graph, program)
    names = [
        graph.ops[line.op].id if isinstance(line, Run) else type(line).__name__ for line in program.forward
    ]
    assert (
        names.index("up") < names.index("Send") < names.index("h") < names.index("Fetch") < names.index("k")
    )
