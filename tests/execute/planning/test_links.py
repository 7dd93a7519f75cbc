"""What a plan is told of copies to the host: whether forward ends with them, as it does as a CUDA graph."""

from types import SimpleNamespace

import pytest

from lowtide.execute.planning.plan_step import StepPlanner
from lowtide.plan.budget import Budget
from lowtide.plan.request import PlanRequest


@pytest.mark.parametrize(
    ("graph_bytes", "asked", "settles"),
    [
        (0, {}, False),
        (1 << 20, {}, True),
        (1 << 20, {"offload": ("optimizer",)}, False),  # is not replayed
    ],
)
def test_forward_ends_with_its_copies_where_memory_is_left_for_graphs(graph_bytes, asked, settles):
    planner = SimpleNamespace(_device="cpu", _room=SimpleNamespace(graph_bytes=graph_bytes))
    request = PlanRequest(Budget(bytes=1 << 30), ("recompute", "offload"), **asked)
    link = StepPlanner._link(planner, request)
    assert link is not None
    assert link.settles is settles


def test_without_copies_there_is_no_link():
    planner = SimpleNamespace(_device="cpu", _room=SimpleNamespace(graph_bytes=1))
    assert StepPlanner._link(planner, PlanRequest(Budget(bytes=1 << 30), ("recompute",))) is None
