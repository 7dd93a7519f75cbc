"""What a plan is told of copies to the host: whether forward ends with them, as it does as a CUDA graph."""

import pytest

from lowtide.execute.planning.step_costs import link_for, link_of
from lowtide.plan.budget import Budget
from lowtide.plan.request import PlanRequest


@pytest.mark.parametrize(
    ("graphs", "asked", "settles"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"offload": ("optimizer",)}, False),  # is not replayed
    ],
)
def test_forward_ends_with_its_copies_where_memory_is_left_for_graphs(graphs, asked, settles):
    request = PlanRequest(Budget(bytes=1 << 30), ("recompute", "offload"), **asked)
    link = link_for(request, "cpu", graphs=graphs)
    assert link is not None
    assert link.settles is settles
    alone = link_of("cpu")
    if settles:  # with time to spare
        assert link.to_host == pytest.approx(alone.to_host / 1.15)
        assert link.to_device == pytest.approx(alone.to_device / 1.15)
        assert (link.handover, link.beside) == (alone.handover, alone.beside)
    else:
        assert link == alone


def test_without_copies_there_is_no_link():
    assert link_for(PlanRequest(Budget(bytes=1 << 30), ("recompute",)), "cpu", graphs=True) is None
