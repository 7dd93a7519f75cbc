"""Clocks for single calls, on the CPU and on CUDA: what a call takes, and allocates besides its results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from lowtide.cost.samples import HostTimer, Sample, Timer, timed_call
from lowtide.cost.watch import Marker, timing_event, watch_cpu
from lowtide.device_internals import pause_device

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_of"]

MOST_REPEATS = 20
REPEAT_SECONDS = 0.15
"""Repeats of an operator end once they took so long together; there is one at least."""
_BATCH = 5
_PAUSE_CYCLES = 1_000_000
"""About half a millisecond in which a GPU does nothing, while the host queues what is to be timed."""
_MOST_PAUSE = 8 * _PAUSE_CYCLES
_LONGER = (1, 3, 9)
"""How much longer the pause gets where the host was late."""


class Clock(Protocol):
    """Times calls and says what they allocate besides their results."""

    def first(self, call: Callable[[], Any]) -> tuple[Any, float, int]:
        """The result, seconds and workspace of one call."""

    def again(self, call: Callable[[], Any], deadline: float) -> tuple[list[Sample], int | None]:
        """What a few more calls took, or one behind the deadline, and their workspace if it was looked at."""


class CpuClock:
    """The time of the host, on which the call runs."""

    def __init__(self, timer: Timer | None = None) -> None:
        self._timer = timer or HostTimer()

    def first(self, call: Callable[[], Any]) -> tuple[Any, float, int]:
        """The call, watched: its time has that of the recorder in it."""

        def run(marker: Marker) -> tuple[Any, float]:
            marker.before(0)
            result, sample = timed_call(self._timer, call)
            marker.after(0)
            return result, sample.seconds

        (result, seconds), allocations = watch_cpu(run)
        return result, seconds, allocations.workspace_bytes(0) or 0

    def again(self, call: Callable[[], Any], deadline: float) -> tuple[list[Sample], int | None]:
        """One call after the other."""
        samples: list[Sample] = []
        while not _enough(samples, deadline, self._timer):
            result, sample = timed_call(self._timer, call)
            samples.append(sample)
            del result  # giving memory back is not the operator's time
        return samples, None


class CudaClock:
    """The time of the device, told by events in its stream."""

    def __init__(self, device: torch.device, timer: Timer | None = None) -> None:
        self.device = device
        self._timer = timer or HostTimer()
        self._pause = _PAUSE_CYCLES
        self._nothing = 0.0
        self._nothing = statistics.median(sample.seconds for sample in self._batch(lambda: None))
        """What two events take with nothing between."""

    def first(self, call: Callable[[], Any]) -> tuple[Any, float, int]:
        """The call with all that libraries set up for it."""
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        result, workspace = self._watched(call)
        torch.cuda.synchronize(self.device)
        return result, time.perf_counter() - started, workspace

    def again(self, call: Callable[[], Any], deadline: float) -> tuple[list[Sample], int | None]:
        """Calls in batches, after one that shows the workspace: a first one sets up more than it needs."""
        workspace = self._watched(call)[1]
        samples: list[Sample] = []
        while not _enough(samples, deadline, self._timer):
            samples += self._batch(call, _BATCH if self._timer.now() < deadline else 1)
        return samples, workspace

    def _watched(self, call: Callable[[], Any]) -> tuple[Any, int]:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        most, after = (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.memory_allocated(self.device),
        )
        return result, most - max(before, after)

    def _batch(self, call: Callable[[], Any], count: int = _BATCH) -> list[Sample]:
        """What some calls took on the device, without the time in which it waits for the host.

        It is idle until the host has queued them all. Where the host was late, the time to do so is extended
        and the calls are made again; calls that themselves wait for the device are always late.
        """
        for longer in _LONGER:
            samples, late = self._queued(call, count, self._pause * longer)
            if not late:
                self._pause = min(_MOST_PAUSE, self._pause * longer)
                break
        return samples

    def _queued(self, call: Callable[[], Any], count: int, pause: int) -> tuple[list[Sample], bool]:
        """What some calls took, and whether the device began with them before all of them were queued.

        Then the host's pace counts as well: calls are disturbed where its thread was.
        """

        def queue() -> list[tuple[Any, Any]]:
            pairs = []
            pause_device(pause)
            for _ in range(count):
                start, end = timing_event(), timing_event()
                start.record()
                result = call()
                end.record()
                del result
                pairs.append((start, end))
            return pairs

        with torch.cuda.device(self.device):
            pairs, host = timed_call(self._timer, queue)
            late = bool(pairs[0][0].query())
            torch.cuda.synchronize(self.device)
        taken = [max(0.0, start.elapsed_time(end) * 1e-3 - self._nothing) for start, end in pairs]
        return [Sample(seconds, late and host.disturbed) for seconds in taken], late


def _enough(samples: Sequence[Sample], deadline: float, timer: Timer) -> bool:
    spent = sum(sample.seconds for sample in samples)
    return bool(samples) and (
        len(samples) >= MOST_REPEATS or spent >= REPEAT_SECONDS or timer.now() >= deadline
    )


def clock_of(device: torch.device, timer: Timer | None = None) -> Clock:
    """The clock for calls that run on a device."""
    return CudaClock(device, timer) if device.type == "cuda" else CpuClock(timer)
