"""Trace events, which Perfetto and Chrome's tracing page open.

device   gpu0            ▐conv▌▐relu▌ ▐conv▌     a lane for computation
         gpu0 copies           ▐to▌              lanes for copies, one for each direction
host     interpreter     ▐▌▐▌▐▌                  threads that issue work
memory   live bytes      ▂▄▄▆▆▇▇▅                counters: all bytes, and bytes by role
         conv1           ▐═════════▌             a track for each tensor, from its first to its last operator
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from lowtide.cost import Span, Step
from lowtide.formats.base import Format, Written
from lowtide.formats.losses import Part, losses_of
from lowtide.graph import Category, Lifetime, Op, Role, Timeline

__all__ = ["FORMAT", "write"]

MAX_TRACKS = 2000
"""More tracks than this do not help anybody: the largest tensors have one."""
_DIRECTIONS = ((re.compile(r"DtoH", re.I), "to the host"), (re.compile(r"HtoD", re.I), "to the device"))
_FIRST_LANE = 100
_DEVICE, _HOST, _MEMORY = 1, 2, 3
_PROCESSES = {_DEVICE: "device", _HOST: "host", _MEMORY: "memory"}
_HELD = {
    Part.UPDATES,
    Part.PHASES,
    Part.NAMES,
    Part.ROLES,
    Part.SHAPES,
    Part.DTYPES,
    Part.ADDRESSES,
    Part.SPANS,
    Part.SECONDS,
    Part.FLOP,
    Part.TRAFFIC,
    Part.WORKSPACES,
    Part.COPIES,
    Part.DEVICES,
    Part.SOURCES,
    Part.TIMELINE,
}


def write(step: Step) -> Written:
    """A complete event an operator and lane, counters of the live bytes, and a track for each tensor."""
    losses = list(losses_of(step, _HELD))
    spans = step.spans
    if not spans:
        spans, notes = _made_up(step)
        losses += notes
    origin = min((span.start for span in spans), default=0.0)
    events = _metadata(spans, step)
    lanes = _lanes(spans, step)
    for span in spans:
        events += _events(step, span, lanes, origin)
    timeline = _timeline(step)
    if timeline is None:
        losses.append(f"{len(step.graph.tensors)} tensors: this document does not say who reads what")
    else:
        times = _times(spans, len(step.graph.ops))
        events += _counters(step, timeline, times, origin)
        tracks = sorted(timeline.lifetimes, key=lambda one: -one.bytes)[:MAX_TRACKS]
        events += [event for one in tracks for event in _lifetime(step, one, times, origin)]
        left = len(timeline.lifetimes) - len(tracks)
        if left:
            losses.append(f"{left} small tensors: the {MAX_TRACKS} largest have a track of their own")
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": step.format}}
    return Written(json.dumps(document, allow_nan=False).encode() + b"\n", tuple(losses))


def _made_up(step: Step) -> tuple[tuple[Span, ...], list[str]]:
    """Spans one after another: as long as the operator's known time, else a microsecond."""
    spans: list[Span] = []
    clock, unknown = 0.0, 0
    measured = step.timeline.seconds if step.timeline is not None else ()
    measured = measured if len(measured) == len(step.graph.ops) else ()
    for k, op in enumerate(step.graph.ops):
        cost = step.costs[k] if step.costs else None
        known = float(cost.seconds.value) if cost and cost.seconds else measured[k] if measured else None
        unknown += known is None
        end = clock + (1e-6 if known is None else known)
        spans.append(Span(k, op.device or "device", clock, clock, end))
        clock = end
    notes = [f"when the {len(spans)} operators ran: they are drawn one after another"]
    if unknown:
        notes.append(f"how long {unknown} of them took: each is drawn as one microsecond")
    return tuple(spans), notes


def _lane(step: Step, span: Span) -> str:
    op = step.graph.ops[span.op]
    if op.category is not Category.COPY or span.host:
        return span.lane
    return f"{span.lane} copies {_direction(op)}".rstrip()


def _direction(op: Op) -> str:
    said = " ".join((op.kind, op.name, *(kernel.name for kernel in op.kernels)))
    return next((words for pattern, words in _DIRECTIONS if pattern.search(said)), "")


def _lanes(spans: tuple[Span, ...], step: Step) -> dict[str, int]:
    """The number of each lane; Perfetto takes 0, and the number of the process, for something else."""
    names = dict.fromkeys(_lane(step, span) for span in spans)
    return {name: _FIRST_LANE + k for k, name in enumerate(names)}


def _metadata(spans: tuple[Span, ...], step: Step) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in _PROCESSES.items()
    ]
    lanes = _lanes(spans, step)
    for pid, lane in dict.fromkeys((_HOST if s.host else _DEVICE, _lane(step, s)) for s in spans):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": lanes[lane], "args": {"name": lane}}
        )
    return events


