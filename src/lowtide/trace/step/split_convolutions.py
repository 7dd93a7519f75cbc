"""The backward of convolutions in two calls each, in a joint graph: a way to run it in less memory.

Which convolutions run in less memory is chosen by the names of their nodes, which are the same each time a
function is traced, and are the ids of the operators of its Graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.cost.split import same_when_split, two_calls

__all__ = [
    "ALL",
    "Split",
    "can_split",
    "chosen_in",
    "in_place_of",
    "same_in_two_calls",
    "split_convolutions",
    "value_of",
]

aten = torch.ops.aten
_BACKWARD = aten.convolution_backward.default
_IMAGE = "_image"
"""Ends the name of the call for the gradient of the input."""

Split = frozenset[str]
"""Which convolutions run in less memory, if they can: the names of their nodes."""
ALL: Split = frozenset({"*"})
"""Every one that can."""


def chosen_in(split: Split, name: str) -> bool:
    """Whether an operator of this name, or the one that it is a part of, is to run in less memory."""
    return split == ALL or name.removesuffix(_IMAGE) in split


def can_split(targets: Iterable[Any]) -> bool:
    """Whether there are convolutions with a backward among the operators of a step."""
    return any(target is _BACKWARD for target in targets)


def same_in_two_calls(target: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is the backward of a convolution that can be split."""
    return target is _BACKWARD and bool(args[-1][0]) and same_when_split([value_of(one) for one in args])


def split_convolutions(module: fx.GraphModule, split: Split = ALL) -> int:
    """How many convolutions' backwards were changed: those where both calls give the bits of one.

    ``split`` says which may be. The calls are named after the one that they stand for.
    """
    found = [
        node
        for node in module.graph.find_nodes(op="call_function", target=_BACKWARD)
        if chosen_in(split, node.name)
        and _results(node)
        and same_when_split([value_of(one) for one in node.args])
    ]
    for node in found:
        _split(module.graph, node)
    return len(found)


def _results(node: fx.Node) -> bool:
    """Whether the gradient of the input is asked for, and all that is read are single results."""
    mask: Any = node.args[-1]
    return bool(mask[0]) and all(user.target is operator.getitem for user in node.users)


def value_of(argument: Any) -> Any:
    """An argument of a call, with what a tensor is like in its place."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _split(graph: fx.Graph, node: fx.Node) -> None:
    calls = two_calls(node.args, lambda one: one.meta["val"].shape)
    assert calls is not None
    parameters: fx.Node | None = None
    with graph.inserting_before(node):
        if calls.parameters is not None:
            parameters = in_place_of(node, graph, _BACKWARD, calls.parameters, f"{node.name}_parameters")
        image = in_place_of(node, graph, aten.convolution.default, calls.image, f"{node.name}{_IMAGE}")
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(image)
            graph.erase_node(user)
        elif parameters is not None:
            user.args = (parameters, user.args[1])
            user.meta["val"] = parameters.meta["val"][user.args[1]]
    graph.erase_node(node)


def in_place_of(
    like: fx.Node, graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str | None = None
) -> fx.Node:
    """The call of an operator in the place of another one, with a name of its own if it is given one."""
    made = graph.create_node("call_function", target, args, name=name)
    values = fx.map_arg(args, lambda one: one.meta["val"])
    with value_of(args[0] if isinstance(args[0], fx.Node) else args[0][0]).fake_mode:
        made.meta = dict(like.meta) | {"val": target(*values)}
    return made
