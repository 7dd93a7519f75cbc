"""When each operator of a step ran: spans on the device, and of the thread that issues the work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.cost.types import Span
from lowtide.cost.watch import Marker, timing_event
from lowtide.graph import Graph

__all__ = ["record"]

_HOST = "host"


def record(graph: Graph, run: Callable[[Marker], object]) -> tuple[Span, ...]:
    """Two spans an operator, in seconds since the first began: on its device, and on the host.

    ``run`` runs the step once and tells the marker before and after each operator. On a CPU both spans are
    the same; on CUDA the device's begins when the operator could have run: issued, and the one before done.
    """
    recorder = _Recorder(graph)
    run(recorder)
    return recorder.spans()


@dataclass(slots=True)
class _Seen:
    """One run of an operator: the host's clock, and events of the device where it has its own."""

    op: int
    start: float
    end: float = 0.0
    events: tuple[Any, Any] | None = None


class _Recorder(Marker):
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._devices = [torch.device(op.device or "cpu") for op in graph.ops]
        self._seen: list[_Seen] = []
        self._bases = {device: self._base(device) for device in set(self._devices) if device.type == "cuda"}

    def before(self, op: int) -> None:
        device = self._devices[op]
        events = (timing_event(), timing_event()) if device.type == "cuda" else None
        seen = _Seen(op, time.perf_counter(), events=events)
        if seen.events is not None:
            seen.events[0].record(torch.cuda.current_stream(device))
        self._seen.append(seen)

    def after(self, op: int) -> None:
        seen = self._seen[-1]
        if seen.events is not None:
            seen.events[1].record(torch.cuda.current_stream(self._devices[op]))
        seen.end = time.perf_counter()

    def spans(self) -> tuple[Span, ...]:
        for device in self._bases:
            torch.cuda.synchronize(device)
        origin = self._seen[0].start if self._seen else 0.0
        found: list[Span] = []
        free: dict[torch.device, float] = {}
        for seen in self._seen:
            device = self._devices[seen.op]
            kern, end = self._on_device(seen)
            start = min(kern, max(seen.start, free.get(device, 0.0)))
            free[device] = end
            lane = self.graph.ops[seen.op].device or "cpu"
            found.append(Span(seen.op, lane, start - origin, kern - origin, end - origin))
            host = seen.start - origin
            found.append(Span(seen.op, _HOST, host, host, seen.end - origin, host=True))
        return tuple(found)

    def _on_device(self, seen: _Seen) -> tuple[float, float]:
        """When it began and ended there, by the host's clock."""
        if seen.events is None:
            return seen.start, seen.end
        event, host = self._bases[self._devices[seen.op]]
        kern, end = (host + event.elapsed_time(other) * 1e-3 for other in seen.events)
        return kern, max(kern, end)

    @staticmethod
    def _base(device: torch.device) -> tuple[Any, float]:
        """An event and the host's time at which it happened."""
        torch.cuda.synchronize(device)
        event = timing_event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        return event, time.perf_counter()
