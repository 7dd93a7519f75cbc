"""Repeated blocks are found where they are, and choosing once for their copies gives plans that are good."""

from itertools import product

import numpy as np
import pytest
import torch

from lowtide import zoo
from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate
from lowtide.plan.bounds.model import Rows
from lowtide.plan.bounds.repeated_blocks import Blocks, repeated, shared
from lowtide.plan.check.checker import check
from lowtide.plan.make.search import Link
from lowtide.plan.offload import search as away
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.recompute import portfolio
from lowtide.plan.recompute.annealing import rounds as annealing
from lowtide.trace.step.capture import capture
from tests.plan.random_steps import random_step
from tests.planning import searched, solved

LENGTH = 6


def residual(copies, grow=0):
    """A step of residual blocks, each larger than the one before by ``grow`` bytes, all reading one mask."""
    tensors = [Tensor("x", 64, Role.INPUT)]
    ops, seconds = [], []

    def add(kind, phase, inputs, size, time, of=None):
        role = Role.ACTIVATION if phase is Phase.FORWARD else Role.GRADIENT
        tensors.append(Tensor(f"t{len(tensors)}", size, role, gradient_of=of))
        ops.append(Op(f"op{len(ops)}", kind, phase, tuple(inputs), (len(tensors) - 1,)))
        seconds.append(time)
        return len(tensors) - 1

    mask = add("mask", Phase.FORWARD, [0], 16, 1.0)
    x = add("stem", Phase.FORWARD, [0], 64, 9.0)
    blocks = []
    for k in range(copies):
        size = 64 + k * grow
        weight = len(tensors)
        tensors.append(Tensor(f"w{k}", 8, Role.PARAMETER))
        a = add("norm", Phase.FORWARD, [x], size, 3.0)
        b = add("conv", Phase.FORWARD, [a, weight], 2 * size, 20.0)
        c = add("gelu", Phase.FORWARD, [b, mask], 2 * size, 4.0)
        d = add("conv", Phase.FORWARD, [c, weight], size, 17.0)
        e = add("scale", Phase.FORWARD, [d], size, 2.0)
        y = add("add", Phase.FORWARD, [x, e], size, 3.0)
        blocks.append((x, a, b, c, d, weight))
        x = y
    loss = add("loss", Phase.FORWARD, [x], 1, 1.0)
    g = add("d_loss", Phase.BACKWARD, [loss, x], 64, 1.0)
    for x, a, b, c, d, weight in reversed(blocks):
        gd = add("d_scale", Phase.BACKWARD, [g, d], 64, 3.0)
        gc = add("d_conv", Phase.BACKWARD, [gd, c], 128, 30.0)
        gb = add("d_gelu", Phase.BACKWARD, [gc, b, mask], 128, 5.0)
        add("d_weight", Phase.BACKWARD, [gb, a], 8, 20.0, of=weight)
        ga = add("d_norm", Phase.BACKWARD, [gb, x], 64, 4.0)
        g = add("add", Phase.BACKWARD, [g, ga], 64, 3.0)
    return validate(Graph(tuple(tensors), tuple(ops), returned=(loss,))), seconds


def problem_of(copies, grow=0):
    graph, seconds = residual(copies, grow)
    return build_problem(graph, seconds)


@pytest.mark.parametrize("copies", [2, 3, 8])
def test_residual_blocks_are_found_each_as_short_as_it_can_be(copies):
    found = repeated(problem_of(copies))
    assert found == ((Blocks(2, LENGTH, copies),) if copies > 2 else ())


def test_blocks_that_grow_do_not_repeat():
    assert repeated(problem_of(8, grow=8)) == ()


def test_an_operator_that_takes_longer_or_reads_something_else_parts_the_copies():
    graph, seconds = residual(8)
    slower = [s + (k == 2 + 4 * LENGTH) for k, s in enumerate(seconds)]
    assert repeated(build_problem(graph, slower)) == (
        Blocks(2, LENGTH, 4),
        Blocks(3 + 4 * LENGTH, LENGTH, 3),
    )
    assert repeated(build_problem(graph, seconds, short={2 + 4 * LENGTH: 1.0})) == (
        Blocks(2, LENGTH, 4),
        Blocks(3 + 4 * LENGTH, LENGTH, 3),
    )
    adds = 2 + 4 * LENGTH + LENGTH - 1
    other = graph.ops[adds - LENGTH].outputs[0], graph.ops[adds - 1].outputs[0]
    assert set(other) == set(graph.ops[adds].inputs)
    skipped = (graph.ops[adds - 2 * LENGTH].outputs[0], other[1])  # one block further back: the same bytes
    ops = [
        op if k != adds else Op(op.id, op.kind, op.phase, skipped, op.outputs)
        for k, op in enumerate(graph.ops)
    ]
    found = repeated(build_problem(Graph(graph.tensors, tuple(ops), returned=graph.returned), seconds))
    assert found == (Blocks(2, LENGTH, 4), Blocks(adds + 1, LENGTH, 3))


