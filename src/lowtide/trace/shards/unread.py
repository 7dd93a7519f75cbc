"""What a device has and reads nothing of, while others do: it stays, and takes part in gradients."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from lowtide.trace.operators import InputPart

__all__ = ["behind", "made_from"]

aten = torch.ops.aten


def made_from(target: fx.Graph, node: fx.Node, before: int) -> set[fx.Node]:
    """What a node is made from, among itself, nodes behind the first ``before`` ones, and what these read."""
    found = {node}
    for one in itertools.islice(reversed(target.nodes), len(target.nodes) - before):
        if one in found:
            found.update(one.all_input_nodes)
    return found


def behind(target: fx.Graph, unread: InputPart, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A node of this type as it is, but behind a part that it does not read, whose gradient is zeros."""
    one = unread.node if unread.box.ndim else target.call_function(aten.unsqueeze.default, (unread.node, 0))
    empty = target.call_function(aten.slice.Tensor, (one, 0, 0, 0))
    nothing = target.call_function(aten.sum.default, (empty,))
    cast = target.call_function(aten.to.dtype, (nothing, dtype))
    return target.call_function(aten.add.Tensor, (node, cast))
