"""A convolution in slices of the batch: its workspace is that of one slice.

Some kernels unfold every image of the batch before they begin. Whether slices give the same bits, and need
less, depends on the kernels of the device: they are used only where a run of both has found that they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from lowtide.cost.clock import clock_of
from lowtide.cost.kernel_trial import described, equal, for_a_trial, random_arguments

__all__ = ["bounds", "in_slices", "slices_for"]

aten = torch.ops.aten
_LESS = 0.75
"""Slices must need less than this share of the workspace."""
_KNOWN: dict[tuple[Any, ...], int] = {}
"""What was found in this process."""


def bounds(batch: int, slices: int) -> list[tuple[int, int]]:
    """Where each slice of a batch begins and ends; the first ones are the larger."""
    size, more = divmod(batch, slices)
    ends = [size * k + min(k, more) for k in range(slices + 1)]
    return list(pairwise(ends))


def slices_for(arguments: Sequence[Any]) -> int:
    """In how many slices a convolution is best run for little memory: 1 where that does not help.

    They are as few as need no more workspace than its result. Found by a run on random numbers, once in a
    process; tensors among the ``arguments`` of ``aten.convolution`` say what theirs are like.
    """
    key = described(arguments)
    if key not in _KNOWN:
        _KNOWN[key] = 1
        with for_a_trial():
            _KNOWN[key] = _found(random_arguments(arguments))
    return _KNOWN[key]


def in_slices(arguments: Sequence[Any], slices: int) -> torch.Tensor:
    """What ``aten.convolution`` gives for these arguments."""
    image, *others = arguments
    parts = [aten.convolution.default(image[lo:hi], *others) for lo, hi in bounds(len(image), slices)]
    whole: torch.Tensor = aten.cat.default(parts)
    return whole


def _found(arguments: Sequence[Any]) -> int:
    clock = clock_of(arguments[0].device)
    whole, _, needed = clock.first(partial(aten.convolution.default, *arguments))
    slices, taken, batch = 1, needed, len(arguments[0])
    while taken > whole.nbytes and slices < batch:
        slices = min(2 * slices, batch)
        made, _, taken = clock.first(partial(in_slices, arguments, slices))
        if not equal(whole, made):
            return 1
    return slices if taken < _LESS * needed else 1
