"""A group: operators of a step that run together, as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.graph import GROUP, Graph

__all__ = ["Group"]


class Group:
    """A body of operators with one call: by the operators themselves, until it is compiled."""

    __slots__ = ("__name__", "body", "final", "graph", "measured", "run")

    def __init__(self, body: fx.GraphModule, graph: Graph) -> None:
        self.__name__ = GROUP
        self.body, self.graph = body, graph
        self.run: Callable[[list[Any]], Sequence[Any]] = self.by_operators
        """Takes the arguments in a list and may empty it."""
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

    def __call__(self, *arguments: Any) -> Any:
        """The results for these arguments."""
        if self.measured is not None:
            return self.measured(self._once, arguments)
        return self.run(list(arguments))

    def _once(self, *arguments: Any) -> Any:
        return self.run(list(arguments))
