"""Operators whose fake results are known to lie in memory otherwise than real ones, and how those lie.

``layouts.py`` learns such differences from a step that runs, and captures it again. Tracing takes seconds, so
those that ordinary models meet are known before. What is said here is held against real results like
everything else: where a version of torch does otherwise, that is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.torch_internals import OpOverload, real_kernels

__all__ = ["as_known"]


def as_known(operator: Any, args: Sequence[Any], result: Any) -> Any:
    """The fake result of an operator, as a real one is known to lie; itself where nothing is known.

    Runs in the mode of the fake tensors. Nothing is known of sizes that are symbols.
    """
    rule = _RULES.get(str(operator)) if isinstance(operator, OpOverload) else None
    if rule is None or not isinstance(args[0], torch.Tensor) or args[0].layout is not torch.strided:
        return result
    if any(isinstance(number, torch.SymInt) for number in (*args[0].shape, *args[0].stride())):
        return result
    first = result[0] if isinstance(result, tuple) else result
    if not isinstance(first, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in first.shape):
        return result
    found = rule(first, args)
    return (found, *result[1:]) if isinstance(result, tuple) else found


def _contiguous(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:  # noqa: ARG001
    """The kernel makes its result contiguous, whatever the strides of what it reads, also at size one."""
    made = torch.empty(result.shape, dtype=result.dtype, device=result.device)
    return result if result.stride() == made.stride() else made


def _over_all_memory(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """The kernel copies all memory under its first argument, unless that repeats what lies there."""
    first = args[0]
    bytes_there = first.untyped_storage().nbytes()
    repeats = any(size > 1 and not step for size, step in zip(first.shape, first.stride(), strict=True))
    if repeats and first.numel():
        return result
    memory = torch.empty(bytes_there // max(1, first.itemsize), dtype=first.dtype, device=first.device)
    return torch.as_strided(memory, first.shape, first.stride(), first.storage_offset())


def _as_a_view(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """The strides of dimensions of size one follow from the new shape, also where that is the old one."""
    if 1 not in result.shape:
        return result
    first = args[0]
    with real_kernels():
        there = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
        stride = there.view(result.shape).stride()
    return result if stride == result.stride() else result.as_strided(result.shape, stride)


def _as_a_product(result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """On the CPU the kernel multiplies its first two arguments."""
    return torch.empty_like(args[0] * args[1]) if result.device.type == "cpu" else result


_RULES: dict[str, Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]] = {
    "aten._log_softmax_backward_data.default": _contiguous,
    "aten._softmax_backward_data.default": _contiguous,
    "aten.native_layer_norm_backward.default": _contiguous,
    "aten.native_dropout_backward.default": _as_a_product,
    "aten.copy.default": _over_all_memory,
    "aten.view.default": _as_a_view,
}
