"""Convolutions whose backward runs in two calls, where a step fits no other way."""

import platform
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InfeasibleError
from lowtide.execute.compare.compare import compare
from lowtide.execute.compare.tiles import plain_tiles
from lowtide.execute.planning import plan_step, splitting
from lowtide.graph import Rect
from lowtide.plan.program.simple import store_all
from lowtide.trace.step.capture import capture

from ..small import loss_of

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the workspaces are those of oneDNN on x86"
)


@pytest.fixture(autouse=True)
def _whole_batches(monkeypatch):
    """Convolutions are not sliced: that is another test's (test_slices.py)."""
    monkeypatch.setattr("lowtide.trace.groups.slices.slices_for", lambda arguments: 1)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1)), torch.randn(2, 3, 64, 64)


def refused(model, x, budget="150KiB", **options):
    with pytest.raises(InfeasibleError) as caught:
        lowtide.fit(loss_of, model, x, budget=budget, only="recompute", **options)
    return caught.value


def two_calls(graph):
    """Convolutions that run in backward."""
    return [op for op in graph.ops if op.kind == "aten.convolution" and op.phase == "backward"]


def test_a_step_fits_that_does_not_with_whole_convolutions(monkeypatch):
    model, x = network()
    with monkeypatch.context() as patched:
        patched.setattr(splitting, "can_split", lambda targets: False)
        whole = refused(model, x)
    split = refused(model, x)
    assert split.smallest_budget < whole.smallest_budget
    assert "the backward of convolutions in two calls each" in str(split)
    budget = (split.smallest_budget + whole.smallest_budget) // 2
    share = f"{budget / whole.plain_peak:.2%}"  # of the step with whole convolutions
    plan = lowtide.fit(loss_of, model, x, budget=share, only="recompute").plan
    assert two_calls(plan.graph)
    assert "convolutions run their backward in two calls each" in plan.explain()
    assert plan.budget_bytes == pytest.approx(budget, rel=1e-3)
    assert plan.predicted.peak_bytes <= plan.budget_bytes < whole.smallest_budget
    with monkeypatch.context() as patched:
        patched.setattr(plan_step, "make_plan", None)  # nothing is searched for a second time
        torch._dynamo.reset()
        assert lowtide.fit(loss_of, model, x, budget=share, only="recompute").plan == plan
    found = compare(model, (x,), loss_of, lambda _: plan.program, in_place=False, repeats=0)
    assert found.program == plan.program
    assert found.bitwise
    assert found.measured.peak_bytes <= plan.budget_bytes


def test_convolutions_stay_whole_where_the_step_fits():
    model, x = network()
    plan = lowtide.fit(loss_of, model, x, budget="100%", only="recompute").plan
    assert not two_calls(plan.graph)
    assert "two calls" not in plan.explain()


def test_the_bodies_of_tiles_are_split_too():
    model, x = network()
    joint = capture(loss_of, model, x).joint
    boxes = [Rect((k, 0, 0, 0), (k + 1, 8, 64, 64)) for k in range(2)]
    for split in (False, True):
        program, _ = plain_tiles(replace(joint, split=split), boxes)
        assert [bool(two_calls(body.graph)) for body in program.bodies] == [split]


def test_a_refusal_is_the_first_one_where_none_can_be_split(monkeypatch):
    monkeypatch.setattr("lowtide.trace.step.split_convolutions.same_when_split", lambda arguments: False)
    error = refused(*network())
    assert "in two calls" not in str(error)


def test_a_kept_plan_that_does_not_hold_any_more_is_not_what_a_refusal_is_about(monkeypatch):
    model, x = network()
    with monkeypatch.context() as patched:
        patched.setattr(splitting, "can_split", lambda targets: False)
        budget = refused(model, x).smallest_budget - 1
    lowtide.fit(loss_of, model, x, budget=budget, only="recompute")
    monkeypatch.setattr("lowtide.trace.step.split_convolutions.same_when_split", lambda arguments: False)
    torch._dynamo.reset()
    error = refused(model, x, budget)
    assert error.smallest_budget == budget + 1
    assert str(error).startswith("no plan fits")


def test_a_program_of_neither_form_is_refused():
    model, x = network()
    other = lowtide.capture(loss_of, nn.Sequential(*model[:3]), x).step.graph
    with pytest.raises(lowtide.LowtideError, match="instruction|program"):
        compare(model, (x,), loss_of, lambda _: store_all(other), in_place=False, repeats=0)
