"""Gradients that pass between graphs, as they pass in eager: added up use by use, in strides of their own.

While a step is rehearsed, each call of a graph notes which tensors go in and in which strides the gradients
of its results arrive. Where a tensor has other uses too, behind the call, the graph gives the gradient of
each of its uses apart, and autograd adds them to those of the others, in the order of eager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from lowtide.errors import RunError
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.trace.step.boundary import edges_into

__all__ = ["Crossing", "arrived", "silent", "used_behind", "with_uses_apart"]


@dataclass(slots=True, eq=False)
class Crossing:
    """A call of a graph while a step is rehearsed: the ways of gradients into it and out of it."""

    graph: Any
    edges: dict[int, tuple[Node, int]]
    """Where the gradients of its arguments go, by the places of these."""
    own: set[Node] = field(default_factory=set)
    """The nodes of its backward."""
    results: set[int] = field(default_factory=set)
    """Results that may have gradients."""
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Those in which the gradients of its results have arrived."""

    @classmethod
    def of(cls, graph: Any, arguments: Sequence[Any]) -> Crossing:
        """The call of a graph with these arguments, which is still to come."""
        edges = {}
        for place, one in enumerate(arguments):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                edge = get_gradient_edge(one)
                edges[place] = edge.node, edge.output_nr
        return cls(graph, edges)

    def watch(self, results: Sequence[Any]) -> None:
        """Note how the gradients of its results arrive."""
        for k, one in enumerate(results):
            if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                self.own.add(one.grad_fn)
                self.results.add(k)
                one.register_hook(self._watching(k))  # type: ignore[no-untyped-call]

    def _watching(self, result: int) -> Callable[[torch.Tensor | None], None]:
        strides = self.strides

        def arrives(gradient: torch.Tensor | None) -> None:
            if gradient is not None and gradient.layout is torch.strided:
                strides[result] = tuple(gradient.stride())

        return arrives

    def clear(self) -> None:
        """Hold nothing of the step."""
        self.edges.clear()
        self.own.clear()


def used_behind(crossings: Sequence[Crossing], outputs: Sequence[torch.Tensor]) -> dict[Any, set[int]]:
    """For each graph the inputs that others use too, behind one of its calls; ``outputs`` are the step's."""
    wanted = {edge: None for one in crossings for edge in one.edges.values()}
    users: dict[tuple[Node, int], set[Node]] = {}
    for node, _, edge in edges_into(outputs, wanted):
        users.setdefault(edge, set()).add(node)
    found: dict[Any, set[int]] = {}
    before: set[Node] = set()
    for one in crossings:
        before |= one.own
        places = {place for place, edge in one.edges.items() if users.get(edge, set()) - before}
        found.setdefault(one.graph, set()).update(places)
    return found


def arrived(crossings: Sequence[Crossing]) -> dict[Any, dict[int, tuple[int, ...]]]:
    """For each graph the strides in which the gradient of each result arrives, in most of its calls."""
    seen: dict[Any, dict[int, Counter[tuple[int, ...]]]] = {}
    for one in crossings:
        for result, stride in one.strides.items():
            seen.setdefault(one.graph, {}).setdefault(result, Counter())[stride] += 1
    return {
        graph: {result: count.most_common(1)[0][0] for result, count in results.items()}
        for graph, results in seen.items()
    }


def silent(crossings: Sequence[Crossing]) -> dict[Any, set[int]]:
    """For each graph the results whose gradients have not come in any of its calls."""
    found: dict[Any, set[int]] = {}
    for one in crossings:
        without = one.results - one.strides.keys() if one.strides else set()  # else it had no backward
        found[one.graph] = found.get(one.graph, one.results) & without
    return found


class _Apart(torch.autograd.Function):
    """Tensors as they are; in backward, several gradients go to each instead of their sum."""

    @staticmethod
    def forward(ctx: Any, interpreter: Interpreter, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``tensors`` are all inputs with several gradients, then each again for every further one."""
        ctx.interpreter = interpreter
        ctx.set_materialize_grads(False)
        return tensors[: len(tensors) - len(interpreter.joint.apart)]

    @staticmethod
    def backward(ctx: Any, *first: torch.Tensor | None) -> tuple[Any, ...]:
        """What the graph's backward, which has just run, gave for each of them."""
        interpreter: Interpreter = ctx.interpreter
        others, interpreter.apart = interpreter.apart, []
        if len(others) != len(interpreter.joint.apart):
            raise RunError("gradients of one graph of the step are missing; report this as a bug")
        return None, *first, *others


def with_uses_apart(function: Callable[..., Any], interpreter: Interpreter) -> Callable[..., Any]:
    """The function of a graph; autograd gets the gradients of uses that its backward returns apart."""
    places = interpreter.joint.apart
    if not places:
        return function
    firsts = list(dict.fromkeys(places))

    def call(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments)
        own = list(arguments)
        apply: Any = _Apart.apply
        several = apply(interpreter, *(own[k] for k in (*firsts, *places)))
        for k, one in zip(firsts, several, strict=True):
            own[k] = one
        return function(*own)

    return call
