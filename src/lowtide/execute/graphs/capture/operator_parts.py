"""Operators that compute several results one after the other, each with memory that it frees again.

The backward of a convolution is one: the gradients of its input and of its weight have a workspace each, and
take the same kernels where they are asked for alone. So it gives the same bits in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

__all__ = ["OperatorParts", "parts_of"]


class OperatorParts(NamedTuple):
    """The calls that an operator is made of."""

    calls: Sequence[Callable[[], Sequence[Any]]]

    def together(self, results: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """What the operator gives, from what its parts have given: one of them has each result."""
        return tuple(next((x for x in found if x is not None), None) for found in zip(*results, strict=True))


def parts_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperatorParts | None:
    """The parts of an operator; None where it has only one."""
    if func is not torch.ops.aten.convolution_backward.default:
        return None
    named = dict(kwargs)
    wanted = named.pop("output_mask") if "output_mask" in named else args[10]
    if not (wanted[0] and any(wanted[1:])):
        return None
    masks = [True, False, False], [False, *wanted[1:]]
    return OperatorParts([partial(func, *args[:10], **named, output_mask=mask) for mask in masks])
