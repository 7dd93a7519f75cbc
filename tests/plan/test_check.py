import pytest

from lowtide.errors import PlanError
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.check import check
from lowtide.plan.plain import store_all
from lowtide.plan.program import Drop, Program, Run

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
