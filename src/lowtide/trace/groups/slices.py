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
from lowtide.trace.step.split_convolutions import ALL, Split, chosen_in, in_place_of, value_of

__all__ = ["needs_less_in_slices", "slice_convolutions"]

aten = torch.ops.aten


def needs_less_in_slices(target: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is a convolution that needs less memory in slices, and gives the same bits."""
    return target is aten.convolution.default and slices_for([value_of(one) for one in args]) > 1


def slice_convolutions(module: fx.GraphModule, num_outputs: int, split: Split = ALL) -> int:
    """How many convolutions were changed: those that need less memory in slices, and give the same bits.

    ``split`` says which may be.
    """
    found = [
        (node, slices)
        for node in module.graph.find_nodes(op="call_function", target=aten.convolution.default)
        if chosen_in(split, node.name) and (slices := slices_for([value_of(one) for one in node.args])) > 1
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


def _sliced(graph: fx.Graph, node: fx.Node, slices: int) -> Sequence[fx.Node]:
    """The operators that take the place of a convolution, without the views that they read."""
    image, *others = node.args
    parts = []
    with graph.inserting_before(node):
        for lo, hi in bounds(value_of(image).shape[0], slices):
            part = in_place_of(node, graph, aten.slice.Tensor, (image, 0, lo, hi))
            parts.append(in_place_of(node, graph, aten.convolution.default, (part, *others)))
        whole = in_place_of(node, graph, aten.cat.default, (parts,))
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    return *parts, whole


def _is_sliced(group: Group) -> bool:
    return any(node.target is aten.convolution.default for node in group.body.graph.nodes)
