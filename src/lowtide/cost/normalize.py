"""One kernel for the second half of a BatchNorm, a sum and a ReLU: each value is read and written once.

Only machines with a CUDA device have Triton, so this module is imported there alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["normalized"]

_MOST = 4096
"""Elements of a channel that one program works at."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    source,
    made,
    weight,
    bias,
    mean,
    inverse,
    other,
    channels,
    size,
    block: tl.constexpr,
    add: tl.constexpr,
    relu: tl.constexpr,
):
    """The values of one channel of one image, or a part of them."""
    row = tl.program_id(0)
    channel = row % channels
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < size
    where = row.to(tl.int64) * size + place
    value = tl.load(source + where, mask=inside, other=0.0).to(tl.float32)
    centred = tl.load(weight + channel).to(tl.float32) * (value - tl.load(mean + channel).to(tl.float32))
    scale, shift = tl.load(inverse + channel).to(tl.float32), tl.load(bias + channel).to(tl.float32)
    value = tl.fma(centred, scale, shift)
    if add:
        value = value.to(made.dtype.element_ty).to(tl.float32)
        value = value + tl.load(other + where, mask=inside, other=0.0).to(tl.float32)
    if relu:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(made + where, value.to(made.dtype.element_ty), mask=inside)


def normalized(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    other: torch.Tensor | None,
    relu: bool,
) -> torch.Tensor:
    """``weight * (source - mean) * inverse + bias`` a channel, plus ``other``, without what is negative."""
    made = torch.empty_like(source)
    channels = source.shape[1]
    rows = source.shape[0] * channels
    size = source.numel() // max(1, rows)
    block = min(_MOST, triton.next_power_of_2(max(1, size)))
    grid: Any = (rows, triton.cdiv(size, block))
    with torch.cuda.device(source.device):
        _kernel[grid](
            source,
            made,
            weight,
            bias,
            mean,
            inverse,
            made if other is None else other,
            channels,
            size,
            block=block,
            add=other is not None,
            relu=relu,
            num_warps=4 if block <= 1024 else 8,
        )
    return made
