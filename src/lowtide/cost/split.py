"""A convolution's backward in two calls: first the gradients of weight and bias, then that of its input.

Each takes less workspace than both together, and the second does not read the input any more: it is a
convolution of its own, a transposed one where the first was none. Whether that gives the same bits depends on
the kernels of the device: it is used only where a run of both has found that it does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lowtide.cost.kernel_trial import described, equal, for_a_trial, random_arguments

__all__ = ["TwoCalls", "same_when_split", "two_calls"]

aten = torch.ops.aten
_SAME: dict[tuple[Any, ...], bool] = {}
"""What was found in this process."""


class TwoCalls(NamedTuple):
    """The arguments of two operators that do what one ``aten.convolution_backward`` does."""

    parameters: tuple[Any, ...] | None
    """Of an ``aten.convolution_backward`` for weight and bias alone; None where they have no gradient."""
    image: tuple[Any, ...]
    """Of the ``aten.convolution`` that gives the gradient of the input."""


def two_calls(arguments: Sequence[Any], shape: Callable[[Any], Sequence[int]]) -> TwoCalls | None:
    """The calls for these arguments of a convolution's backward; None where its input has no gradient.

    ``shape`` gives that of a tensor among the arguments.
    """
    gradient, image, weight, _, stride, padding, dilation, transposed, _, groups, mask = arguments
    if not mask[0]:
        return None
    count = len(shape(image)) - 2
    stride, padding, dilation = (_each(one, count) for one in (stride, padding, dilation))
    more = [0] * count
    if not transposed:
        kernel = [d * (k - 1) + 1 for d, k in zip(dilation, shape(weight)[2:], strict=True)]
        ends = zip(shape(image)[2:], shape(gradient)[2:], stride, padding, kernel, strict=True)
        more = [size - ((out - 1) * s - 2 * p + k) for size, out, s, p, k in ends]
    parameters = (*arguments[:-1], [False, *mask[1:]]) if any(mask[1:]) else None
    return TwoCalls(
        parameters, (gradient, weight, None, stride, padding, dilation, not transposed, more, groups)
    )


def _each(value: Sequence[int], count: int) -> list[int]:
    """One number for every dimension of an image."""
    return list(value) * count if len(value) == 1 else list(value)


def same_when_split(arguments: Sequence[Any]) -> bool:
    """Whether two calls give the very bits of one: both run on random numbers, once in a process.

    Tensors among the arguments say what theirs are like. False where that cannot be found out, as where
    memory does not suffice.
    """
    key = described(arguments)
    if key not in _SAME:
        _SAME[key] = False
        with for_a_trial():
            _SAME[key] = _same(random_arguments(arguments))
    return _SAME[key]


def _same(arguments: Sequence[Any]) -> bool:
    calls = two_calls(arguments, operator.attrgetter("shape"))
    if calls is None:
        return False
    whole = aten.convolution_backward.default(*arguments)
    image = aten.convolution.default(*calls.image)
    parts: list[Any] = [image, None, None]
    if calls.parameters is not None:
        parts[1:] = aten.convolution_backward.default(*calls.parameters)[1:]
    return all(equal(one, other) for one, other in zip(whole, parts, strict=True))
