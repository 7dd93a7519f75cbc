"""Bounds by cases, against every order of the operators and every recomputation."""

import random

import pytest

from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate
from lowtide.plan.bounds.cut import CutProblem, Effort
from lowtide.plan.bounds.first_heavy import by_cases, ordered, rival
from lowtide.plan.bounds.lower_bounds import smallest_conceivable
from lowtide.plan.bounds.relaxation import relax
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.problem.schedule import evaluate
from lowtide.plan.program.copy_lanes import Link
from tests.plan.every_order import EveryOrder
from tests.planning import solved


def two_losses(seed):
    """A step with two losses over one trunk: the backward of each has a peak, and they run in any order."""
    draw = random.Random(seed)
    sizes, ops, seconds = [1], [], []

    def run(phase, reads, size, time):
        sizes.append(size)
        ops.append(Op(f"op{len(ops)}", "k", phase, tuple(reads), (len(sizes) - 1,)))
        seconds.append(float(time))
        return len(sizes) - 1

    trunk = [0]
    for _ in range(3):
        trunk.append(run(Phase.FORWARD, [trunk[-1]], draw.randint(2, 5), draw.randint(1, 9)))
    heads = [[trunk[draw.choice([-1, -2])]] for _ in range(2)]
    for head in heads:
        head.append(run(Phase.FORWARD, head[-1:], draw.randint(5, 9), draw.randint(1, 5)))
    loss = run(Phase.FORWARD, [head[-1] for head in heads], 1, 1)
    gradients = []
    for read, made in heads:
        one = run(Phase.BACKWARD, [made], draw.randint(5, 9), 2)
        gradients.append(run(Phase.BACKWARD, [one, read], 1, 2))
    for made in reversed(trunk[:-1]):
        gradients = [run(Phase.BACKWARD, [*gradients, made], draw.randint(1, 3), 2)]
    roles = {0: Role.INPUT}
    tensors = tuple(Tensor(f"t{k}", size, roles.get(k, Role.ACTIVATION)) for k, size in enumerate(sizes))
    return validate(Graph(tensors, tuple(ops), returned=(loss,))), tuple(seconds)


def budgets(seed):
    graph, seconds = two_losses(seed)
    problem = build_problem(graph, seconds)
    relaxation = relax(problem)
    floor, plain = smallest_conceivable(relaxation), evaluate(problem, ())
    truth = EveryOrder(graph, seconds)
    for k in range(3):
        yield problem, relaxation, plain, floor + (plain.peak - floor) * (k + 1) // 4, truth


def test_cases_prove_more_and_never_too_much():
    gained = 0
    for seed in range(12):
        for problem, relaxation, plain, budget, truth in budgets(seed):
            known = solved(problem, budget, [plain.peak_at], relaxation=relaxation)
            asked = CutProblem(problem, budget, [plain.peak_at], relaxation=relaxation)
            best = truth.best(budget)
            for nodes, start in ((1000, known), (1000, None), (0, None)):
                told = by_cases(asked, Effort(nodes), start)
                assert told.feasible or best is None
                assert best is None or problem.seconds(told.bound) <= best[0] + 1e-9
                if start is not None and told.feasible:
                    assert told.bound >= known.bound
                    gained += told.bound > known.bound
    assert gained >= 5


@pytest.mark.parametrize("link", [None, Link(4.0, 4.0, 0.1)])
def test_the_linear_program_proves_no_more_than_the_whole_one(link):
    for problem, relaxation, plain, budget, _ in budgets(3):
        cuts = [plain.peak_at]
        whole = solved(problem, budget, cuts, link=link, relaxation=relaxation)
        linear = solved(problem, budget, cuts, link=link, relaxation=relaxation, nodes=0)
        assert linear.bound <= whole.bound
        assert linear.events is None
        assert not linear.solved or not linear.feasible


def test_one_of_two_operators_is_first():
    problem, relaxation, plain, budget, _ = next(budgets(0))
    other = rival(relaxation, budget, plain.peak_at)
    order = relaxation.precedence
    assert other is not None
    assert not order.chained(plain.peak_at, other)
    for first, then in ((plain.peak_at, other), (other, plain.peak_at)):
        there = ordered(relaxation, first, then).precedence
        assert there.before[then] >> first & 1
        assert there.after[first] >> then & 1
        for v, before in enumerate(there.before):  # closed, and no circle
            assert not before >> v & 1
            for u in range(len(problem.ops)):
                assert not before >> u & 1 or there.before[u] & ~before == 0
                assert bool(before >> u & 1) == bool(there.after[u] >> v & 1)


def test_a_chain_has_no_cases():
    tensors = tuple(Tensor(f"t{k}", 4, Role.ACTIVATION if k else Role.INPUT) for k in range(5))
    phases = (Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD)
    reads = ((0,), (1,), (2,), (3, 1))
    ops = tuple(Op(f"op{k}", "k", phases[k], reads[k], (k + 1,)) for k in range(4))
    problem = build_problem(validate(Graph(tensors, ops, returned=(2,))), (1.0,) * 4)
    assert rival(relax(problem), 5, evaluate(problem, ()).peak_at) is None
