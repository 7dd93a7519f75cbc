"""Gradients of results that never came while a step was planned, and come after all.

A graph may give results that nobody differentiates: scores beside the loss. Its backward is captured and
planned without their gradients. Code between graphs may use them otherwise one day: what their gradients add
is then computed by running the graph again as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

__all__ = ["with_late_gradients"]


class _Late(torch.autograd.Function):
    """A result of a graph as it is, and in backward what its gradient adds to those of the arguments."""

    @staticmethod
    def forward(
        ctx: Any, graph: Callable[..., Any], result: int, value: torch.Tensor, *arguments: Any
    ) -> torch.Tensor:
        """``value`` is what the graph gives at this place."""
        ctx.graph, ctx.result = graph, result
        ctx.others = [None if isinstance(one, torch.Tensor) else one for one in arguments]
        ctx.save_for_backward(*(one for one in arguments if isinstance(one, torch.Tensor)))
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """The graph as it is, run again and differentiated."""
        warnings.warn(
            "a gradient comes that did not come while the step was planned: the graph that it belongs to "
            "runs once more for it, outside of the plan",
            stacklevel=2,
        )
        saved = iter(ctx.saved_tensors)
        places = [k for k, one in enumerate(ctx.others) if one is None]
        arguments: list[Any] = list(ctx.others)
        for k in places:
            one = next(saved)
            arguments[k] = one.detach().requires_grad_(one.requires_grad)
        wanted = [k for k in places if arguments[k].requires_grad]
        with torch.enable_grad():
            value = ctx.graph(*arguments)[ctx.result]
        found = torch.autograd.grad(value, [arguments[k] for k in wanted], gradient, allow_unused=True)
        gradients: list[Any] = [None] * len(arguments)
        for k, one in zip(wanted, found, strict=True):
            gradients[k] = one
        return None, None, None, *gradients


def with_late_gradients(
    function: Callable[..., Any], graph: Callable[..., Any], results: Collection[int]
) -> Callable[..., Any]:
    """The function of a graph, which takes gradients of these results though its backward knows of none."""
    if not results:
        return function
    apply: Any = _Late.apply

    def call(*arguments: Any) -> Sequence[Any]:
        found = list(function(*arguments))
        if torch.is_grad_enabled():
            for k in results:
                found[k] = apply(graph, k, found[k], *arguments)
        return found

    return call
