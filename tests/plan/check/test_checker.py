import random

import pytest

from lowtide.errors import PlanError
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.check.checker import check
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simple import offload_all, recompute_all, store_all
from lowtide.plan.program.simulate import simulate
from tests.plan.random_steps import random_step

GRAPH = Graph(
    (
        Tensor("x", 4, Role.INPUT),
        Tensor("w", 4, Role.PARAMETER),
        Tensor("y", 4),
        Tensor("dw", 4, Role.GRADIENT, gradient_of=1),
    ),
    (
        Op("f", "f", inputs=(0, 1), outputs=(2,)),
        Op("count", "count", inputs=(1,), outputs=(1,)),
        Op("g", "g", Phase.BACKWARD, inputs=(2, 0), outputs=(3,)),
    ),
)


def test_the_plain_program_fits():
    check(GRAPH, store_all(GRAPH))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (Program((Run(0),), (Run(2),)), "forward part, which never ran 'count'"),
        (Program((Run(0), Run(1)), (Run(7),)), "runs operator 7; the step has 3"),
        (Program((Run(0), Run(1), Run(2))), "of backward in the forward part"),
        (Program((Run(1),), (Run(0), Run(2))), "forward part, which never ran 'f'"),
        (Program((Run(0), Run(1), Run(1)), (Run(2),)), "again, which changes its input"),
        (Program((Run(0), Run(1), Drop((9,))), (Run(2),)), "drops tensor 9"),
        (Program((Run(0), Run(1), Drop((1,))), (Run(2),)), "drops 'w', which must stay"),
        (Program((Run(0), Run(1), Drop((2,))), (Run(2),)), "'g' reads 'y', which is not there"),
        (Program((Run(0, in_place=4), Run(1)), (Run(2),)), "writes over input 4"),
    ],
)
def test_what_does_not_fit_is_named(program, said):
    with pytest.raises(PlanError, match=said):
        check(GRAPH, program)


def programs(graph, able):
    for program in (store_all(graph), recompute_all(graph), recompute_all(graph, each_use=True)):
        yield program
        yield with_in_place(graph, program, able)
    yield offload_all(graph)


@pytest.mark.parametrize("seed", range(40))
def test_it_counts_what_the_simulation_counts(seed):
    graph, _, workspace, able = random_step(seed)
    for program in programs(graph, able):
        peak = simulate(graph, program, workspace_bytes=workspace).peak_bytes
        assert check(graph, program, workspace_bytes=workspace).peak_bytes == peak
        assert check(graph, program, budget=peak, workspace_bytes=workspace)
        with pytest.raises(PlanError, match="more than the budget"):
            check(graph, program, budget=peak - 1, workspace_bytes=workspace)


@pytest.mark.parametrize("seed", range(40))
def test_a_program_with_a_line_missing_or_moved_is_caught_or_runs(seed):
    """Whatever passes here can be simulated: nothing is read, dropped or sent that is not there."""
    graph, _, workspace, able = random_step(seed)
    draw = random.Random(seed)
    caught = 0
    for program in programs(graph, able):
        for _ in range(6):
            lines = list(program.instructions)
            line = lines.pop(draw.randrange(len(lines)))
            if draw.random() < 0.5:
                lines.insert(draw.randrange(len(lines) + 1), line)
            cut = min(len(program.forward), len(lines))
            changed = Program(tuple(lines[:cut]), tuple(lines[cut:]))
            try:
                check(graph, changed, workspace_bytes=workspace)
            except PlanError:
                caught += 1
            else:
                simulate(graph, changed, workspace_bytes=workspace)
    assert caught


def test_a_tensor_that_is_written_over_is_not_read_again():
    graph = Graph(
        (Tensor("x", 4, Role.INPUT), Tensor("a", 4), Tensor("b", 4), Tensor("c", 4)),
        (
            Op("f", "f", inputs=(0,), outputs=(1,)),
            Op("g", "g", inputs=(1,), outputs=(2,)),
            Op("h", "h", inputs=(1, 2), outputs=(3,)),
        ),
        returned=(3,),
    )
    assert check(graph, Program((Run(0), Run(1), Run(2)))).peak_bytes == 16
    with pytest.raises(PlanError, match="reads 'a', which was written over"):
        check(graph, Program((Run(0), Run(1, in_place=0), Run(2))))


def test_what_is_being_sent_is_not_written_over():
    graph = Graph(
        (Tensor("x", 4, Role.INPUT), Tensor("a", 4), Tensor("b", 4)),
        (Op("f", "f", inputs=(0,), outputs=(1,)), Op("g", "g", inputs=(1,), outputs=(2,))),
        returned=(2,),
    )
    with pytest.raises(PlanError, match="being sent"):
        check(graph, Program((Run(0), Send(1), Run(1, in_place=0))))
    with pytest.raises(PlanError, match="was not sent"):
        check(graph, Program((Run(0), Drop((1,)), Fetch(1), Run(1))))
    found = check(graph, Program((Run(0), Send(1), Drop((1,)), Fetch(1), Run(1))))
    assert found.host_bytes == 4
