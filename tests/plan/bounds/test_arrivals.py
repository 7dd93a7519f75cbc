"""Copies that recomputed operators read arrive before these run."""

import pytest

from lowtide.graph import Graph, Op, Phase, Role, Tensor, validate
from lowtide.plan.bounds.cut import CutProblem, Effort, solve_cuts
from lowtide.plan.problem.problem import build_problem
from lowtide.plan.program.copy_lanes import Link

A, B = 1, 2
FIRST = 4
"""The operator that reads B, and so what makes it again reads A."""


def late_reader():
    """A is read in backward after 20 s, and at once by what makes B again."""
    sizes = [1, 8, 8, 1, 10, 1, 1, 1]
    reads = [(0,), (A,), (B,), (3,), (4, B), (5,), (6, A)]
    phases = [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 4
    tensors = [
        Tensor(f"t{k}", size, Role.INPUT if not k else Role.ACTIVATION) for k, size in enumerate(sizes)
    ]
    ops = [Op(f"op{k}", "k", phases[k], reads[k], (k + 1,)) for k in range(7)]
    graph = validate(Graph(tuple(tensors), tuple(ops), returned=(3,)))
    return build_problem(graph, (10.0, 1.0, 10.0, 1.0, 1.0, 20.0, 1.0), fine=True)


@pytest.mark.parametrize(
    ("early", "seconds"),
    [
        ((), 1.0),  # B is made from A, which need not be there yet
        ((FIRST,), 8.0),  # A or B is waited for: a copy of either takes 8 s
    ],
)
def test_what_runs_again_reads_what_has_arrived(early, seconds):
    problem = late_reader()
    asked = CutProblem(problem, 17, [3], link=Link(100.0, 1.0), early=early)
    result = solve_cuts(asked, Effort())
    assert problem.seconds(result.bound) == pytest.approx(seconds, abs=0.01)
    assert A in {problem.owner[s] for s in result.away}


def test_what_is_held_need_not_arrive():
    problem = late_reader()
    found = [
        solve_cuts(CutProblem(problem, 21, [3], link=Link(100.0, 1.0), early=early), Effort())
        for early in ((), (FIRST,))
    ]
    assert [{problem.owner[s] for s in one.away} for one in found] == [{A}, {A}]
    assert [problem.seconds(one.bound) for one in found] == pytest.approx([0.0, 0.0], abs=0.01)
