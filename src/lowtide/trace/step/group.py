"""A group: operators of a step that run together, as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.graph import GROUP, Graph

__all__ = ["Group", "same_form"]


class Group:
    """A body of operators with one call: by the operators themselves, until it is compiled."""

    __slots__ = ("__name__", "body", "final", "graph", "measured", "over", "replaces", "run")

    def __init__(self, body: fx.GraphModule, graph: Graph) -> None:
        self.__name__ = GROUP
        self.body, self.graph = body, graph
        self.run: Callable[[list[Any]], Sequence[Any]] = self.by_operators
        """Takes the arguments in a list and may empty it."""
        self.over: Callable[[list[Any]], Sequence[Any]] = self.by_operators_over
        """The same, with its one result in the memory of its first argument."""
        self.replaces = _replaces(body)
        """Whether that needs no more memory: each value follows from the one in its place."""
        self.final = False
        """Whether it is called as the step will call it: by its kernels, or by operators for want of them."""
        self.measured: Callable[[Callable[..., Any], Sequence[Any]], Any] | None = None
        """Who calls it in its place, while somebody measures it."""

    @property
    def promised(self) -> list[torch.Tensor]:
        """What it gives, as shape, type and layout alone."""
        outputs: Any = self.body.graph.output_node().args[0]
        return [node.meta["val"] for node in outputs]

    def by_operators(self, arguments: list[Any]) -> Sequence[Any]:
        """The results, operator by operator."""
        results: Sequence[Any] = self.body(*arguments)
        return results

    def by_operators_over(self, arguments: list[Any]) -> Sequence[Any]:
        """The same, written over the first argument."""
        first = arguments[0]
        (result,) = self.by_operators(arguments)
        return (first.copy_(result),)

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        if self.measured is not None:
            return self.measured(self._once, arguments)
        return self.run(list(arguments))

    def over_first(self, *arguments: Any) -> Any:
        """The result for these arguments, in the memory of the first."""
        if self.measured is not None:
            return self.measured(self._once_over, arguments)
        return self.over(list(arguments))

    def _once(self, *arguments: Any) -> Any:
        return self.run(list(arguments))

    def _once_over(self, *arguments: Any) -> Any:
        return self.over(list(arguments))


def _replaces(body: fx.GraphModule) -> bool:
    """Whether the one result may lie where the first input does: each value follows from the one there."""
    results: Any = body.graph.output_node().args[0]
    first = next((node for node in body.graph.nodes if node.op == "placeholder"), None)
    if first is None or len(results) != 1 or not same_form(first, results[0]):
        return False
    shape, reached = results[0].meta["val"].shape, {first}
    for node in body.graph.nodes:
        if node.op == "call_function" and any(one in reached for one in node.all_input_nodes):
            value = node.meta.get("val")
            pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
            if not pointwise or not isinstance(value, torch.Tensor) or value.shape != shape:
                return False
            reached.add(node)
    return results[0] in reached and results[0] is not first


def same_form(one: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors have the same shape, type, device and layout."""
    form = _form(one.meta.get("val"))
    return form is not None and form == _form(other.meta.get("val"))


def _form(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.shape, value.stride(), value.dtype, value.device, value.storage_offset()
