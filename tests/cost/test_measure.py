"""Measuring in the middle of a step: right figures, and a step that does not notice."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy

from lowtide.cost import Origin
from lowtide.cost.cache import CostCache, open_cache
from lowtide.cost.clock import CudaClock
from lowtide.cost.device import Device
from lowtide.cost.estimate import estimate
from lowtide.cost.measure import measure
from lowtide.cost.record import record
from lowtide.cost.watch import watch_cpu
from lowtide.execute.compare.profile import measured_profile
from tests.cost.busy import Ticking
from tests.cost.plain import environment
from tests.cost.steps import Captured, parameter


class Network(nn.Module):
    """Something of everything that measuring could disturb: buffers, dropout, several layers of one size."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.third = nn.Conv2d(6, 6, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        x = self.third(self.drop(self.second(x)).relu())
        return self.last(x.mean((2, 3)))


def loss(model, x, y):
    return cross_entropy(model(x), y)


def network():
    torch.manual_seed(1)
    return Network(), torch.randn(2, 3, 12, 12), torch.tensor([0, 3])


def state_of(model):
    values = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    return [value.clone() for value in values if value is not None]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_step_that_is_measured_gives_bitwise_what_it_gives_otherwise():
    results = []
    for measuring in (None, Ticking(0.0), Ticking()):
        model, x, y = network()
        captured = Captured(loss, model, x, y)
        torch.manual_seed(2)
        if measuring:
            found = []

            def run(marker, captured=captured, found=found):
                found.append(captured.run(marker))

            measure(captured.graph, captured.targets, run, timer=measuring)
            value = found[0]
        else:
            value = captured.step()
        results.append([value.detach(), *state_of(model), torch.get_rng_state()])
    assert same(*results[:2])
    assert same(*results[1:])


def test_a_profile_leaves_model_gradients_buffers_and_random_state_alone():
    model, x, y = network()
    loss(model, x, y).backward()
    state, random = state_of(model), torch.get_rng_state()
    gradients = [p.grad for p in model.parameters()]
    profile = measured_profile(loss, (model, x, y), environment())
    assert same(state_of(model), state)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert profile.measured.once == 0
    loss(model, x, y).backward()


def test_every_operator_has_every_figure():
    model, x, y = network()
    captured = Captured(loss, model, x, y)
    found = measure(captured.graph, captured.targets, captured.run)
    assert len(found.costs) == len(captured.graph.ops)
    assert 1 < found.signatures < len(captured.graph.ops)
    assert (found.from_cache, found.once) == (0, 0)
    for op, cost in zip(captured.graph.ops, found.costs, strict=True):
        for figure in (cost.seconds, cost.bytes_moved, cost.workspace_bytes):
            assert figure.origin is Origin.MEASURED
            assert figure.value >= 0
        exact = op.kind in ("aten.convolution", "aten.convolution_backward", "aten.addmm", "aten.mm")
        assert cost.flop.origin is (Origin.MEASURED if exact else Origin.ESTIMATED), op.kind
    twins = [found.costs[captured.op("convolution", k)] for k in (1, 2)]
    assert twins[0] is twins[1]


def test_work_seen_in_the_calls_is_the_work_told_from_shapes():
    model, x, y = network()
    captured = Captured(loss, model, x, y)
    found = measure(captured.graph, captured.targets, captured.run)
    device = Device(environment(), {"float32": 1e9}, 1e9, 1e-6, 1 << 30)
    for op, seen, told in zip(captured.graph.ops, found.costs, estimate(captured.graph, device), strict=True):
        assert (seen.flop.value, seen.bytes_moved.value) == (told.flop.value, told.bytes_moved.value), op.kind


