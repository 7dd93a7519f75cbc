"""Communications of a split step around tiles: all that it had, in their order, so that processes still meet.

Some processes run tiles and others do not; all of them send and add up in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError
from lowtide.graph import EXCHANGE, SUM, Phase
from lowtide.trace.distributed import exchange
from lowtide.trace.step.joint import Joint

__all__ = ["add_gradients_up", "refuse_another_order"]

_ORDER = "processes would communicate in another order than without tiles"


def add_gradients_up(joint: fx.GraphModule, num_outputs: int, inputs: Sequence[int], old: Joint) -> None:
    """Add gradients of inputs up over processes where the ``old`` step does, in its order.

    ``inputs`` are tensors of that step, one for each gradient behind the results of forward.
    """
    if not old.summed:
        return
    graph, output = joint.graph, joint.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    order = {node: k for k, node in enumerate(graph.nodes)}
    talking = iter([node for node in graph.nodes if node.target in (exchange.ADD_UP, exchange.EXCHANGE)])
    places = {t: num_outputs + k for k, t in enumerate(inputs)}
    last: fx.Node | None = None
    at = -1
    for leaf in _order(old):
        if leaf is None:
            last = next(talking, None)
            if last is None or order[last] < at:
                raise CaptureError(_ORDER)
            at = order[last]
            continue
        gradient = results[places[leaf]]
        if not isinstance(gradient, fx.Node):  # no tile reads it: the loop gives zeros the next time
            continue
        if last is None or order[gradient] > at:
            last, at = gradient, order[gradient]
        for wire in old.summed[leaf]:
            with graph.inserting_after(last):
                last = graph.call_function(exchange.ADD_UP, (gradient, True, wire))
            last.meta = {**_about(gradient), "val": _like(gradient.meta["val"])}
            gradient = last
        results[places[leaf]] = gradient
    output.args = (tuple(results),)
    joint.recompile()


def refuse_another_order(
    old: Joint, made: Joint, before: Sequence[int | None], now: Sequence[int | None]
) -> None:
    """Raise a CaptureError unless a step made of the old one has its communications, in the same order.

    The same gradients have to be added up as well.

    Inputs ``before`` are those ``now``. One that lacks a gradient is to be made again.
    """
    idle = {t for t, gradient in zip(made.inputs, made.gradients, strict=False) if gradient is None}
    if any(before[k] in old.summed and t in idle for k, t in enumerate(now)):
        return
    names = {t: number for number, t in enumerate(before) if t is not None}
    others = {t: number for number, t in enumerate(now) if t is not None}
    summed = [
        {numbers.get(t, -2): wires for t, wires in joint.summed.items()}
        for joint, numbers in ((old, names), (made, others))
    ]
    if summed[0] != summed[1] or _told(old, names) != _told(made, others):
        raise CaptureError(_ORDER)


def _order(joint: Joint) -> list[int | None]:
    """For each communication the input whose gradient it adds up; one for all connections. None: another."""
    found: list[int | None] = []
    for _, leaf in _talking(joint):
        if leaf is None or leaf not in found:
            found.append(leaf)
    return found


def _talking(joint: Joint) -> list[tuple[int, int | None]]:
    """Operators that talk to others, with the input whose gradient they add up, if that is known."""
    ops = joint.graph.ops
    leaves: dict[int, int] = {}
    pairs = zip(joint.inputs, joint.gradients, strict=False)
    ends = {gradient: leaf for leaf, gradient in pairs if leaf in joint.summed and gradient is not None}
    for k in range(len(ops) - 1, -1, -1):
        leaf = next((ends[t] for t in ops[k].outputs if t in ends), None)
        if leaf is None or ops[k].phase is Phase.FORWARD:
            continue
        if ops[k].kind == SUM and joint.calls[k].args[1]:
            leaves[k] = leaf
            ends[ops[k].inputs[0]] = leaf
        elif ops[k].kind == "lowtide.dense":
            ends[ops[k].inputs[0]] = leaf
    return [(k, leaves.get(k)) for k, op in enumerate(ops) if op.kind in (EXCHANGE, SUM)]


def _told(joint: Joint, numbers: dict[int, int]) -> list[tuple[object, ...]]:
    """What each communication is, so that those of two steps can be compared."""
    found: list[tuple[object, ...]] = []
    for k, leaf in _talking(joint):
        given = joint.values[joint.graph.ops[k].inputs[0]]
        whose = -1 if leaf is None else numbers.get(leaf, -2)
        found.append((joint.graph.ops[k].kind, str(joint.calls[k].args[1:]), given.shape, given.dtype, whose))
    return found


def _about(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key in ("partitioner_tag", "seq_nr")}


def _like(value: torch.Tensor) -> torch.Tensor:
    """What a sum gives, as shape and type alone."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.new_empty(value.shape)
