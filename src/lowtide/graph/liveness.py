"""Lifetimes of storages when the graph runs in program order and nothing is dropped early."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lowtide.errors import GraphError
from lowtide.graph.timeline import Lifetime, Timeline
from lowtide.graph.types import RESIDENT_ROLES, Graph, Op

__all__ = ["liveness"]


def liveness(
    graph: Graph,
    *,
    workspace_bytes: Sequence[int] = (),
    seconds: Sequence[float] = (),
    every_input: bool = False,
) -> Timeline:
    """The timeline of running every operator once, freeing each storage after its last use.

    Views share the storage of what they view. Leaves (parameters, buffers, constants, inputs, optimiser
    state) take memory throughout; the gradient of a leaf, from the operator that first writes it to the
    end. An operator's inputs, outputs and workspace are counted together while it runs. With
    ``every_input`` an input listed only for its shape is counted as if its value were read.
    """
    if not graph.ordered:
        raise GraphError(
            "this document does not say in which order its operators ran: no lifetimes follow from it. "
            "Capture the step with `lowtide profile`"
        )
    steps = len(graph.ops)
    storage = graph.storages()
    first, last = _uses(graph.ops, storage, len(graph.tensors), every_input)
    end = steps - 1
    for k, tensor in enumerate(graph.tensors):
        owner = storage[k]
        if tensor.role in RESIDENT_ROLES:
            first[owner], last[owner] = 0, end
        elif (
            tensor.gradient_of is not None
            and first[owner] >= 0
            and graph.tensors[tensor.gradient_of].role in RESIDENT_ROLES
        ):
            last[owner] = end
    lifetimes = tuple(
        Lifetime(k, tensor.bytes, first[k], last[k])
        for k, tensor in enumerate(graph.tensors)
        if storage[k] == k and 0 <= first[k] <= last[k]
    )
    return Timeline(
        live_bytes=_live_bytes(lifetimes, steps, workspace_bytes),
        lifetimes=lifetimes,
        workspace_bytes=tuple(workspace_bytes),
        seconds=tuple(seconds),
        resident_bytes=sum(
            one.bytes for one in lifetimes if graph.tensors[one.tensor].role in RESIDENT_ROLES
        ),
    )


def _uses(
    ops: Sequence[Op], storage: list[int], tensors: int, every_input: bool
) -> tuple[list[int], list[int]]:
    first = [-1] * tensors
    last = [-1] * tensors
    for step, op in enumerate(ops):
        for t in op.inputs if every_input else op.reads:
            owner = storage[t]
            last[owner] = step
            if first[owner] < 0:
                first[owner] = step
        for t in op.outputs:
            owner = storage[t]
            last[owner] = step
            if first[owner] < 0:
                first[owner] = step
    return first, last


def _live_bytes(lifetimes: Sequence[Lifetime], steps: int, workspace: Sequence[int]) -> tuple[int, ...]:
    change = [0] * (steps + 1)
    for one in lifetimes:
        change[one.first] += one.bytes
        change[one.last + 1] -= one.bytes
    live = accumulate(change[:steps])
    if not workspace:
        return tuple(live)
    return tuple(bytes_ + extra for bytes_, extra in zip(live, workspace, strict=True))