def test_the_workspace_of_a_convolution_is_what_the_allocator_reports():
    x, w = torch.randn(4, 16, 40, 40), parameter(16, 16, 3, 3)
    captured = Captured(lambda x, w: conv2d(x, w, padding=1).square().sum(), x, w)
    op = captured.op("convolution")
    found = measure(captured.graph, captured.targets, captured.run)
    function, call = captured.targets[op], captured.interpreter.joint.calls[op]

    def alone(marker):
        marker.before(0)
        result = function(x, w.detach(), *call.args[2:])
        marker.after(0)
        return result

    result, allocations = watch_cpu(alone)
    before, peak, after = allocations.operators[0][0]
    assert (before, after) == (0, result.nbytes)
    assert found.costs[op].workspace_bytes.value == peak - result.nbytes
    _, whole = watch_cpu(captured.run)
    for k, cost in enumerate(found.costs):
        assert cost.workspace_bytes.value == whole.workspace_bytes(k), captured.graph.ops[k].id


def test_an_operator_that_writes_into_its_input_is_repeated_on_a_copy():
    value = torch.zeros(8)
    target = torch.ops.aten.add_.Scalar
    graph = Captured(lambda x, w: (x * w).sum(), torch.randn(8), parameter(8)).graph

    def run(marker):
        for op in range(len(graph.ops)):
            marker.before(op)
            target(value, 1.0)
            marker.after(op)

    found = measure(graph, [target] * len(graph.ops), run)
    assert value.tolist() == [len(graph.ops)] * 8
    assert found.once == 0


def test_without_time_each_operator_is_timed_as_the_step_runs_it(tmp_path):
    model, x, y = network()
    captured = Captured(loss, model, x, y)
    cache = open_cache(tmp_path, environment())
    found = measure(captured.graph, captured.targets, captured.run, cache=cache, time_limit=0)
    assert found.once == len(captured.graph.ops)
    assert all(cost.seconds.value > 0 and cost.workspace_bytes is not None for cost in found.costs)
    assert len(cache) == 0, "figures taken in haste are not kept"


def test_what_the_cache_knows_is_not_measured_again(tmp_path):
    model, x, y = network()
    captured = Captured(loss, model, x, y)
    cache = open_cache(tmp_path, environment())
    first = measure(captured.graph, captured.targets, captured.run, cache=cache)
    assert len(cache) == first.signatures
    again = measure(captured.graph, captured.targets, captured.run, cache=cache)
    assert again.from_cache == len(captured.graph.ops)
    assert again.costs == first.costs


def test_what_a_busy_machine_disturbs_is_marked_and_not_kept(tmp_path):
    model, x, y = network()
    captured = Captured(loss, model, x, y)
    cache = open_cache(tmp_path, environment())
    step = captured.graph, captured.targets, captured.run
    busy = measure(*step, cache=cache, timer=Ticking())
    assert busy.disturbed == len(captured.graph.ops)
    assert all(cost.disturbed and cost.seconds.value == pytest.approx(1e-3) for cost in busy.costs)
    assert len(cache) == 0, "the next run measures it again"
    quiet = measure(*step, cache=cache, timer=Ticking(0.0))
    assert (quiet.disturbed, quiet.from_cache) == (0, 0)
    assert len(cache) == quiet.signatures
    again = measure(*step, cache=cache, timer=Ticking())
    assert (again.disturbed, again.from_cache) == (0, len(captured.graph.ops))


def test_a_disturbance_that_ends_leaves_no_mark(tmp_path):
    captured = Captured(lambda x, w: (x @ w).relu().sum(), torch.randn(4, 4), parameter(4, 4))
    cache = open_cache(tmp_path, environment())
    timer = Ticking(busy_until=0.1)  # more than a first round of calls takes by this clock
    found = measure(captured.graph, captured.targets, captured.run, cache=cache, timer=timer)
    assert timer.time > 0.2
    assert found.disturbed == 0
    assert len(cache) == found.signatures


def test_measuring_again_takes_a_share_of_the_time_limit():
    model, x, y = network()
    captured = Captured(loss, model, x, y)
    spent = []
    for until in (0.0, math.inf):
        timer = Ticking(until)
        measure(captured.graph, captured.targets, captured.run, time_limit=8.0, timer=timer)
        spent.append(timer.time)
    assert 1.0 < spent[1] - spent[0] <= 0.25 * 8.0 + 0.2, "a round that was begun is ended"


