"""What of a step a target format cannot hold, said in words."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator

from lowtide.cost import Step
from lowtide.graph import Category, Op, Phase, Role, Tensor

__all__ = ["Part", "losses_of"]


class Part(enum.Enum):
    """A part of a step that some formats have a place for and others do not."""

    NAMES = "names of operators and tensors"
    ROLES = "tensors that are no activations: their roles"
    PHASES = "operators after the forward phase: their phases"
    SHAPES = "shapes"
    DTYPES = "types of values"
    DEVICES = "devices"
    ADDRESSES = "addresses"
    VIEWS = "views that share storage"
    BOXES = "boxes"
    PORTS = "names of ports"
    SHAPE_ONLY = "inputs marked as asked for their shape only"
    CONTROL = "control inputs"
    KERNELS = "kernels"
    COPIES = "copies between devices"
    UPDATES = "operators of the update phase"
    SECONDS = "times of operators"
    FLOP = "FLOP figures"
    TRAFFIC = "bytes moved"
    WORKSPACES = "workspaces"
    SPANS = "spans of the profile"
    SOURCES = "source lines"
    NOTES = "notes of the reader"
    TIMELINE = "steps of the measured timeline"
    EXTRAS = "operators and tensors with attributes of their own"


def _items(step: Step) -> Iterator[Tensor | Op]:
    yield from step.graph.tensors
    yield from step.graph.ops


_CAPTURED = ("random", "once", "updates", "short", "differentiates", "axes", "overload", "options", "strides")
"""Fields of an operator that captured steps alone have; ``arguments`` besides."""


def _has_more(item: Tensor | Op) -> bool:
    """Whether there is something that no other part of the step is."""
    if isinstance(item, Op) and (item.arguments is not None or any(getattr(item, k) for k in _CAPTURED)):
        return True
    return bool(item.attributes)


_COUNT: dict[Part, Callable[[Step], int]] = {
    Part.NAMES: lambda s: sum(bool(x.name) for x in _items(s)),
    Part.ROLES: lambda s: sum(t.role is not Role.ACTIVATION for t in s.graph.tensors),
    Part.PHASES: lambda s: sum(op.phase is not Phase.FORWARD for op in s.graph.ops),
    Part.SHAPES: lambda s: sum(t.shape is not None for t in s.graph.tensors),
    Part.DTYPES: lambda s: sum(t.dtype is not None for t in s.graph.tensors),
    Part.DEVICES: lambda s: sum(bool(op.device) for op in s.graph.ops),
    Part.ADDRESSES: lambda s: sum(t.address is not None for t in s.graph.tensors),
    Part.VIEWS: lambda s: sum(t.alias is not None for t in s.graph.tensors),
    Part.BOXES: lambda s: sum(len(x.boxes) for x in _items(s)),
    Part.PORTS: lambda s: sum(bool(op.input_ports or op.output_ports) for op in s.graph.ops),
    Part.SHAPE_ONLY: lambda s: sum(len(op.shape_only) for op in s.graph.ops),
    Part.CONTROL: lambda s: sum(len(op.after) for op in s.graph.ops),
    Part.KERNELS: lambda s: sum(len(op.kernels) for op in s.graph.ops),
    Part.COPIES: lambda s: sum(op.category is Category.COPY for op in s.graph.ops),
    Part.UPDATES: lambda s: sum(op.phase is Phase.UPDATE for op in s.graph.ops),
    Part.SECONDS: lambda s: sum(c.seconds is not None for c in s.costs),
    Part.FLOP: lambda s: sum(c.flop is not None for c in s.costs),
    Part.TRAFFIC: lambda s: sum(c.bytes_moved is not None for c in s.costs),
    Part.WORKSPACES: lambda s: sum(c.workspace_bytes is not None for c in s.costs),
    Part.SPANS: lambda s: len(s.spans),
    Part.SOURCES: lambda s: sum(x.source is not None for x in _items(s)),
    Part.NOTES: lambda s: len(s.notes),
    Part.TIMELINE: lambda s: len(s.timeline.live_bytes) if s.timeline else 0,
    Part.EXTRAS: lambda s: sum(_has_more(x) for x in _items(s)),
}


def losses_of(step: Step, holds: Collection[Part]) -> tuple[str, ...]:
    """One phrase for each part that the step has and the format does not hold, with how many there are."""
    counts = ((part, _COUNT[part](step)) for part in Part if part not in holds)
    return tuple(f"{count} {part.value}" for part, count in counts if count)
