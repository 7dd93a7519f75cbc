"""Gradients of parameters that are added up over devices once, however often a parameter is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from lowtide.graph import Op, Phase
from lowtide.graph.shards import Shards, replicated
from lowtide.trace.distributed.exchange import gradient_summed
from lowtide.trace.step.joint import Joint

if TYPE_CHECKING:
    from lowtide.trace.shards.local import LocalStep

__all__ = ["added_later", "with_sums"]


def added_later(joint: Joint, shards: Shards, inputs: Collection[int]) -> dict[int, set[int]]:
    """Axes along which all devices hold an input and each uses it for something of its own.

    Its gradient is added up once all uses have given their part. Where all devices make a view of it, the
    uses of the view count as its own.
    """
    shared: dict[int, set[int]] = defaultdict(set)
    alike: dict[int, set[int]] = defaultdict(set)
    axes = range(len(shards.mesh.sizes))
    for t in (*joint.outputs, *joint.overwritten, *joint.overwritten.values()):
        alike[-1 if t is None else t].update(axes)
    forward = [(k, op) for k, op in enumerate(joint.graph.ops) if op.phase is Phase.FORWARD]
    views: list[tuple[int, int, set[int]]] = []
    """Each with its source, and the axes along which all devices make it."""
    for number, op in reversed(forward):
        share, view = shards.share(number), _view(joint, op)
        later = shared[view] - alike[view] if view is not None else set[int]()
        if view is not None:
            views.append((op.inputs[0], view, {axis for axis in axes if not share.shared(axis)}))
        for t in set(op.inputs):
            for axis in axes:
                (shared if share.shared(axis) or axis in later else alike)[t].add(axis)
    whole = {t: set(_whole(shards.leaves.get(t, replicated(shards.mesh)))) for t in inputs}
    found = {t: held & (shared[t] - alike[t]) for t, held in whole.items()}
    for source, view, made in reversed(views):
        found[view] = found.get(source, set()) & made & (shared[view] - alike[view])
    return found


def _whole(cut: Sequence[int | None]) -> list[int]:
    return [axis for axis, dim in enumerate(cut) if dim is None]


def _view(joint: Joint, op: Op) -> int | None:
    """The result of an operator that makes a view of its only input."""
    if len(op.inputs) != 1 or len(op.outputs) != 1 or op.changes or op.updates or op.random:
        return None
    (t,) = op.outputs
    return t if joint.graph.tensors[t].alias is not None and t not in joint.stopped else None


def with_sums(local: LocalStep, wires: Sequence[str]) -> LocalStep:
    """The step of a device that adds gradients up itself; ``wires`` are the names of its connections.

    Autograd goes back through a step in the order of forward. So each sum stands where its parameter is read
    first: it starts as soon as the gradient is there, and not once backward has ended.
    """
    graph = local.module.graph
    order = {node: k for k, node in enumerate(graph.nodes)}
    inputs = graph.find_nodes(op="placeholder")
    for place, axes in local.summed.items():
        given = inputs[place]
        if not given.users:  # nothing that the loss needs reads it
            continue
        with graph.inserting_before(min(given.users, key=order.__getitem__)):
            summed = graph.call_function(gradient_summed, (given, tuple(wires[axis] for axis in axes)))
        given.replace_all_uses_with(summed, delete_user_cb=lambda user, made=summed: user is not made)
    local.module.recompile()
    return local
