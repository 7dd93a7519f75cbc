"""Says whether the figures of a step fit its graph."""

from __future__ import annotations

from lowtide.cost.step import Step
from lowtide.errors import GraphError
from lowtide.graph import MAX_BYTES, Timeline, validate

__all__ = ["MAX_FIGURE", "MAX_SECONDS", "validate_step"]

MAX_SECONDS = 1e12
MAX_FIGURE = 10**21
"""No operator takes longer than 30,000 years or a zettaFLOP: such a figure is a damaged one."""


def validate_step(step: Step) -> Step:
    """Return the step itself, or raise a GraphError that names the first contradiction."""
    validate(step.graph)
    ops = len(step.graph.ops)
    if step.costs and len(step.costs) != ops:
        raise GraphError(f"there are {len(step.costs)} costs for {ops} operators")
    for k, cost in enumerate(step.costs):
        limits = (
            (cost.seconds, MAX_SECONDS),
            *((figure, MAX_SECONDS) for figure in cost.short_seconds.values()),
            (cost.flop, MAX_FIGURE),
            (cost.bytes_moved, MAX_FIGURE),
        )
        for figure, limit in (*limits, (cost.workspace_bytes, MAX_BYTES)):
            if figure is not None and not 0 <= figure.value <= limit:
                raise GraphError(f"a cost of operator {k} is {figure.value}", op=k)
    for span in step.spans:
        if not 0 <= span.op < ops:
            raise GraphError(f"a span belongs to operator {span.op}; the graph has {ops}")
        if not -MAX_SECONDS <= span.start <= span.kern <= span.end <= MAX_SECONDS:
            raise GraphError(f"the span of operator {span.op} has times out of order", op=span.op)
    if step.timeline is not None:
        _timeline(step.timeline, len(step.graph.tensors))
    return step


def _timeline(timeline: Timeline, tensors: int) -> None:
    steps = len(timeline.live_bytes)
    for what, values in (("seconds", timeline.seconds), ("workspaces", timeline.workspace_bytes)):
        if values and len(values) != steps:
            raise GraphError(f"the timeline has {len(values)} {what} for {steps} steps")
    for one in timeline.lifetimes:
        if not (0 <= one.first <= one.last < steps and 0 <= one.tensor < tensors and one.bytes >= 0):
            raise GraphError(f"the lifetime of tensor {one.tensor} lies outside the timeline")