def test_progress_goes_from_one_to_all():
    captured = Captured(lambda x, w: (x @ w).relu().sum(), torch.randn(4, 4), parameter(4, 4))
    seen = []
    measure(captured.graph, captured.targets, captured.run, progress=lambda *at: seen.append(at))
    count = len(captured.graph.ops)
    assert seen == [(k, count) for k in range(1, count + 1)]


def test_an_interruption_leaves_nothing_behind_and_loses_nothing():
    captured = Captured(lambda x, w: (x @ w).relu().sum(), torch.randn(4, 4), parameter(4, 4))

    def interrupt(done, total):
        raise KeyboardInterrupt

    cache = CostCache(Path(), environment(), {})
    with pytest.raises(KeyboardInterrupt):
        measure(captured.graph, captured.targets, captured.run, cache=cache, progress=interrupt)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert len(cache) == 1
    captured.step()


def test_an_operator_that_fails_does_not_leave_the_meter_in_the_way():
    captured = Captured(lambda x, w: (x @ w).relu().sum(), torch.randn(4, 4), parameter(4, 4))
    works = captured.interpreter._forward[0].function
    captured.interpreter._forward[0].function = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        measure(captured.graph, captured.targets, captured.run)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    captured.interpreter._forward[0].function = works
    captured.step()


def test_spans_follow_one_another_on_both_lanes():
    model, x, y = network()
    captured = Captured(loss, model, x, y)
    spans = record(captured.graph, captured.run)
    for host in (False, True):
        lane = [span for span in spans if span.host is host]
        assert [span.op for span in lane] == list(range(len(captured.graph.ops)))
        assert lane[0].start == 0
        assert all(a.end <= b.start <= b.kern <= b.end for a, b in pairwise(lane))
    assert {span.lane for span in spans} == {"cpu", "host"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_a_step_is_measured_and_goes_on_as_before(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = []
    for measuring in (False, True):
        model, x, y = network()
        model, x, y = model.cuda(), x.cuda(), y.cuda()
        captured = Captured(loss, model, x, y)
        torch.manual_seed(2)
        if measuring:
            found = measure(captured.graph, captured.targets, captured.run)
            assert found.once == 0
            assert all(cost.workspace_bytes.value >= 0 for cost in found.costs)
            spans = record(captured.graph, captured.run)
            assert {span.lane for span in spans} == {"cuda:0", "host"}
        else:
            captured.step()
            captured.step()
        results.append([*state_of(model), torch.cuda.get_rng_state()])
    assert same(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_first_calls_tell_nothing_where_time_is_short(monkeypatch, tmp_path):
    """Without any time nothing is called again, as that takes memory."""
    first, again = CudaClock.first, CudaClock.again
    repeats = []

    def loading(self, call):
        result, seconds, workspace = first(self, call)
        return result, seconds + 10.0, workspace

    def repeated(self, call, deadline):
        repeats.append(deadline)
        return again(self, call, deadline)

    monkeypatch.setattr(CudaClock, "first", loading)
    monkeypatch.setattr(CudaClock, "again", repeated)
    model, x, y = network()
    captured = Captured(loss, model.cuda(), x.cuda(), y.cuda())
    cache = open_cache(tmp_path, environment())
    found = measure(captured.graph, captured.targets, captured.run, cache=cache, time_limit=1e-9)
    assert 0 < found.once < len(captured.graph.ops), "views take nothing, and need no clock"
    assert all(cost.seconds.value < 1 for cost in found.costs)
    assert len(cache) < found.signatures, "figures taken in haste are not kept"
    assert repeats
    repeats.clear()
    found = measure(captured.graph, captured.targets, captured.run, time_limit=0)
    assert not repeats
    assert any(cost.seconds.value >= 10 for cost in found.costs)
