"""Allocations in a trace of ``torch.profiler``: which operator made each, and which last held it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from lowtide.formats.pytorch.profiler_events import Thread, TraceEvent

__all__ = ["Allocated", "HeldMemory", "allocations"]

_CPU, _CUDA = 0, 1


@dataclass(slots=True)
class HeldMemory:
    """Memory from when it was allocated until it was freed; operators by their position."""

    address: int
    bytes: int
    first: int
    """-1: it was there before."""
    last: int | None = None
    """None: it was there at the end."""


@dataclass(slots=True)
class Allocated:
    """What was allocated on one device."""

    device: str = ""
    held: list[HeldMemory] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)
    """What was there before; then the most from the start of each operator to the start of the next."""


class _Places:
    """Which operator runs at some time: on a thread, or the last one that has started anywhere."""

    def __init__(self, spans: Sequence[tuple[Thread, float, float]]) -> None:
        self._starts = [start for _, start, _ in spans]
        self._threads: dict[Thread, tuple[list[float], list[int]]] = {}
        self._ends = [end for _, _, end in spans]
        for k, (thread, start, _) in enumerate(spans):
            starts, ops = self._threads.setdefault(thread, ([], []))
            starts.append(start)
            ops.append(k)

    def running(self, thread: Thread, time: float) -> int:
        """The operator that runs on the thread, else the last that has started; -1 before the first."""
        starts, ops = self._threads.get(thread, ([], []))
        at = bisect_right(starts, time) - 1
        if at >= 0 and time <= self._ends[ops[at]]:
            return ops[at]
        return self.started(time)

    def started(self, time: float) -> int:
        """The last operator that has started."""
        return bisect_right(self._starts, time) - 1


def allocations(
    events: Sequence[TraceEvent], spans: Sequence[tuple[Thread, float, float]]
) -> Allocated | None:
    """What was allocated on the device that the trace is about; None where memory was not recorded.

    ``spans`` are the threads and times of operators in the order in which they start.
    """
    chosen = _of_one_device([event for event in events if _is_about_memory(event)])
    if not chosen:
        return None
    chosen.sort(key=lambda event: event.ts)
    places = _Places(spans)
    found = Allocated(_device(chosen[0]), live_bytes=[0] * (len(spans) + 1))
    live: dict[int, HeldMemory] = {}
    changes: list[tuple[int, int]] = []
    for event in chosen:
        address, size = event.whole("Addr") or 0, event.whole("Bytes") or 0
        at = places.running(event.thread, event.ts)
        if size > 0:
            live[address] = HeldMemory(address, size, at)
            found.held.append(live[address])
        else:
            one = live.pop(address, None)
            if one is None:
                one = HeldMemory(address, -size, -1)
                found.held.append(one)
            one.last = max(at, one.first)
        changes.append((places.started(event.ts), size))
    before = sum(one.bytes for one in found.held if one.first < 0 and one.last is not None)
    rest = (chosen[0].whole("Total Allocated") or 0) - (chosen[0].whole("Bytes") or 0) - before
    if rest > 0:
        found.held.append(HeldMemory(0, rest, -1))
    _follow(found, changes, before + max(0, rest))
    return found


def _follow(found: Allocated, changes: Sequence[tuple[int, int]], live: int) -> None:
    """The most that is live while each operator is the last that has started."""
    most, position = found.live_bytes, 0
    most[0] = live
    for at, size in changes:
        while position < at + 1:
            position += 1
            most[position] = live
        live += size
        most[position] = max(most[position], live)
    for k in range(position + 1, len(most)):
        most[k] = live


def _is_about_memory(event: TraceEvent) -> bool:
    return event.name == "[memory]" and bool(event.whole("Bytes")) and event.whole("Addr") is not None


def _of_one_device(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Those of the GPU with the most allocations; of the CPU only where there is no GPU."""
    kinds: dict[str, list[TraceEvent]] = {}
    for event in events:
        kinds.setdefault(_device(event), []).append(event)
    gpus = {name: found for name, found in kinds.items() if name != "cpu"} or kinds
    return max(gpus.values(), key=len, default=[])


def _device(event: TraceEvent) -> str:
    kind = event.whole("Device Type")
    if kind in (None, _CPU):
        return "cpu"
    return f"{'cuda' if kind == _CUDA else f'device type {kind}'}:{event.whole('Device Id')}"
