"""A graph as the last value of a notebook's cell: what it is made of, and its memory in program order."""

from __future__ import annotations

from collections import Counter

from lowtide.graph.liveness import liveness
from lowtide.graph.timeline import Timeline
from lowtide.graph.types import Graph, Phase
from lowtide.notebook import Curve, curves_svg, shown_html
from lowtide.units import format_bytes

__all__ = ["graph_html"]

_KINDS = 5


def graph_html(graph: Graph, timeline: Timeline | None = None, *, title: str = "") -> str:
    """The summary and the curve; of a measured ``timeline`` where one fits, else of program order."""
    if timeline is None or len(timeline.live_bytes) != len(graph.ops):
        timeline = liveness(graph) if graph.ordered and graph.ops else None
    phases = Counter(op.phase for op in graph.ops)
    kinds = Counter(op.kind for op in graph.ops).most_common()
    sizes: Counter[str] = Counter()
    for tensor in graph.tensors:
        sizes[tensor.role.value] += tensor.bytes if tensor.alias is None else 0
    more = f" and {len(kinds) - _KINDS} more kinds" if len(kinds) > _KINDS else ""
    rows = [
        (
            "operators",
            ", ".join(f"{phases[phase]} {phase.value}" for phase in Phase if phases[phase]) or "none",
        ),
        ("kinds", ", ".join(f"{count} {kind}" for kind, count in kinds[:_KINDS]) + more),
        (
            "tensors",
            ", ".join(f"{role} {format_bytes(size)}" for role, size in sizes.most_common()) or "none",
        ),
    ]
    picture = ""
    if timeline is not None and timeline.peak_step is not None:
        op = graph.ops[timeline.peak_step]
        rows.append(("peak", f"{format_bytes(timeline.peak_bytes)} at {op.label} ({op.phase.value})"))
        live = timeline.live_at(timeline.peak_step)[:3]
        rows.append(
            (
                "live there",
                ", ".join(f"{graph.tensors[o.tensor].label} {format_bytes(o.bytes)}" for o in live),
            )
        )
        picture = curves_svg([Curve("live bytes by operator", timeline.live_bytes)])
    else:
        rows.append(("peak", "not known: the document does not say who reads what"))
    return shown_html(title or graph.name or "Graph", rows, picture)
