import pytest

from lowtide.cost import Cost, Figure, Origin, Span, Step, validate_step
from lowtide.errors import GraphError
from lowtide.graph import Graph, Lifetime, Op, Tensor, Timeline

GRAPH = Graph(
    (Tensor("x", 10), Tensor("y", 5)), (Op("a", "k", outputs=(0,)), Op("b", "k", inputs=(0,), outputs=(1,)))
)


def figure(value):
    return Figure(value, Origin.MEASURED)


def test_lifetimes_count_the_workspaces_and_times_that_are_known():
    step = Step(GRAPH, costs=(Cost(), Cost(seconds=figure(2.0), workspace_bytes=figure(100))))
    timeline = step.lifetimes()
    assert timeline.live_bytes == (10, 115)
    assert timeline.seconds == (0.0, 2.0)
    assert Step(GRAPH).lifetimes().live_bytes == (10, 15)


def test_a_span_knows_how_long_it_waited_and_ran():
    span = Span(0, "gpu", 1.0, 1.5, 4.0)
    assert (span.waiting, span.running) == (0.5, 2.5)


WRONG = {
    "1 costs for 2": Step(GRAPH, costs=(Cost(),)),
    "cost of operator 1": Step(GRAPH, costs=(Cost(), Cost(flop=figure(-1)))),
    "operator 0 is 2305843009213693952": Step(GRAPH, costs=(Cost(workspace_bytes=figure(2**61)), Cost())),
    "a cost": Step(GRAPH, costs=(Cost(seconds=figure(1e13)), Cost())),
    "operator 2": Step(GRAPH, spans=(Span(2, "gpu", 0, 0, 0),)),
    "out of order": Step(GRAPH, spans=(Span(0, "gpu", 0, 2, 1),)),
    "1 workspaces": Step(GRAPH, timeline=Timeline((1, 2), workspace_bytes=(1,))),
    "lies outside": Step(GRAPH, timeline=Timeline((1, 2), (Lifetime(0, 1, 0, 2),))),
    "used twice": Step(Graph((Tensor("x", 1), Tensor("x", 1)))),
}


@pytest.mark.parametrize("message", WRONG)
def test_figures_that_do_not_fit_are_named(message):
    with pytest.raises(GraphError, match=message):
        validate_step(WRONG[message])


def test_a_step_that_fits_is_returned():
    step = Step(GRAPH, costs=(Cost(), Cost()), spans=(Span(1, "gpu", 0, 1, 2),), timeline=Timeline((1, 2)))
    assert validate_step(step) is step
