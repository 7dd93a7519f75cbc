"""What a device has and reads nothing of, while others do: it stays, and takes part in gradients.

What nobody reads is left out when a step is captured. A communication must not be: others wait for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from lowtide.torch_internals import OpOverload, schema_of
from lowtide.trace.operators import InputPart

__all__ = ["behind", "made_from", "taking_part"]

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


def taking_part(
    target: fx.Graph, result: fx.Node, dtype: torch.dtype, communications: Mapping[fx.Node, bool]
) -> fx.Node:
    """A result of the step, behind the communications that nothing else here is made from.

    Of each the mapping says whether it has a gradient, in which this device takes part as well.
    """
    writing = [node for node in target.nodes if _writes(node)]
    read = _read_by([result, *writing])
    for node in reversed(list(target.nodes)):
        if node not in communications or node in read:
            continue
        with target.inserting_before(node.next):  # one number is kept until the end
            given = node if communications[node] else target.call_function(aten.detach.default, (node,))
            flat = target.call_function(aten.reshape.default, (given, [-1]))
            empty = target.call_function(aten.slice.Tensor, (flat, 0, 0, 0))
            nothing = target.call_function(aten.sum.default, (empty,))
        cast = target.call_function(aten.to.dtype, (nothing, dtype))
        result = target.call_function(aten.add.Tensor, (result, cast))
        read |= _read_by([node])
    return result


def _writes(node: fx.Node) -> bool:
    """Whether an operator changes what it is given."""
    return isinstance(node.target, OpOverload) and bool(schema_of(node.target).is_mutable)


def _read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are made from."""
    found, stack = set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found
