"""Clocks for single calls, on the CPU and on CUDA: what a call takes, and allocates besides its results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lowtide.cost.watch import Marker, timing_event, watch_cpu

__all__ = ["Clock", "CpuClock", "CudaClock"]

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

    def again(self, call: Callable[[], Any], deadline: float) -> tuple[list[float], int | None]:
        """Seconds of a few more calls, and their workspace if it was looked at."""


class CpuClock:
    """The time of the host, on which the call runs."""

    def first(self, call: Callable[[], Any]) -> tuple[Any, float, int]:
        """The call, watched: its time has that of the recorder in it."""

        def run(marker: Marker) -> tuple[Any, float]:
            marker.before(0)
            started = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - started
            marker.after(0)
            return result, seconds

        (result, seconds), allocations = watch_cpu(run)
        return result, seconds, allocations.workspace_bytes(0) or 0

    def again(self, call: Callable[[], Any], deadline: float) -> tuple[list[float], int | None]:
        """One call after the other."""
        samples: list[float] = []
        while not _enough(samples, deadline):
            started = time.perf_counter()
            result = call()
            samples.append(time.perf_counter() - started)
            del result  # giving memory back is not the operator's time
        return samples, None


class CudaClock:
    """The time of the device, told by events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pause = _PAUSE_CYCLES
        self._nothing = 0.0
        self._nothing = statistics.median(self._batch(lambda: None))
        """What two events take with nothing between."""

    def first(self, call: Callable[[], Any]) -> tuple[Any, float, int]:
        """The call with all that libraries set up for it."""
        torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        result, workspace = self._watched(call)
        torch.cuda.synchronize(self.device)
        return result, time.perf_counter() - started, workspace

    def again(self, call: Callable[[], Any], deadline: float) -> tuple[list[float], int | None]:
        """Calls in batches, after one that shows the workspace: a first one sets up more than it needs."""
        workspace = self._watched(call)[1]
        samples: list[float] = []
        while not _enough(samples, deadline):
            samples += self._batch(call)
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

    def _batch(self, call: Callable[[], Any]) -> list[float]:
        """Seconds of some calls on the device, without the time in which it waits for the host.

        It is idle until the host has queued them all. Where the host was late, the time to do so is extended
        and the calls are made again; calls that themselves wait for the device are always late.
        """
        for longer in _LONGER:
            samples, late = self._queued(call, self._pause * longer)
            if not late:
                self._pause = min(_MOST_PAUSE, self._pause * longer)
                break
        return samples

    def _queued(self, call: Callable[[], Any], pause: int) -> tuple[list[float], bool]:
        """Seconds of some calls, and whether the device began with them before all of them were queued."""
        with torch.cuda.device(self.device):
            pairs = []
            getattr(torch.cuda, "_sleep", _no_pause)(pause)
            for _ in range(_BATCH):
                start, end = timing_event(), timing_event()
                start.record()
                result = call()
                end.record()
                del result
                pairs.append((start, end))
            late = bool(pairs[0][0].query())
            torch.cuda.synchronize(self.device)
        return [max(0.0, start.elapsed_time(end) * 1e-3 - self._nothing) for start, end in pairs], late


def _no_pause(cycles: int) -> None:
    """Where torch has no such kernel, short operators look as long as they take to issue."""


def _enough(samples: list[float], deadline: float) -> bool:
    return bool(samples) and (
        len(samples) >= MOST_REPEATS or sum(samples) >= REPEAT_SECONDS or time.perf_counter() >= deadline
    )
