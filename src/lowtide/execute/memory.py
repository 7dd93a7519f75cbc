"""What a step really takes: every allocation, on the CPU and on CUDA, while it runs.

On the CPU the allocator reports to PyTorch's profiler; on CUDA the caching allocator keeps its own
counters. Neither changes what the step does.
"""

from __future__ import annotations

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is loaded: it would log each profile

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["Allocations", "Marker", "watch_cpu", "watch_cuda"]

T = TypeVar("T")
_PREFIX = "lowtide operator "


@dataclass(frozen=True, slots=True)
class Allocations:
    """Bytes above what was allocated when the watch began."""

    peak_bytes: int
    end_bytes: int
    operators: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """For each marked run of an operator: bytes before it, the most while it ran, bytes after it."""

    def workspace_bytes(self, op: int) -> int | None:
        """The most that a run of the operator took beyond what it left behind; None if it never ran."""
        runs = self.operators.get(op)
        return max(peak - max(before, after) for before, peak, after in runs) if runs else None


class Marker:
    """Marks operators for a watch: called before and after each one runs."""

    def before(self, op: int) -> None:
        """The operator is about to run."""

    def after(self, op: int) -> None:
        """The operator has run; what it dropped is not gone yet."""


class _CpuMarker(Marker):
    def __init__(self) -> None:
        self._open: Any = None

    def before(self, op: int) -> None:
        self._open = record_function(f"{_PREFIX}{op}")
        self._open.__enter__()

    def after(self, op: int) -> None:  # noqa: ARG002
        self._open.__exit__(None, None, None)


def watch_cpu(function: Callable[[Marker], T]) -> tuple[T, Allocations]:
    """Run a function and report its allocations on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as watched:
        result = function(_CpuMarker())
    assert watched.profiler is not None
    results = watched.profiler.kineto_results
    assert results is not None
    return result, _read_tree(results.experimental_event_tree())


def _read_tree(roots: Iterable[Any]) -> Allocations:
    changes: list[tuple[int, int, int | None]] = []
    marks: list[tuple[int, int, int]] = []
    kind = torch._C._profiler._EventType.Allocation
    for event in _walk(roots):
        if event.tag == kind:
            if event.extra_fields.device.type == "cpu":
                changes.append((event.start_time_ns, event.extra_fields.alloc_size, None))
        elif event.name.startswith(_PREFIX):
            marks.append((event.start_time_ns, event.end_time_ns, int(event.name.removeprefix(_PREFIX))))
    return _replay(sorted(changes), sorted(marks))


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack += event.children


def _replay(changes: list[tuple[int, int, int | None]], marks: list[tuple[int, int, int]]) -> Allocations:
    live = peak = position = 0
    operators: dict[int, list[tuple[int, int, int]]] = {}

    def advance(until: int | None) -> int:
        nonlocal live, peak, position
        most = live
        while position < len(changes) and (until is None or changes[position][0] < until):
            live += changes[position][1]
            most = max(most, live)
            position += 1
        peak = max(peak, most)
        return most

    for start, end, op in marks:
        advance(start)
        before = live
        most = advance(end)
        operators.setdefault(op, []).append((before, most, live))
    advance(None)
    return Allocations(peak, live, operators)


class _CudaMarker(Marker):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = torch.cuda.memory_allocated(device)
        self.peak = 0
        self.operators: dict[int, list[tuple[int, int, int]]] = {}
        self._before = 0

    def before(self, op: int) -> None:  # noqa: ARG002
        self._take_peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device) - self.base

    def after(self, op: int) -> None:
        most = torch.cuda.max_memory_allocated(self.device) - self.base
        now = torch.cuda.memory_allocated(self.device) - self.base
        self.operators.setdefault(op, []).append((self._before, most, now))
        self._take_peak()

    def _take_peak(self) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - self.base)


def watch_cuda(function: Callable[[Marker], T], device: torch.device) -> tuple[T, Allocations]:
    """Run a function and report its allocations on a CUDA device."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    marker = _CudaMarker(device)
    result = function(marker)
    torch.cuda.synchronize(device)
    peak = max(marker.peak, torch.cuda.max_memory_allocated(device) - marker.base)
    end = torch.cuda.memory_allocated(device) - marker.base
    return result, Allocations(peak, end, marker.operators)
