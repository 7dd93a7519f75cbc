"""The layout of convolutions follows what is measured."""

import copy

import pytest
import torch
from torch.nn import functional

import lowtide
from lowtide.cost.samples import Timed
from lowtide.execute.kernels import compile_groups, layout, timed_calls
from lowtide.trace.eager.layouts import learned
from tests.trace.groups.test_channels_last import CONVOLUTIONS, captured


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


@pytest.fixture(autouse=True)
def _by_time_alone(monkeypatch):
    monkeypatch.setattr(layout, "as_close", lambda _: True)


@pytest.fixture
def convolutions():
    return captured(lambda x: CONVOLUTIONS(x).mean(), torch.randn(4, 3, 16, 16).requires_grad_())


@pytest.mark.parametrize(("conversion", "chosen"), [(0.01, True), (10.0, False)])
def test_conversions_count(conversion, chosen, convolutions, monkeypatch):
    def seconds(_, call):
        if str(call.node.target) == "contiguous":
            return conversion
        channels_last = call.node.target is torch.conv2d and "(768, 1, 48, 3)" in repr(call.given)
        return 0.5 if channels_last else 1.0

    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", seconds)
    module, inputs = convolutions
    assert (layout.in_faster_layout(module, inputs, learned(), 5.0) is not module) is chosen


def test_operators_are_timed_one_by_one_in_both_ways(convolutions, monkeypatch):
    timed = {}
    inner = timed_calls.CallTimer._seconds

    def seconds(self, call):
        timed[call] = inner(self, call)
        return timed[call]

    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", seconds)
    module, inputs = convolutions
    layout.in_faster_layout(module, inputs, learned(), 5.0)
    convolved = [call for call in timed if call.node.target is torch.conv2d]
    assert len(convolved) == 4  # two convolutions in two ways
    assert all(taken > 0 for taken in timed.values())
    assert any(call.node.target == "contiguous" for call in timed)


@pytest.mark.parametrize(("calls", "chosen"), [(1, False), (2, False), (100, True)])
def test_what_is_not_timed_in_time_counts_in_neither_way(calls, chosen, convolutions, monkeypatch):
    """Of the first operator, the user's layout was timed, or one of the conversions besides."""
    timed = []

    def seconds(self, call):
        timed.append(call)
        self._deadline = float("inf") if len(timed) < calls else 0.0
        return 0.1 if "(768, 1, 48, 3)" in repr(call.given) or call.name == "contiguous" else 1.0

    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", seconds)
    module, inputs = convolutions
    assert (layout.in_faster_layout(module, inputs, learned(), 5.0) is not module) is chosen


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("close", [True, False])
def test_a_layout_that_rounds_worse_than_torch_compile_is_not_kept(
    close, reference, faster, convolutions, monkeypatch
):
    monkeypatch.setattr(timed_calls.CallTimer, "faster", lambda *_: faster)
    monkeypatch.setattr(layout, "as_close", lambda _: close)
    monkeypatch.setattr(layout, "_is_reference", lambda _: reference)
    module, inputs = convolutions
    changed = layout.in_faster_layout(module, inputs, learned(), 5.0) is not module
    assert changed is (faster or (reference and not close))


def test_times_are_kept(convolutions, monkeypatch):
    module, inputs = convolutions
    monkeypatch.setattr(timed_calls, "judged", lambda _, __: Timed(1.0))  # whatever else runs here
    layout.in_faster_layout(module, inputs, learned(), 5.0)
    timed = []
    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", lambda _, call: timed.append(call) or 1.0)
    layout.in_faster_layout(module, inputs, learned(), 5.0)
    assert not [call for call in timed if call.node.target is torch.conv2d]


@pytest.mark.parametrize("first", [0.0, 5.0])
def test_what_is_found_once_stays(first, convolutions, monkeypatch):
    """However much could be measured in time: a plan that was made holds."""
    module, inputs = convolutions
    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", lambda *_: 1.0)
    monkeypatch.setattr(layout, "_GAIN", -1e9)
    chosen = layout.in_faster_layout(module, inputs, learned(), first) is not module
    assert chosen is (first > 0)
    assert (layout.in_faster_layout(module, inputs, learned(), 5.0) is not module) is chosen
    monkeypatch.setattr(timed_calls, "_TAKEN", {})  # in another process
    monkeypatch.setattr(timed_calls.CallTimer, "_seconds", None if chosen else lambda *_: 1.0)
    assert layout.in_faster_layout(module, inputs, learned(), 5.0) is not module


@pytest.mark.parametrize("faster", [True, False])
def test_other_shapes_have_the_layout_of_the_first(faster, monkeypatch):
    """Timing takes memory beside the step, which a user who trains has not."""
    monkeypatch.setattr(compile_groups, "compile_kernels", None)
    monkeypatch.setattr(compile_groups, "_warn", lambda label, why: None)
    monkeypatch.setattr(layout, "_GAIN", -1e9 if faster else 1.0)
    torch._dynamo.reset()
    model = copy.deepcopy(CONVOLUTIONS)
    asked = {"budget": "100%", "only": "recompute", "kernels": "fused", "time_limit": 1.0}
    step = lowtide.fit(lambda model, x: model(x).square().mean(), model, torch.randn(4, 3, 16, 16), **asked)
    monkeypatch.setattr(layout, "CallTimer", None)
    for size in (20, 24):
        step(model, torch.randn(4, 3, size, size)).backward()
        converted = any(op.label.startswith("clone") for op in step.plan.graph.ops)
        assert converted is faster


def test_without_time_nothing_is_changed(convolutions):
    module, inputs = convolutions
    assert layout.in_faster_layout(module, inputs, learned(), 0.0) is module


def test_half_precision_is_timed_as_it_runs():
    def loss_of(x):
        with torch.autocast("cpu", torch.bfloat16):
            return functional.conv2d(x, torch.ones(4, 3, 3, 3)).float().mean()

    module, inputs = captured(loss_of, torch.randn(2, 3, 8, 8).requires_grad_())
    values = layout.values_of(module, layout.fake_arguments(learned().mode(), inputs))
    call = next(timed_calls.TimedCall(node, values) for node in values if node.target is torch.conv2d)
    assert call.dtype is torch.bfloat16
    assert timed_calls.CallTimer(torch.device("cpu"), float("inf"))(call) > 0
