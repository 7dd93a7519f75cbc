"""Kernels on random numbers: arguments like those of a step, and results that are compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lowtide.torch_internals import autocast_disabled, modes_disabled

__all__ = ["described", "equal", "for_a_trial", "random_arguments"]


def described(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """What kernels are chosen by: forms of tensors, other arguments, and how PyTorch is set."""
    own = [_form(one) if isinstance(one, torch.Tensor) else repr(one) for one in arguments]
    cudnn = torch.backends.cudnn
    flags = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    more = torch.are_deterministic_algorithms_enabled(), bool(torch.backends.mkldnn.enabled)
    return (*own, torch.get_num_threads(), *flags, *more)


@contextlib.contextmanager
def for_a_trial() -> Iterator[None]:
    """Inside, tensors are real ones, and nothing is recorded; a lack of memory ends what is inside."""
    with modes_disabled(), autocast_disabled(), torch.no_grad(), contextlib.suppress(RuntimeError):
        yield


def random_arguments(arguments: Sequence[Any]) -> list[Any]:
    """The same with random numbers in place of each tensor, which lie in memory like it."""
    return [_random(one) if isinstance(one, torch.Tensor) else one for one in arguments]


def _form(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _random(like: torch.Tensor) -> torch.Tensor:
    shape, stride, dtype, device = _form(like)
    generator = torch.Generator(device).manual_seed(0)
    empty = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return empty.normal_(generator=generator)


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two results are the same, bit for bit and in their form."""
    if one is None or other is None:
        return one is other
    same = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    return same and torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())
