"""Decides by measurement whether gradients of convolutions are rounded as well in one layout as in another.

Kernels for another layout add in another order: on one CPU, gradients of weights were 0.2 to 1.7 times as far
from float64 channels-last, shape by shape. What is measured of single convolutions is put together: a
gradient is as far as its own sum over samples and places, and all results and gradients that are passed on;
roundings that do not depend on each other add in quadrature.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.execute.kernels.timed_calls import Like, Part, TimedCall
from lowtide.torch_internals import tree_leaves

__all__ = ["MOST", "as_close", "distances"]

MOST = 1.1
"""How many times as far from float64 gradients may be."""
_GROUPS = 16
"""Of a convolution with groups, so many are looked at."""
_SIDE = 12
"""What does not add over places is computed for so many on a side."""
_ELEMENTS = 1 << 22
"""Samples beyond so many elements are left out: this is to take no longer than a step."""
_LEAST = 1e-9
"""What is closer is as good as exact: less than a rounding of float32."""
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_CONVOLUTIONS: Mapping[Any, tuple[str, ...]] = {torch.conv2d: _NAMES, torch.conv_transpose2d: _TRANSPOSED}
"""Those whose layout torch.compile changes, and the names of their arguments."""


def as_close(parts: Counter[Part]) -> bool:
    """Whether gradients of convolutions in float32 are as close to float64 in the old way as in the new one.

    Neither the furthest one nor the geometric mean of all may be more than ``MOST`` times as far. Half
    precision is not looked at: its own rounding is far more. Neither is what cannot be measured.
    """
    found: list[list[dict[str, float]]] = []
    for part, count in parts.items():
        pair = [call for calls in part for call in calls if _is_looked_at(call)]
        if len(pair) == len(part):
            with contextlib.suppress(RuntimeError, MemoryError):  # as where memory ends
                found += [distances(*pair)] * count
    if not found:
        return True
    old, new = map(_of_gradients, zip(*found, strict=True))
    mean = math.exp(sum(math.log(a / b) for a, b in zip(old, new, strict=True)) / len(old))
    return max(old) <= MOST * max(new) and mean <= MOST


def _of_gradients(calls: Sequence[Mapping[str, float]]) -> list[float]:
    """How far the gradient of each weight and bias is, by the roundings of all convolutions of a step."""
    passed_on = sum(call[name] ** 2 for call in calls for name in ("result", "input"))
    return [
        math.sqrt(call[name] ** 2 + passed_on)
        for call in calls
        for name in ("weight", "bias")
        if name in call
    ]


def _is_looked_at(call: TimedCall) -> bool:
    given = [like for like in tree_leaves(call.given) if isinstance(like, Like)]
    single = {call.dtype, *(like.dtype for like in given)} == {torch.float32}
    trained = any(like.requires_grad for like in given)
    return call.node.target in _CONVOLUTIONS and single and trained


def distances(*calls: TimedCall) -> list[dict[str, float]]:
    """How far from float64 results of one convolution, called in several layouts, and its gradients are.

    Each as a share of its norm.
    """
    exact = _computed(calls[0], exact=True)
    every = [_computed(call, exact=False) for call in calls]
    return [{name: max(map(_apart, parts, exact[name])) for name, parts in found.items()} for found in every]


def _computed(call: TimedCall, *, exact: bool) -> dict[str, list[Tensor]]:
    """Parts of the gradients of a convolution's parameters, of its result, and of the gradient of its input.

    Or the same ``exact``, in float64.
    """
    given, kwargs = call.given
    convolve: Any = call.node.target
    named = dict(zip(_CONVOLUTIONS[convolve], given, strict=False)) | kwargs
    named["input"] = _fewer(named["input"])
    generator = torch.Generator().manual_seed(0)
    real = {name: _made(one, generator) if isinstance(one, Like) else one for name, one in named.items()}
    gradient = torch.randn(real["input"].shape[0], *call.result.shape[1:], generator=generator)
    looked_at = _weights(real, gradient.shape[1], transposed="output_padding" in _CONVOLUTIONS[convolve])
    biased = isinstance(real.get("bias"), Tensor)
    found: dict[str, list[Tensor]] = {}
    small = real | {"input": _cropped(real)}
    if exact:
        parts = [(_wide(real | part.changes(real)), gradient[:, part.out].double()) for part in looked_at]
        found["weight"] = [_run(convolve, one, ["weight"], given)[1]["weight"] for one, given in parts]
        found["bias"] = [gradient.sum([0, *range(2, gradient.dim())], dtype=torch.float64)]
        small = _wide(small)
    else:
        whole = _run(convolve, real, ["weight", "bias"] if biased else ["weight"], gradient)[1]
        found["weight"] = [whole["weight"][part.weight] for part in looked_at]
        found |= {"bias": [whole["bias"]]} if biased else {}
    result, passed_on = _run(convolve, small, ["input"], generator)
    return found | {"result": [result], "input": [passed_on["input"]]}


@dataclass(frozen=True)
class _Weights:
    """Some channels of a convolution: the gradient of their weight is that part of the whole."""

    read: slice
    out: slice
    weight: tuple[slice, ...]
    groups: int = 1

    def changes(self, real: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a convolution of these channels that are others."""
        x, weight = real["input"][:, self.read], real["weight"][self.weight]
        return {"input": x.contiguous(), "weight": weight.contiguous(), "bias": None, "groups": self.groups}


