"""ShardPlan: how a step is split over devices, what that takes, and what was measured, as a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Literal

import msgspec

from lowtide.errors import GraphError, PlanError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Phase, Rect, Tensor, check_fields, validate
from lowtide.graph.shards import Cut, Shards, box_of
from lowtide.plan.check.graph import sound
from lowtide.plan.result.plan import Plan, Side
from lowtide.plan.result.validate import valid_plan

__all__ = ["DevicePicture", "ShardMove", "ShardPlan", "ShareTaken", "SplitFigures", "valid_shard_plan"]

_MOST_DEVICES = 1 << 20
_MOST = 1 << 63
"""No figure is that large."""


class SplitFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a way to split the step is predicted to take."""

    name: str
    seconds: float
    peak_bytes: int
    """Of the largest device, planned inside the budget."""
    plain_bytes: int
    """The same, storing everything."""
    wire_bytes: int
    """What the device that sends most sends in a step."""
    fits: bool = True


class ShardMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What moves between devices for one operator and one tensor."""

    tensor: int
    """Of the step; -1 where that is not known."""
    operator: int
    """Of the step; -1 for a gradient that is added up behind backward."""
    how: Literal["halo", "gather", "sum", "scattered sum"]
    """In backward, what becomes of the gradient of what moved so."""
    phase: Phase
    axis: int
    """Of the mesh."""
    dim: int
    """Along which the tensor is cut; -1 for a sum."""
    sent_bytes: tuple[int, ...]
    """By each device of ``ShardPlan.ranks``."""
    seconds: float
    """What it is predicted to take."""


class DevicePicture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step as one device runs it, drawn as document 002 draws it: operators and variables with boxes."""

    rank: int
    graph: Graph


class ShareTaken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process took."""

    peak_bytes: int
    planned_bytes: int
    resident_bytes: int
    wire_bytes: int
    planned_wire_bytes: int
    gradient_difference: float | None
    """The largest from one device, as a share of a gradient's norm; None: not finite."""
    update_difference: float | None
    loss_difference: float | None
    budget_bytes: int = 0
    """What it planned inside of; 0: not known."""


class ShardPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step over a mesh. Tensors and operators are those of the whole step, by their position."""

    target: str
    graph: Graph
    """The whole step, as one device runs it."""
    seconds: tuple[float, ...]
    """Estimated, of each operator on one device."""
    shards: Shards
    ranks: tuple[int, ...]
    """The devices that are described; others are like one of them."""
    bytes_per_second: float
    latency: float
    """Of the connection between devices, in seconds, as the rate: along the first axis of the mesh."""
    one: Side
    """One device, storing everything."""
    split: SplitFigures
    messages: int
    bound_seconds: float
    """No split takes less by the same costs."""
    gap: float
    budget_bytes: int | None = None
    """Of a device; None: what storing everything takes."""
    others: tuple[SplitFigures, ...] = ()
    moves: tuple[ShardMove, ...] = ()
    pictures: tuple[DevicePicture, ...] = ()
    largest: int = 0
    """The device whose plan this has: the one that takes most."""
    plan: Plan | None = None
    measured: tuple[ShareTaken, ...] = ()
    """By process, where the step was run."""
    lowtide: Literal["shards"] = "shards"
    version: Literal[1] = 1

    def cut_of(self, tensor: int, maker: int | None) -> Cut:
        """How a tensor is cut: as a leaf, or as what its operator makes."""
        none = (None,) * len(self.shards.mesh.sizes)
        if maker is None:
            return self.shards.leaves.get(tensor, none)
        return self.shards.share(maker).cut

    def box(self, tensor: int, maker: int | None, rank: int) -> Rect:
        """What a device holds of a tensor."""
        shape = self.graph.tensors[tensor].shape or ()
        return box_of(shape, self.cut_of(tensor, maker), self.shards.mesh, rank)


def valid_shard_plan(plan: ShardPlan) -> ShardPlan:
    """The plan itself, or a PlanError that says what contradicts itself in it."""
    try:
        sound(plan.graph)
        for picture in plan.pictures:
            check_fields(validate(picture.graph))
        problem = next(_problems(plan), None)
    except GraphError as error:
        problem = str(error)
    if problem is not None:
        raise PlanError(
            f"{problem}: the file is damaged, or was written by another version; make it again by "
            "`lowtide shard TARGET --devices N -o FILE`"
        )
    if plan.plan is not None:
        valid_plan(plan.plan)
    return plan


def _problems(plan: ShardPlan) -> Iterator[str]:
    """What is wrong, in words."""
    mesh, graph = plan.shards.mesh, plan.graph
    if prod(mesh.sizes) > _MOST_DEVICES:
        yield f"it has more than {_MOST_DEVICES} devices"
    for rank in (*plan.ranks, plan.largest, *(one.rank for one in plan.pictures)):
        if not 0 <= rank < mesh.devices:
            yield f"it describes device {rank} of {mesh.devices}"
    if not plan.ranks:
        yield "it describes no device"
    if plan.seconds and len(plan.seconds) != len(graph.ops):
        yield f"it has {len(plan.seconds)} times for {len(graph.ops)} operators"
    if not all(0 <= figure < _MOST for figure in _figures(plan)):
        yield "one of its figures is no amount"
    if plan.measured and len(plan.measured) != mesh.devices:
        yield f"{len(plan.measured)} processes were measured on {mesh.devices} devices"
    yield from _of_cuts(plan)
    for move in plan.moves:
        known = -1 <= move.tensor < len(graph.tensors) and -1 <= move.operator < len(graph.ops)
        if not known or not 0 <= move.axis < len(mesh.sizes) or len(move.sent_bytes) != len(plan.ranks):
            yield "something moves that is not in the step"
    yield from _of_pictures(plan)


def _of_pictures(plan: ShardPlan) -> Iterator[str]:
    for picture in plan.pictures:
        nodes: list[Op | Tensor] = [*picture.graph.tensors, *picture.graph.ops]
        for node in nodes:
            if any(not all(0 <= a <= b < _MOST for a, b in box) for box in node.boxes.values() if box):
                yield f"a box of {node.label!r} has no extent"


def _of_cuts(plan: ShardPlan) -> Iterator[str]:
    graph, axes = plan.graph, len(plan.shards.mesh.sizes)
    cuts: list[tuple[int, Cut]] = []
    for t, cut in plan.shards.leaves.items():
        if not 0 <= t < len(graph.tensors) or graph.tensors[t].role not in RESIDENT_ROLES:
            yield f"it cuts leaf {t}, which the step does not have"
        else:
            cuts.append((t, cut))
    for k, share in plan.shards.operators.items():
        if not 0 <= k < len(graph.ops) or len(share.over) != axes:
            yield f"it splits operator {k}, which the step does not have"
        else:
            cuts += [(t, share.cut) for t in graph.ops[k].outputs]
    for t, cut in cuts:
        shape = graph.tensors[t].shape or ()
        if len(cut) != axes or any(dim is not None and not 0 <= dim < len(shape) for dim in cut):
            yield f"it cuts {graph.tensors[t].label!r} along a dimension that it does not have"
        else:
            for rank in plan.ranks:
                box_of(shape, cut, plan.shards.mesh, rank)  # too few elements: a PlanError says so


def _figures(plan: ShardPlan) -> Iterator[float]:
    """Everything that is an amount."""
    splits: Sequence[SplitFigures] = (plan.split, *plan.others)
    yield from plan.seconds
    yield from (plan.bytes_per_second, plan.latency, plan.messages, plan.bound_seconds, plan.gap)
    yield from (plan.one.peak_bytes, plan.one.seconds, plan.budget_bytes or 0)
    for one in splits:
        yield from (one.seconds, one.peak_bytes, one.plain_bytes, one.wire_bytes)
    for move in plan.moves:
        yield from (*move.sent_bytes, move.seconds)
    for share in plan.measured:
        yield from (share.peak_bytes, share.planned_bytes, share.resident_bytes)
        yield from (share.wire_bytes, share.planned_wire_bytes, share.budget_bytes)
        yield from (share.gradient_difference or 0, share.update_difference or 0, share.loss_difference or 0)
