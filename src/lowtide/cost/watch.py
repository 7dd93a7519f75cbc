"""What a step really takes: every allocation, on the CPU and on CUDA, while it runs.

On the CPU the allocator reports to PyTorch's recorder of events, in the order in which things happen; on CUDA
the caching allocator keeps its own counters. Neither changes what the step does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lowtide.cost.modes import Modes
from lowtide.device_internals import (
    profiler_runs,
    record_range,
    start_memory_recorder,
    stop_memory_recorder,
)

__all__ = ["Allocations", "CpuRecording", "Marker", "timing_event", "watch_cpu", "watch_cuda"]

T = TypeVar("T")
_PREFIX = "lowtide operator "
_INSIDE = "lowtide inside"
_CURVE = 4096
"""Figures that are kept of all that is watched."""


@dataclass(frozen=True, slots=True)
class Allocations:
    """Bytes above what was allocated when the watch began."""

    peak_bytes: int
    end_bytes: int
    operators: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """For each marked run of an operator: bytes before it, the most while it ran, bytes after it."""
    inside: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """For each marked run of an operator that runs others: the most until the first of these, and then the
    most from each of them to the next."""
    curve: tuple[int, ...] = ()
    """Bytes from allocation to allocation, thinned; on the CPU alone."""

    def workspace_bytes(self, op: int) -> int | None:
        """The most that a run of the operator took beyond what it left behind; None if it never ran."""
        runs = self.operators.get(op)
        return max(peak - max(before, after) for before, peak, after in runs) if runs else None


class Marker:
    """Marks operators for a watch: called before and after each one runs."""

    def before(self, op: int) -> None:
        """The operator is about to run."""

    def after(self, op: int) -> None:
        """The operator has run, or failed; what it dropped is not gone yet."""

    def left(self, results: Mapping[int, Any]) -> None:
        """What the operator that has run leaves behind, by tensor of the graph."""

    def inside(self) -> Marker | None:
        """A marker for what the running operator runs itself, as a loop does; None where nobody asks."""
        return None


class _CpuMarker(Marker):
    def __init__(self) -> None:
        self._open: Any = None

    def before(self, op: int) -> None:
        self._open = record_range(f"{_PREFIX}{op}")
        self._open.__enter__()

    def after(self, op: int) -> None:  # noqa: ARG002
        self._open.__exit__(None, None, None)

    def inside(self) -> Marker:
        return _InsideCpu()


class _InsideCpu(Marker):
    def before(self, op: int) -> None:  # noqa: ARG002
        with record_range(_INSIDE):
            pass

    def inside(self) -> Marker:
        return self


class CpuRecording:
    """Allocations on the CPU by this thread, from when it is made until it is stopped."""

    def __init__(self) -> None:
        start_memory_recorder()

    def stop(self) -> Allocations:
        """What was allocated meanwhile."""
        return _replay(event for events in stop_memory_recorder() for event in events)


def watch_cpu(function: Callable[[Marker], T]) -> tuple[T, Allocations]:
    """Run a function and report its allocations on the CPU, made by the thread that calls.

    A thread has one profiler at a time: where the user's is on, the function runs in a thread of its own.
    """
    if not profiler_runs():
        return _watched(function)
    modes = Modes()

    def run() -> tuple[T, Allocations]:
        with modes.in_a_thread():
            return _watched(function)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


def _watched(function: Callable[[Marker], T]) -> tuple[T, Allocations]:
    recording = CpuRecording()
    try:
        result = function(_CpuMarker())
    finally:
        taken = recording.stop()
    return result, taken


def _replay(events: Iterable[Any]) -> Allocations:
    """Live bytes followed from event to event; those inside a marked operator are the operator's."""
    live = peak = before = most = 0
    operators: dict[int, list[tuple[int, int, int]]] = {}
    inside: dict[int, list[tuple[int, ...]]] = {}
    open_ranges: list[int | None] = []
    seen = [0]
    curve: list[int] = []
    for event in events:
        kind = event.kind()
        if kind == "memory_alloc":
            live += event.cpu_memory_usage()
            peak, most, seen[-1] = max(peak, live), max(most, live), max(seen[-1], live)
            curve.append(live)
        elif kind == "push":
            name = event.name()
            op = int(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
            open_ranges.append(op)
            if op is not None:
                before = most = live
                seen = [live]
            elif name == _INSIDE:
                seen.append(live)
        elif kind == "pop" and open_ranges:
            op = open_ranges.pop()
            if op is not None:
                operators.setdefault(op, []).append((before, most, live))
                inside.setdefault(op, []).append(tuple(seen) if len(seen) > 1 else ())
    return Allocations(peak, live, operators, inside, _thinned(curve, _CURVE))


def _thinned(values: list[int], most: int) -> tuple[int, ...]:
    """The largest of each run of neighbours, so that at most so many are left."""
    each = max(1, -(-len(values) // most))
    return tuple(max(values[k : k + each]) for k in range(0, len(values), each))


def timing_event() -> Any:
    """An event of a CUDA stream that knows when it happened."""
    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=True)


class _CudaMarker(Marker):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = torch.cuda.memory_allocated(device)
        self.peak = 0
        self.operators: dict[int, list[tuple[int, int, int]]] = {}
        self.insides: dict[int, list[tuple[int, ...]]] = {}
        self._before = self._most = 0
        self._seen = [0]

    def before(self, op: int) -> None:  # noqa: ARG002
        self._take_peak()
        self._before = self._most = self._now()
        self._seen = [self._before]

    def after(self, op: int) -> None:
        self._take_peak()
        self.operators.setdefault(op, []).append((self._before, self._most, self._now()))
        self.insides.setdefault(op, []).append(tuple(self._seen) if len(self._seen) > 1 else ())

    def inside(self) -> Marker:
        return _InsideCuda(self)

    def next_inside(self) -> None:
        """Another operator runs inside of the one that is running."""
        self._take_peak()
        self._seen.append(self._now())

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self.device) - self.base

    def _take_peak(self) -> None:
        """Note the most since the last time, for all that is running."""
        most = torch.cuda.max_memory_allocated(self.device) - self.base
        self.peak, self._most = max(self.peak, most), max(self._most, most)
        self._seen[-1] = max(self._seen[-1], most)
        torch.cuda.reset_peak_memory_stats(self.device)


class _InsideCuda(Marker):
    def __init__(self, outer: _CudaMarker) -> None:
        self._outer = outer

    def before(self, op: int) -> None:  # noqa: ARG002
        self._outer.next_inside()

    def inside(self) -> Marker:
        return self


def watch_cuda(function: Callable[[Marker], T], device: torch.device) -> tuple[T, Allocations]:
    """Run a function and report its allocations on a CUDA device."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    marker = _CudaMarker(device)
    result = function(marker)
    torch.cuda.synchronize(device)
    peak = max(marker.peak, torch.cuda.max_memory_allocated(device) - marker.base)
    end = torch.cuda.memory_allocated(device) - marker.base
    return result, Allocations(peak, end, marker.operators, marker.insides)
