"""What a branch depends on is computed alone, and only where that changes nothing."""

import operator

import pytest
import torch
from torch import fx, nn

from lowtide.trace.branches.condition import Condition, NotKnown, _Pure, always


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("limit", [-0.5, 0.0, 0.5, 1.0, 2])
def test_a_random_number_is_compared_with_what_it_never_reaches(compare, limit):
    graph = fx.Graph()
    drawn = graph.call_function(torch.rand, ([],))
    drawn.meta["example_value"] = torch.zeros(())
    node = graph.call_function(compare, (drawn, limit))
    ends = {compare(0.0, limit), compare(1 - 2**-24, limit)}  # the smallest and the largest that is drawn
    assert always(node) == (ends.pop() if len(ends) == 1 else None)


def test_in_half_precision_a_random_number_may_be_rounded():
    graph = fx.Graph()
    drawn = graph.call_function(torch.rand, ([],))
    drawn.meta["example_value"] = torch.zeros((), dtype=torch.float16)
    assert always(graph.call_function(operator.lt, (drawn, 1.0))) is None


def test_what_follows_from_sizes_is_computed_once_for_each():
    asked = []

    def large(size):
        asked.append(size)
        return size > 3

    graph = fx.Graph()
    graph.output(graph.call_function(large, (graph.placeholder("size"),)))
    condition = Condition(graph, ["size"], of_sizes=True)
    assert [condition.holds(size) for size in (2, 4, 2, 4)] == [False, True, False, True]
    assert condition.fails(2)
    assert asked == [2, 4]


@pytest.mark.parametrize(
    "run",
    [
        lambda given: given.add_(1),
        lambda given: torch.add(given, 1, out=given),
        lambda given: given[1:].zero_(),
        lambda given: torch.rand(2),
        lambda given: nn.functional.dropout(given, 0.5),
    ],
)
def test_an_operator_that_draws_or_changes_what_is_given_does_not_run(run):
    given, before = torch.ones(4), torch.get_rng_state()
    with pytest.raises(NotKnown), _Pure({given.untyped_storage()._cdata}):
        run(given)
    assert torch.equal(given, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_of_its_own_may_be_changed():
    given = torch.ones(4)
    with _Pure({given.untyped_storage()._cdata}):
        assert given.clone().add_(1).sum() == 8