def _weights(real: Mapping[str, Any], channels: int, *, transposed: bool) -> list[_Weights]:
    """All channels on one side with a few on the other, and conversely; or some groups.

    All, since the last ones may run by another kernel: products of matrices are cut into blocks.
    """
    read, groups = real["input"].shape[1], real.get("groups", 1)
    if groups > 1:
        taken = min(groups, _GROUPS)
        sides = slice(read // groups * taken), slice(channels // groups * taken)
        return [_Weights(*sides, (sides[0] if transposed else sides[1],), taken)]
    few = [(_few(read), slice(None)), (slice(None), _few(channels))]
    return [_Weights(one, two, (one, two) if transposed else (two, one)) for one, two in few]


def _few(count: int) -> slice:
    """The first of some, and the one in the middle."""
    return slice(None, None, max(1, count // 2))


def _wide(real: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.double() if isinstance(one, Tensor) else one for name, one in real.items()}


def _run(
    convolve: Callable[..., Tensor],
    real: Mapping[str, Any],
    wanted: Sequence[str],
    gradient: Tensor | torch.Generator,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a convolution gives, and the gradients ``wanted`` for a gradient of that, which may be drawn."""
    read = {name: real[name].detach().requires_grad_() for name in wanted}
    with torch.enable_grad():
        result = convolve(**{**real, **read})
        if isinstance(gradient, torch.Generator):
            gradient = torch.randn(result.shape, generator=gradient)
        laid_out = torch.empty_like(result).copy_(gradient)
        found = torch.autograd.grad(result, list(read.values()), laid_out)
    return result.detach(), dict(zip(wanted, found, strict=True))


def _made(like: Like, generator: torch.Generator) -> Tensor:
    """A tensor whose values do not depend on how it lies in memory."""
    empty = torch.empty_strided(like.shape, like.stride, dtype=like.dtype)
    return empty.copy_(torch.randn(like.shape, generator=generator))


def _fewer(like: Like) -> Like:
    """An input with fewer samples, if it is large."""
    each = math.prod(like.shape[1:])
    count = min(like.shape[0], max(1, _ELEMENTS // max(1, each)))
    return Like(torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")[:count])


def _cropped(real: Mapping[str, Any]) -> Tensor:
    """The first places of one sample, laid out alike; no fewer than the kernel reaches over."""
    x, spread = real["input"], real.get("dilation", 1)
    wide = spread if isinstance(spread, int) else max(spread)
    sides = [max(_SIDE, wide * size) for size in real["weight"].shape[2:]]
    index = (slice(1), slice(None), *map(slice, sides))
    return torch.empty_like(x[index]).copy_(x[index])


def _apart(found: Tensor, exact: Tensor) -> float:
    return max(float((found.double() - exact).norm() / exact.norm()), _LEAST)
