"""A convolution's backward in two calls: first the gradients of weight and bias, then that of its input.

Each takes less workspace than both together, and the second does not read the input any more: it is a
convolution of its own, a transposed one where the first was none. Whether that gives the same bits depends on
the kernels of the device: it is used only where a run of both has found that it does.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lowtide.torch_internals import autocast_disabled, modes_disabled

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
    described = [_described(one) if isinstance(one, torch.Tensor) else repr(one) for one in arguments]
    key = (*described, torch.get_num_threads(), *_flags())
    if key not in _SAME:
        _SAME[key] = False
        with modes_disabled(), autocast_disabled(), torch.no_grad(), contextlib.suppress(RuntimeError):
            _SAME[key] = _same([_made(one) if isinstance(one, torch.Tensor) else one for one in arguments])
    return _SAME[key]


def _described(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _flags() -> tuple[bool, ...]:
    """What kernels are chosen by, besides tensors."""
    cudnn = torch.backends.cudnn
    found = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    return (*found, torch.are_deterministic_algorithms_enabled(), bool(torch.backends.mkldnn.enabled))


def _made(like: torch.Tensor) -> torch.Tensor:
    """A tensor of random numbers that lies in memory like another one."""
    shape, stride, dtype, device = _described(like)
    generator = torch.Generator(device).manual_seed(0)
    empty = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return empty.normal_(generator=generator)


def _same(arguments: Sequence[Any]) -> bool:
    calls = two_calls(arguments, operator.attrgetter("shape"))
    if calls is None:
        return False
    whole = aten.convolution_backward.default(*arguments)
    image = aten.convolution.default(*calls.image)
    parts: list[Any] = [image, None, None]
    if calls.parameters is not None:
        parts[1:] = aten.convolution_backward.default(*calls.parameters)[1:]
    return all(_equal(one, other) for one, other in zip(whole, parts, strict=True))


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    same = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    return same and torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())