def copies_by_hand(problem, start, length):
    """How often the operators from ``start`` come again, each read the same for all, or as far away for all."""
    maker = {s: (v, k) for v in range(problem.split) for k, s in enumerate(problem.writes[v])}

    def fits(count):
        for offset in range(length):
            ops = [start + copy * length + offset for copy in range(count)]
            own = {
                (problem.graph.ops[problem.ops[v]].kind, problem.time[v], problem.again[v], len(problem.reads[v]),
                 *(problem.bytes[s] for s in problem.writes[v]))
                for v in ops
            }  # fmt: skip
            if len(own) > 1:
                return False
            for read in range(len(problem.reads[ops[0]])):
                storages = [problem.reads[v][read] for v in ops]
                away = {
                    (v - maker[s][0], maker[s][1]) if s in maker else s
                    for v, s in zip(ops, storages, strict=True)
                }
                if len(set(storages)) > 1 and len(away) > 1:
                    return False
        return True

    count = 1
    while start + (count + 1) * length <= problem.split and fits(count + 1):
        count += 1
    return count


def test_random_steps_have_the_blocks_that_a_slow_search_finds():
    seen = 0
    for seed in range(60):
        graph, _, _, _ = random_step(seed, (6, 14), charges=False)
        tensors = tuple(
            Tensor(t.id, 4, t.role, alias=t.alias, gradient_of=t.gradient_of, device=t.device)
            for t in graph.tensors
        )
        problem = build_problem(Graph(tensors, graph.ops, returned=graph.returned))  # all alike but reads
        found = repeated(problem)
        lengths = range(1, problem.split // 3 + 1)
        some = any(copies_by_hand(problem, v, n) >= 3 for n in lengths for v in range(problem.split - n))
        assert bool(found) == some
        for one in found:
            assert copies_by_hand(problem, one.start, one.length) >= one.copies
        seen += bool(found)
    assert 10 < seen < 60


def test_layers_of_a_captured_step_are_found():
    torch._dynamo.reset()
    built = zoo.build("gpt2:batch=1,layers=3,width=16,heads=2,length=8,vocab=32")
    problem = build_problem(capture(built.loss, built.model, *built.batch).step.graph)
    (found,) = repeated(problem)
    kinds = [problem.graph.ops[k].kind for k in problem.ops[found.start : found.start + found.length]]
    assert (found.length, found.copies, kinds.count("aten.addmm")) == (10, 3, 4)


def test_tied_variables_have_one_value_and_the_best_one():
    rows = Rows()
    sizes, costs, same = [5, 3, 5, 2, 3], [4.0, 9.0, 1.0, 2.0, 1.0], [0, 1, 0, 3, 1]
    keep = [rows.variable(-cost) for cost in costs]
    rows.row([(k, float(size)) for k, size in zip(keep, sizes, strict=True)], -np.inf, 12.0)
    rows.row([(keep[0], 1.0), (keep[3], -1.0)], -0.5)
    tied, place = rows.tied(same)
    solution = tied.solve(nodes=1000, seconds=10.0, gap=1e-9)
    values = [round(solution.values[k]) for k in place]
    allowed = [
        one for one in product((0, 1), repeat=5)
        if one[0] == one[2] and one[1] == one[4] and one[0] - one[3] >= -0.5
        and sum(x * s for x, s in zip(one, sizes, strict=True)) <= 12
    ]  # fmt: skip
    best = max(sum(x * c for x, c in zip(one, costs, strict=True)) for one in allowed)
    assert tuple(values) in allowed
    assert sum(x * c for x, c in zip(values, costs, strict=True)) == best
    assert len(tied.costs) == 3


@pytest.fixture(scope="module")
def deep():
    return problem_of(40)


def test_copies_of_one_group_share_their_choice(deep):
    plain = evaluate(deep, ())
    ways = shared(deep, plain)
    assert len(ways) == 3
    cut = plain.peak_at
    for ties in ways:
        result = solved(deep, plain.peak // 2, [cut], nodes=100, slack=5e-4, ties=ties)
        again = {op for _, op in result.events}
        copies = [frozenset(op - start for op in range(start, start + LENGTH) if op in again)
                  for start in range(2, 2 + 30 * LENGTH, LENGTH)]  # fmt: skip
        assert copies[0::2] == [copies[0]] * 15
        assert copies[1::4] == [copies[1]] * len(copies[1::4])
        assert result.bound == 0
        for s, op in ties.held:  # nothing runs again across a border
            assert op not in again or deep.producer[s] not in again


def test_a_plan_with_blocks_is_better_than_without_after_few_moves_and_passes_the_checker(deep, monkeypatch):
    monkeypatch.setattr(annealing, "_WORK", 1)  # the fewest moves
    monkeypatch.setattr(portfolio._Search, "solve_cuts", lambda *given, **options: [])
    budget = int(evaluate(deep, ()).peak * 0.45)
    found = [searched(deep, budget, time_limit=1000, seed=1) for _ in range(2)]
    assert found[0].events == found[1].events
    assert (found[0].method, found[0].stopped_by_time) == ("blocks", False)
    check(deep.graph, found[0].program, budget=budget)
    monkeypatch.setattr(portfolio, "shared", lambda problem, plain: [])
    without = searched(deep, budget, time_limit=1000, seed=1)
    assert found[0].cost < without.cost


def test_with_offload_too_it_passes_the_checker(deep, monkeypatch):
    tried = []
    monkeypatch.setattr(away, "shared", lambda *given: tried.append(given) or shared(*given))
    budget = int(evaluate(deep, ()).peak * 0.4)
    link = Link(20.0, 20.0, 0.0)
    found = searched(deep, budget, time_limit=2, only={"recompute", "offload"}, link=link)
    assert tried
    check(deep.graph, found.program, budget=budget)
