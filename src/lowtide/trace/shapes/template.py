"""A step that was traced with symbols for sizes: read once, then made for the sizes of each call.

Reading a traced graph takes as long as several steps. Two shapes of one function differ in numbers alone: the
bytes and shapes of tensors, and numbers among the arguments of operators. Only these are put in anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, overload

import msgspec
import torch
from torch import fx

from lowtide.graph import Graph
from lowtide.trace.eager.layouts import layout_of
from lowtide.trace.shapes.concrete import Concrete, NotConcrete
from lowtide.trace.step.builder import call_facts, given
from lowtide.trace.step.joint import Joint, ReadStep
from lowtide.trace.step.sizes import SYMBOLS

__all__ = ["Template", "with_bytes", "with_symbols_in_place"]


def with_symbols_in_place(module: fx.GraphModule) -> None:
    """Put symbols among the arguments of operators, in the place of nodes that compute them.

    What is left are nodes of tensors. Those of which nothing but sizes was asked are gone.
    """
    graph = module.graph
    numbers = [node for node in graph.nodes if isinstance(node.meta.get("val"), SYMBOLS)]
    if any(node.op == "placeholder" for node in numbers):
        raise NotConcrete  # a number that is the size of no tensor

    def symbol(node: fx.Node) -> Any:
        value = node.meta.get("val")
        return value if isinstance(value, SYMBOLS) else node

    read = {node for node in graph.nodes if node.users}
    for user in {user: None for node in numbers for user in node.users}:
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), symbol)
    for node in reversed(graph.nodes):
        unread = node in read and not node.users and node.op not in ("placeholder", "output")
        if unread and (isinstance(node.meta.get("val"), SYMBOLS) or not node.is_impure()):
            graph.erase_node(node)


class Template:
    """A step with symbols for sizes, and a step for some sizes that is known to be the same."""

    def __init__(self, symbolic: ReadStep) -> None:
        joint = symbolic.joint
        if any(value.layout is not torch.strided for value in joint.values):
            raise NotConcrete  # nothing is known of how these lie in memory
        self._read, self._joint = symbolic, joint
        self._tensors = [t for t, value in enumerate(joint.values) if _varies(value, symbolic.sizes[t])]
        self._ops = [k for k, node in enumerate(symbolic.nodes) if _reads_varying(node)]

    @property
    def joint(self) -> Joint:
        """The step for the sizes that it was traced with; its values have symbols."""
        return self._joint

    def named_like(self, other: Joint) -> None:
        """Call tensors and operators as those of another capture of the step are called."""
        self._joint = replace(self._joint, graph=other.graph)

    def at(self, concrete: Concrete) -> Joint:
        """The step for the sizes of a call; NotConcrete where it may be another one for them."""
        number, joint = concrete.number, self._joint
        tensors, ops, calls = list(joint.graph.tensors), list(joint.graph.ops), list(joint.calls)
        for t in self._tensors:
            shape = concrete.shape(joint.values[t])
            size = number(self._read.sizes[t])
            tensors[t] = msgspec.structs.replace(tensors[t], bytes=size, shape=shape)
        for k in self._ops:
            node = self._read.nodes[k]
            args, kwargs = given(node, number)
            facts = call_facts(node, args, kwargs, concrete.strides)
            ops[k] = msgspec.structs.replace(ops[k], **facts)
            calls[k] = replace(calls[k], args=args, kwargs=kwargs)
        graph: Graph = msgspec.structs.replace(joint.graph, tensors=tuple(tensors), ops=tuple(ops))
        plain = {k: number(value) for k, value in joint.plain.items()}
        values = _Values(joint.values, concrete)
        looks = cache(lambda t: layout_of(joint.values[t], number=number))
        return replace(joint, graph=graph, calls=tuple(calls), values=values, plain=plain, looks=looks)


def with_bytes(joint: Joint, arguments: Sequence[torch.Tensor]) -> Joint:
    """The step with the bytes that are under these arguments: they may be parts of larger tensors."""
    tensors = list(joint.graph.tensors)
    for t, argument in zip(joint.inputs, arguments, strict=True):
        if t is not None and tensors[t].alias is None:
            size = argument.untyped_storage().nbytes()
            tensors[t] = msgspec.structs.replace(tensors[t], bytes=size)
    return replace(joint, graph=msgspec.structs.replace(joint.graph, tensors=tuple(tensors)))


class _Values(Sequence[torch.Tensor]):
    """Fake tensors for the sizes of a call, made when they are asked for."""

    def __init__(self, symbolic: Sequence[torch.Tensor], concrete: Concrete) -> None:
        self._symbolic, self._concrete = symbolic, concrete

    def __len__(self) -> int:
        return len(self._symbolic)

    @overload
    def __getitem__(self, place: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[torch.Tensor]: ...

    def __getitem__(self, place: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(place, slice):
            return [self._concrete.like(one) for one in self._symbolic[place]]
        return self._concrete.like(self._symbolic[place])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self._concrete.like, self._symbolic)


def _varies(value: torch.Tensor, size: Any) -> bool:
    return isinstance(size, SYMBOLS) or any(isinstance(d, SYMBOLS) for d in value.shape)


def _reads_varying(node: fx.Node) -> bool:
    """Whether numbers among the arguments of a call vary, or strides of what it reads."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    for value in found:
        read = value.meta.get("val") if isinstance(value, fx.Node) else None
        if isinstance(value, SYMBOLS) or (
            isinstance(read, torch.Tensor)
            and read.layout is torch.strided
            and any(isinstance(d, SYMBOLS) for d in read.stride())
        ):
            return True
    return False
