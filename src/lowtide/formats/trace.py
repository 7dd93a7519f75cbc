"""Trace events, which Perfetto and Chrome's tracing page open: operators, copies, bytes as counters."""

from __future__ import annotations

import json
from typing import Any

from lowtide.cost import Span, Step
from lowtide.formats.base import Format, Written
from lowtide.formats.losses import Part, losses_of
from lowtide.graph import Category

__all__ = ["FORMAT", "write"]

_DEVICE, _HOST, _MEMORY = 1, 2, 3
_PROCESSES = {_DEVICE: "device", _HOST: "host", _MEMORY: "memory"}
_HELD = {  # what concerns tensors is lost with them, and said once
    Part.UPDATES,
    Part.PHASES,
    Part.NAMES,
    Part.ROLES,
    Part.SHAPES,
    Part.DTYPES,
    Part.ADDRESSES,
    Part.VIEWS,
    Part.SPANS,
    Part.SECONDS,
    Part.FLOP,
    Part.TRAFFIC,
    Part.WORKSPACES,
    Part.COPIES,
    Part.DEVICES,
    Part.SOURCES,
}


def write(step: Step) -> Written:
    """A complete event an operator and lane, and counters of the live bytes at each operator's start."""
    losses = [f"{len(step.graph.tensors)} tensors: only the bytes live at each operator are written"]
    losses += losses_of(step, _HELD)
    spans = step.spans
    if not spans:
        spans, notes = _made_up(step)
        losses += notes
    origin = min((span.start for span in spans), default=0.0)
    events = _metadata(spans, step)
    lanes = {name: k for k, name in enumerate(_lanes(spans, step))}
    for span in spans:
        events += _events(step, span, lanes, origin)
    if step.graph.ordered:
        events += _counters(step, spans, origin)
    else:
        losses.append("live bytes: this document does not say who reads what")
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": step.format}}
    return Written(json.dumps(document, allow_nan=False).encode() + b"\n", tuple(losses))


def _made_up(step: Step) -> tuple[tuple[Span, ...], list[str]]:
    """Spans one after another: as long as the operator's known time, else a microsecond."""
    spans: list[Span] = []
    clock, unknown = 0.0, 0
    for k, op in enumerate(step.graph.ops):
        cost = step.costs[k] if step.costs else None
        known = cost.seconds if cost else None
        unknown += known is None
        end = clock + (float(known.value) if known else 1e-6)
        spans.append(Span(k, op.device or "device", clock, clock, end))
        clock = end
    notes = [f"when the {len(spans)} operators ran: they are drawn one after another"]
    if unknown:
        notes.append(f"how long {unknown} of them took: each is drawn as one microsecond")
    return tuple(spans), notes


def _lane(step: Step, span: Span) -> str:
    copy = step.graph.ops[span.op].category is Category.COPY
    return f"{span.lane} copies" if copy else span.lane


def _lanes(spans: tuple[Span, ...], step: Step) -> list[str]:
    return list(dict.fromkeys(_lane(step, span) for span in spans))


def _metadata(spans: tuple[Span, ...], step: Step) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in _PROCESSES.items()
    ]
    lanes = {name: k for k, name in enumerate(_lanes(spans, step))}
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


def _counters(step: Step, spans: tuple[Span, ...], origin: float) -> list[dict[str, Any]]:
    live = step.lifetimes().live_bytes
    starts = {span.op: span.start for span in spans if not span.host}
    return [
        {
            "ph": "C",
            "name": "live bytes",
            "pid": _MEMORY,
            "ts": _nanoseconds(starts[k], origin) / 1000,
            "args": {"bytes": live[k]},
        }
        for k in range(len(live))
        if k in starts
    ]


FORMAT = Format(name="trace", title="trace events (Perfetto, Chrome)", write=write)
