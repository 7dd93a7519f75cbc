"""Buffers are updated as eager updates them: by the operator itself, not through copies.

AOTAutograd makes every operator functional: BatchNorm reads its running statistics, gives new ones, and a
copy at the end of the graph puts them into the buffers. Eager runs one kernel for all of it. Where nobody
else reads a buffer, the operator that updates it in place is put back and the copy is gone. A later run of
such an operator must not update again: ``without_update`` lets it write to memory that is thrown away.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.torch_internals import schema_of

__all__ = ["update_in_place", "without_update", "written_arguments"]

aten = torch.ops.aten
_IN_PLACE: dict[Any, tuple[Any, dict[int, int]]] = {
    aten._native_batch_norm_legit_functional.default: (aten._native_batch_norm_legit.default, {3: 3, 4: 4}),
    aten._batch_norm_with_update_functional.default: (aten._batch_norm_with_update.default, {3: 4, 4: 5}),
}
"""By functional operator: the one that updates in place, and which result renews which argument."""
_BACKWARD = (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
_RUNNING, _TRAINING = (3, 4), 7


def update_in_place(module: fx.GraphModule) -> int:
    """How many updates of inputs were put back into the operators that make them; changes the module."""
    graph = module.graph
    for target in _BACKWARD:
        for node in graph.find_nodes(op="call_function", target=target):
            if node.args[_TRAINING] is True:  # the running statistics are not read
                node.args = tuple(None if k in _RUNNING else arg for k, arg in enumerate(node.args))
    copies = {
        node.args[0]: node
        for node in graph.find_nodes(op="call_function", target=aten.copy_.default)
        if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder" and not node.users
    }
    changed = 0
    for node in list(graph.nodes):
        if node.target in _IN_PLACE:
            changed += _put_back(graph, node, copies)
        elif node.target is aten.add.Tensor:
            changed += _count_in_place(graph, node, copies)
    return changed


def _put_back(graph: fx.Graph, node: fx.Node, copies: Mapping[Any, fx.Node]) -> bool:
    target, renewed = _IN_PLACE[node.target]
    done: list[fx.Node] = []
    for argument, result in renewed.items():
        buffer = node.args[argument]
        copy = copies.get(buffer)
        values = [user for user in node.users if user.target is operator.getitem and user.args[1] == result]
        if not isinstance(buffer, fx.Node) or copy is None or set(buffer.users) != {node, copy}:
            return False
        if len(values) != 1 or copy.args[1] is not values[0] or set(values[0].users) != {copy}:
            return False
        done += [copy, values[0]]
    for one in done:
        graph.erase_node(one)
    kept = len(node.meta["val"]) - len(renewed)
    with graph.inserting_before(node):
        new = graph.call_function(target, node.args)
    new.meta = dict(node.meta) | {"val": tuple(node.meta["val"][:kept]), "traced": node.target}
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return True


def _count_in_place(graph: fx.Graph, node: fx.Node, copies: Mapping[Any, fx.Node]) -> bool:
    """``buffer + number``, copied into the buffer."""
    buffer = node.args[0]
    copy = copies.get(buffer)
    if copy is None or copy.args[1] is not node or len(node.args) != 2 or isinstance(node.args[1], fx.Node):
        return False
    if not isinstance(buffer, fx.Node) or set(buffer.users) != {node, copy} or set(node.users) != {copy}:
        return False
    graph.erase_node(copy)
    with graph.inserting_before(node):
        new = graph.call_function(aten.add_.Tensor, node.args)
    new.meta = dict(node.meta)
    graph.erase_node(node)
    return True


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that the operator writes to, by its schema."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            parts = value if isinstance(value, list | tuple) else [value]
            found += [part for part in parts if isinstance(part, fx.Node)]
    return found


def without_update(
    function: Callable[..., Any], places: Sequence[int], like: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """The function with memory of its own at these places of its arguments, shaped as what stood there."""
    forms = [(tuple(value.shape), value.dtype, value.device) for value in like]

    def again(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place, (shape, dtype, device) in zip(places, forms, strict=True):
            given[place] = torch.empty(shape, dtype=dtype, device=device)
        return function(*given, **kwargs)

    return again
