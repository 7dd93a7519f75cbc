"""The clock for a device: it waits longer where the host is late, and remembers for how long."""

import contextlib

import pytest
import torch

from lowtide.cost import clock, samples
from lowtide.cost.clock import CudaClock
from lowtide.cost.samples import Sample


class Queue(CudaClock):
    """As if the device began too early unless it paused for so many cycles."""

    def __init__(self, needed):
        self.needed, self.pauses = needed, []
        self._pause = clock._PAUSE_CYCLES

    def _queued(self, call, count, pause):
        self.pauses.append(pause // clock._PAUSE_CYCLES)
        return [Sample(float(pause))], pause < self.needed * clock._PAUSE_CYCLES


@pytest.mark.parametrize(
    ("needed", "first", "then"),
    [(1, [1], [1]), (2, [1, 3], [3]), (3, [1, 3], [3]), (5, [1, 3, 9], [8]), (100, [1, 3, 9], [1, 3, 9])],
)
def test_the_pause_grows_until_all_calls_are_queued(needed, first, then):
    queue = Queue(needed)
    assert queue._batch(lambda: None) == [Sample(first[-1] * clock._PAUSE_CYCLES)]
    assert queue.pauses == first
    queue.pauses.clear()
    queue._batch(lambda: None)
    assert queue.pauses == then


class Device:
    """A device that needs so many seconds for each call, and begins when its pause is over."""

    def __init__(self, monkeypatch, *, begins_early, call=1e-3):
        self.begins_early, self.call, self.time, self.waited = begins_early, call, 0.0, 0
        monkeypatch.setattr(clock, "timing_event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self, _):
        self.waited += 1


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.time
        self.device.time += self.device.call / 2

    def query(self):
        assert not self.device.waited, "asked before anybody waits for the device"
        return self.device.begins_early

    def elapsed_time(self, other):
        assert self.device.waited == 1
        return (other.at - self.at) * 1e3


class Host:
    """The thread that queues calls; others run for so long while it does."""

    def __init__(self, delay):
        self.delay, self.time = delay, 0.0

    def now(self):
        self.time += 1e-3
        return self.time

    def worked(self):
        return self.time * (1 - self.delay)

    def preempted(self):
        return round(self.time * 1e6 * self.delay)


@pytest.mark.parametrize("begins_early", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.9])
def test_calls_on_a_device_are_disturbed_where_a_late_host_was(monkeypatch, begins_early, delay):
    monkeypatch.setattr(samples, "_NOISE", 0.0)
    device = Device(monkeypatch, begins_early=begins_early)
    cuda = CudaClock.__new__(CudaClock)
    cuda.device, cuda._timer, cuda._nothing = "cuda", Host(delay), 1e-4
    made = []
    found, late = cuda._queued(lambda: made.append(device.time), 5, 7)
    assert late is begins_early
    assert len(found) == len(made) == 5
    assert all(sample.seconds == pytest.approx(1e-3 / 2 - 1e-4) for sample in found)
    assert {sample.disturbed for sample in found} == {begins_early and delay > 0}


@pytest.mark.parametrize(
    ("left", "batches"), [(1e3, [5, 5, 5, 5]), (-1.0, [1]), (7e-3, [5]), (10e-3, [5, 5])]
)
def test_behind_the_deadline_one_call_is_timed_after_one_that_sets_up_libraries(monkeypatch, left, batches):
    made, timed = [], []
    cuda = CudaClock.__new__(CudaClock)
    cuda._timer = Host(0.0)
    monkeypatch.setattr(cuda, "_watched", lambda call: (call(), 128), raising=False)

    def batch(call, count):
        timed.append(count)
        for _ in range(count):
            call()
            cuda._timer.now()  # a millisecond
        return [Sample(1e-3)] * count

    monkeypatch.setattr(cuda, "_batch", batch, raising=False)
    found, workspace = cuda.again(lambda: made.append(1), left)
    assert (timed, workspace) == (batches, 128)
    assert len(made) == 1 + sum(batches) == 1 + len(found)
