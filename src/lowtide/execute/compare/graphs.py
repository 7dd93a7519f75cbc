"""``graph_of``: the graph of a step, with the gradients of its inputs where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.execute.compile.user_code import in_the_users_terms
from lowtide.graph import Graph
from lowtide.nested import mapped
from lowtide.trace.step.capture import capture

__all__ = ["graph_of", "with_gradients"]


def graph_of(
    function: Callable[..., Any],
    example: Sequence[Any],
    *,
    trains: bool = True,
    input_gradients: bool = False,
) -> Graph:
    """The graph of ``function(*example)``; nothing is run, and the tensors of the example stay as they are.

    With ``input_gradients`` the backward pass goes on to every input of floating-point numbers.
    """
    values = with_gradients(example) if input_gradients else list(example)
    with in_the_users_terms(), torch.set_grad_enabled(trains):
        return capture(function, *values).step.graph


def with_gradients(values: Sequence[Any]) -> list[Any]:
    """The same values, with tensors of floating-point numbers, however deep inside, that want a gradient."""
    return [mapped(_with_gradient, value) for value in values]


def _with_gradient(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value
