"""What CUDA graphs need beside what a plan counts: copies of the batch, and pages that are not full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from lowtide.errors import InfeasibleError
from lowtide.execute.graphs.pages import PAGE, SMALL
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.reserved import refuse_elsewhere
from lowtide.graph import RESIDENT_ROLES, Graph, Role
from lowtide.plan.program.instructions import Body, Program
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.trace.step.joint import Leaf

__all__ = ["lost_in_pages", "reserve", "with_pages"]

_AT_FIRST = 48 << 20
"""Bytes that are left for pages before there is a plan."""
_WHILE_IT_RUNS = 28 << 20
"""While an operator runs, a segment of PyTorch's allocator (20 MiB) and a few pages may not be full."""
_PLANS = 3
"""A step is planned so many times at most, each time with more left for pages."""


def reserve(room: Room, request: PlanRequest, arguments: Sequence[Any], leaves: Sequence[Leaf]) -> None:
    """Leave memory of a device alone for graphs of a step, where they are asked for."""
    refuse_elsewhere(request.reserved, room.device)
    room.counts_reserved = bool(request.reserved)
    if request.graphs == "off" or room.device.type != "cuda":
        return
    pairs = zip(arguments, leaves, strict=False)
    batch = [one for one, leaf in pairs if isinstance(one, torch.Tensor) and leaf.role is Role.INPUT]
    room.page_bytes = _AT_FIRST
    room.graph_bytes = sum(one.nbytes for one in batch) + room.page_bytes


def with_pages(made: Callable[[], Plan], room: Room) -> Plan:
    """A plan beside which the pages of its graphs fit; where there is none, one without graphs."""
    try:
        plan = made()
    except InfeasibleError:
        if not room.graph_bytes:
            raise
        room.graph_bytes = room.page_bytes = 0
        plan = made()
    for _ in range(_PLANS if room.page_bytes else 0):
        missing = lost_in_pages(plan) + _WHILE_IT_RUNS - room.page_bytes
        if missing <= 0:
            break
        before = room.graph_bytes, room.page_bytes
        room.graph_bytes, room.page_bytes = room.graph_bytes + missing, room.page_bytes + missing
        try:
            plan = made()
        except InfeasibleError:
            room.graph_bytes, room.page_bytes = before
            break
    return plan


def lost_in_pages(plan: Plan) -> int:
    """Bytes that the pages of a planned step have more than the tensors on them, where it needs most."""

    def peak(graph: Graph, program: Program, workspace: Sequence[int]) -> int:
        return simulate(graph, program, workspace_bytes=workspace).peak_bytes

    whole = Body(plan.graph, plan.program, plan.workspace_bytes)
    paged = _paged(whole)
    before = peak(whole.graph, whole.program, whole.workspace_bytes)
    return peak(paged.graph, paged.program, paged.workspace_bytes) - before


def _paged(body: Body) -> Body:
    """The same, with everything that is large on pages of its own, in tiles too."""

    def whole(size: int) -> int:
        return -(-size // PAGE) * PAGE if size > SMALL else size

    tensors = tuple(
        one if one.role in RESIDENT_ROLES else replace(one, bytes=whole(one.bytes))
        for one in body.graph.tensors
    )
    inner = tuple(map(_paged, body.program.bodies))
    return replace(
        body,
        graph=replace(body.graph, tensors=tensors),
        program=replace(body.program, bodies=inner),
        workspace_bytes=tuple(map(whole, body.workspace_bytes)),
    )
