"""Convolutions in slices of the batch, in a joint graph: each is one call, a group that is not compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowtide.cost.slices import bounds, slices_for
from lowtide.trace.groups.form import Forming
from lowtide.trace.groups.rewrite import put_in
from lowtide.trace.step.group import Group

__all__ = ["slice_convolutions"]

aten = torch.ops.aten


def slice_convolutions(module: fx.GraphModule, num_outputs: int) -> int:
    """How many convolutions were changed: those that need less memory in slices, and give the same bits."""
    found = [
        (node, slices)
        for node in module.graph.find_nodes(op="call_function", target=aten.convolution.default)
        if (slices := slices_for([_value(one) for one in node.args])) > 1
    ]
    if not found:
        return 0
    members = [_sliced(module.graph, node, slices) for node, slices in found]
    place = {node: float(k) for k, node in enumerate(module.graph.nodes)}
    put_in(module, [Forming(list(one), at=place[one[-1]]) for one in members], num_outputs)
    for node in module.graph.nodes:
        if isinstance(node.target, Group) and _is_sliced(node.target):
            node.target.final = True
    return len(found)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _sliced(graph: fx.Graph, node: fx.Node, slices: int) -> Sequence[fx.Node]:
    """The operators that take the place of a convolution, without the views that they read."""
    image, *others = node.args
    parts = []
    with graph.inserting_before(node):
        for lo, hi in bounds(_value(image).shape[0], slices):
            part = _called(graph, aten.slice.Tensor, (image, 0, lo, hi), node)
            parts.append(_called(graph, aten.convolution.default, (part, *others), node))
        whole = _called(graph, aten.cat.default, (parts,), node)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    return *parts, whole


def _called(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """The call of an operator in the place of another one."""
    made = graph.call_function(target, args)
    values = fx.map_arg(args, lambda one: one.meta["val"])
    with like.meta["val"].fake_mode:
        made.meta = dict(like.meta) | {"val": target(*values)}
    return made


def _is_sliced(group: Group) -> bool:
    return any(node.target is aten.convolution.default for node in group.body.graph.nodes)