def _events(step: Step, span: Span, lanes: dict[str, int], origin: float) -> list[dict[str, Any]]:
    op = step.graph.ops[span.op]
    place = {"pid": _HOST if span.host else _DEVICE, "tid": lanes[_lane(step, span)], "ph": "X"}
    args: dict[str, Any] = {"kind": op.kind, "phase": op.phase.value}
    if op.source:
        args["source"] = f"{op.source.file}:{op.source.line}"
    if step.costs:
        cost = step.costs[span.op]
        for name in ("flop", "bytes_moved", "workspace_bytes"):
            figure = getattr(cost, name)
            if figure is not None:
                args[name] = figure.value
    events = []
    if span.waiting > 0:
        events.append({**place, "name": "waiting", "cat": "wait"} | _interval(span.start, span.kern, origin))
    running = {**place, "name": op.label, "cat": op.category.value, "args": args}
    events.append(running | _interval(span.kern, span.end, origin))
    return events


def _interval(start: float, end: float, origin: float) -> dict[str, float]:
    """Microseconds on a grid of nanoseconds: what ends where the next starts must not overlap it."""
    first, last = _nanoseconds(start, origin), _nanoseconds(end, origin)
    return {"ts": first / 1000, "dur": (last - first) / 1000}


def _nanoseconds(time: float, origin: float) -> int:
    return round((time - origin) * 1e9)


def _timeline(step: Step) -> Timeline | None:
    """What was measured, where it is known of every operator; else what follows from the graph."""
    if step.timeline is not None and len(step.timeline.live_bytes) == len(step.graph.ops):
        return step.timeline
    return step.lifetimes() if step.graph.ordered else None


def _times(spans: Sequence[Span], ops: int) -> list[tuple[float, float]]:
    """From when to when each operator runs: on the device, or on the host where it has no time there.

    One without any, as those that stand for memory from before the recording, lies between its neighbours.
    """
    found: dict[int, tuple[float, float]] = {}
    on_device = {span.op for span in spans if not span.host}
    for span in spans:
        if not span.host or span.op not in on_device:
            start, end = found.get(span.op, (span.start, span.end))
            found[span.op] = min(start, span.start), max(end, span.end)
    clock = found[min(found)][0] if found else 0.0
    times = []
    for k in range(ops):
        times.append(found.get(k, (clock, clock)))
        clock = times[-1][1]
    return times


def _counters(
    step: Step, timeline: Timeline, times: Sequence[tuple[float, float]], origin: float
) -> Iterator[dict[str, Any]]:
    """Perfetto names a counter by its event and the key of its value: ``live bytes``, ``live activation``."""
    roles = _by_role(step, timeline)
    for k, (start, _) in enumerate(times):
        values = {"bytes": timeline.live_bytes[k]} | {role: live[k] for role, live in roles.items()}
        at = _nanoseconds(start, origin) / 1000
        yield {"ph": "C", "name": "live", "pid": _MEMORY, "ts": at, "args": values}


def _by_role(step: Step, timeline: Timeline) -> dict[str, list[int]]:
    """The live bytes of each role; nothing where there is only one."""
    steps = len(timeline.live_bytes)
    change: dict[Role, list[int]] = {}
    for one in timeline.lifetimes:
        role = step.graph.tensors[one.tensor].role
        if role not in change:
            change[role] = [0] * (steps + 1)
        change[role][one.first] += one.bytes
        change[role][one.last + 1] -= one.bytes
    if len(change) < 2:
        return {}
    return {role.value: list(accumulate(row[:steps])) for role, row in change.items()}


def _lifetime(
    step: Step, one: Lifetime, times: Sequence[tuple[float, float]], origin: float
) -> Iterator[dict[str, Any]]:
    """The beginning and the end of a tensor's memory, on a track of its own."""
    tensor = step.graph.tensors[one.tensor]
    args: dict[str, Any] = {"bytes": one.bytes, "role": tensor.role.value}
    if tensor.shape is not None:
        args["shape"] = "x".join(map(str, tensor.shape)) + f" {tensor.dtype or ''}".rstrip()
    if tensor.address is not None:
        args["address"] = tensor.address
    if tensor.source:
        args["source"] = f"{tensor.source.file}:{tensor.source.line}"
    start = times[one.first][0]
    end = max(start, times[one.last][1])
    key = {"local": f"t{one.tensor}"}  # a track of this process
    place = {"cat": "lifetime", "name": tensor.label, "id2": key, "pid": _MEMORY, "tid": 0}
    yield {**place, "ph": "b", "ts": _nanoseconds(start, origin) / 1000, "args": args}
    yield {**place, "ph": "e", "ts": _nanoseconds(end, origin) / 1000}


FORMAT = Format(name="trace", title="trace events (Perfetto, Chrome)", write=write)
