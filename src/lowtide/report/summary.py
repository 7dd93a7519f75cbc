"""The summary of a step: one view object for the terminal and for ``--json``.

Every figure is in the key that docs/commands.md describes; what is not known is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lowtide.cost import NoteKind, Origin, Step
from lowtide.formats.base import Format
from lowtide.graph import RESIDENT_ROLES, Category, Graph, Phase, Role, Timeline
from lowtide.report.curve import thin
from lowtide.report.rows import Row, rows_by_name

__all__ = ["summarise"]

_LISTED = 10
"""How many tensors and operators a summary names."""

_PEAK_KEYS = ("bytes", "op", "phase", "number", "every_input_bytes", "live_count", "live")

Json = dict[str, Any]


def summarise(step: Step, format_: Format, facts_of: Format) -> Json:
    """Plain JSON values, keys in the order they are shown.

    ``facts_of`` is the format that the step first came from: it knows counts that no other format has.
    """
    graph = step.graph
    timeline = _timeline(step)
    facts = facts_of.facts(step) if facts_of.facts else {}
    rows = rows_by_name(step)
    return {
        "format": format_.name,
        "origin": facts_of.name,
        "ops": _phases(graph),
        "kinds": _count(op.kind for op in graph.ops),
        "tensors": _tensors(graph),
        "peak": _peak(step, timeline),
        "after_forward_bytes": _after_forward(graph, timeline),
        **_flop(step),
        "traffic_bytes": _traffic(step),
        "seconds": _seconds(step),
        "addresses": _addresses(step, timeline),
        "transposes": _moved(step, Category.LAYOUT),
        "host_copies": _moved(step, Category.COPY),
        "repairs": _repairs(step) if facts_of.name == "dataflow" else None,
        "tiles": facts.get("tiles", {"count": None, "mismatches": None, "elements": None}),
        "largest": [row.as_json() for row in _top(rows, "bytes")],
        "slowest": [row.as_json() for row in _top(rows, "seconds")],
        "curve": thin(timeline.live_bytes) if timeline else None,
        "estimated": _estimated(step),
        "document": {key: value for key, value in facts.items() if key not in ("tiles", "repairs")},
        "notes": [
            {"kind": n.kind.value, "line": n.line, "text": n.text, "before": n.before, "after": n.after}
            for n in step.notes
            if n.kind is not NoteKind.REPAIR
        ],
    }


def _timeline(step: Step) -> Timeline | None:
    """What was measured, where the file says it of every operator; else what follows from the graph."""
    graph = step.graph
    if step.timeline is not None and len(step.timeline.live_bytes) == len(graph.ops) > 0:
        return step.timeline
    return step.lifetimes() if graph.ordered and graph.ops else None


def _phases(graph: Graph) -> dict[str, int]:
    counts = Counter(op.phase for op in graph.ops)
    return {phase.value: counts[phase] for phase in Phase if counts[phase]}


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _tensors(graph: Graph) -> Json:
    sizes: Counter[str] = Counter()
    storages: Counter[str] = Counter()
    for tensor in graph.tensors:
        sizes[tensor.role.value] += tensor.bytes
        storages[tensor.role.value] += tensor.bytes if tensor.alias is None else 0
    gradients = sum(t.role is Role.GRADIENT for t in graph.tensors)
    return {
        "count": len(graph.tensors) - gradients,
        "gradients": gradients,
        "bytes": dict(sizes.most_common()),
        "storage_bytes": dict(storages.most_common()),
    }


def _peak(step: Step, timeline: Timeline | None) -> Json:
    if timeline is None or timeline.peak_step is None:
        return dict.fromkeys(_PEAK_KEYS)
    graph, at = step.graph, timeline.peak_step
    op = graph.ops[at]
    live = timeline.live_at(at)
    shown = [
        {
            "tensor": graph.tensors[one.tensor].label,
            "id": graph.tensors[one.tensor].id,
            "bytes": one.bytes,
            "role": graph.tensors[one.tensor].role.value,
            "from": _producer(graph, one.tensor),
        }
        for one in live[:_LISTED]
    ]
    return {
        "bytes": timeline.peak_bytes,
        "op": op.label,
        "phase": op.phase.value,
        "number": sum(other.phase is op.phase for other in graph.ops[: at + 1]),
        "every_input_bytes": step.lifetimes(every_input=True).peak_bytes,
        "live_count": len(live),
        "live": shown,
    }


def _producer(graph: Graph, tensor: int) -> str | None:
    if graph.tensors[tensor].role in RESIDENT_ROLES:
        return None  # it was there before the step
    return next((op.label for op in graph.ops if tensor in op.outputs), None)


def _after_forward(graph: Graph, timeline: Timeline | None) -> int | None:
    phases = [op.phase for op in graph.ops]
    if timeline is None or Phase.BACKWARD not in phases or Phase.FORWARD not in phases:
        return None
    first_backward = phases.index(Phase.BACKWARD)
    return timeline.bytes_between(first_backward - 1) if first_backward else None


def _flop(step: Step) -> Json:
    """``flop`` is the forward pass's, as the size of a network is quoted; all phases stand beside it."""
    phases: Counter[str] = Counter()
    for op, cost in zip(step.graph.ops, step.costs, strict=False):
        if cost.flop is not None:
            phases[op.phase.value] += int(cost.flop.value)
    return {"flop": phases.get("forward"), "flop_by_phase": dict(phases) or None}


def _estimated(step: Step) -> list[str]:
    """Which of ``flop`` and ``seconds`` were computed from shapes, neither measured nor read from a file."""
    names = {"flop": [c.flop for c in step.costs], "seconds": [c.seconds for c in step.costs]}
    return [
        name
        for name, figures in names.items()
        if any(figure is not None and figure.origin is Origin.ESTIMATED for figure in figures)
    ]


def _traffic(step: Step) -> int | None:
    """Bytes read and written by operators, estimates left out; copies between devices are counted apart."""
    known = [
        int(cost.bytes_moved.value)
        for op, cost in zip(step.graph.ops, step.costs, strict=False)
        if cost.bytes_moved is not None
        and cost.bytes_moved.origin is not Origin.ESTIMATED
        and op.category is not Category.COPY
    ]
    return sum(known) if known else None


def _seconds(step: Step) -> Json:
    device = [span for span in step.spans if not span.host]
    host = [span for span in step.spans if span.host]
    known = [float(cost.seconds.value) for cost in step.costs if cost.seconds is not None]
    running = sum(span.running for span in device) if device else (sum(known) if known else None)
    return {
        "device": running,
        "wait": sum(span.waiting for span in device) if device else None,
        "span": max(s.end for s in device) - min(s.start for s in device) if device else None,
        "host_span": max(s.end for s in host) - min(s.start for s in host) if host else None,
    }


def _addresses(step: Step, timeline: Timeline | None) -> Json:
    """How many distinct bytes the values of the step touched, and how many they needed at once."""
    tensors = step.graph.tensors
    placed = [t for t in tensors if t.address is not None and t.role not in RESIDENT_ROLES]
    if not placed or timeline is None:
        return {"touched_bytes": None, "live_bytes": None, "fragmentation": None}
    touched, end = 0, -1
    for start, stop in sorted((t.address or 0, (t.address or 0) + t.bytes) for t in placed):
        touched += max(0, stop - max(start, end))
        end = max(end, stop)
    live = _live_at_most(step, timeline)
    return {
        "touched_bytes": touched,
        "live_bytes": live,
        "fragmentation": touched / live - 1 if live else None,
    }


def _live_at_most(step: Step, timeline: Timeline) -> int:
    change = [0] * (len(step.graph.ops) + 1)
    for one in timeline.lifetimes:
        tensor = step.graph.tensors[one.tensor]
        if tensor.address is not None and tensor.role not in RESIDENT_ROLES:
            change[one.first] += one.bytes
            change[one.last + 1] -= one.bytes
    most = live = 0
    for delta in change:
        live += delta
        most = max(most, live)
    return most


def _moved(step: Step, category: Category) -> Json:
    count = total = 0
    for k, op in enumerate(step.graph.ops):
        if op.category is not category:
            continue
        count += 1
        cost = step.costs[k] if step.costs else None
        if category is Category.COPY and cost and cost.bytes_moved is not None:
            total += int(cost.bytes_moved.value)
        else:
            total += sum(step.graph.tensors[t].bytes for t in op.outputs)
    return {"count": count, "bytes": total}


def _repairs(step: Step) -> list[Json]:
    return [
        {"line": note.line, "before": note.before, "after": note.after, "why": note.text}
        for note in step.notes
        if note.kind is NoteKind.REPAIR
    ]


def _top(rows: list[Row], key: str) -> list[Row]:
    known = [row for row in rows if getattr(row, key)]
    return sorted(known, key=lambda row: -getattr(row, key))[:_LISTED]
