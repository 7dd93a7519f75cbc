"""Whether two tensors are equal bit for bit: NaN equals the same NaN, and -0 is not 0."""

from __future__ import annotations

import torch

from lowtide.distributed_internals import local_of
from lowtide.torch_internals import sparse_entries

__all__ = ["largest_difference", "same_bits"]

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """The same type, layout, shape and bits; sparse tensors with the same entries in the same order.

    Of tensors that are spread over processes, the parts of this one are compared.
    """
    if one is None or other is None:
        return one is other
    one, other = local_of(one), local_of(other)
    if (one.dtype, one.layout, one.shape) != (other.dtype, other.layout, other.shape):
        return False
    if one.layout is torch.strided:
        return torch.equal(_bits(one), _bits(other))
    return all(same_bits(a, b) for a, b in zip(_parts(one), _parts(other), strict=True))


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of an element over the largest element; infinite where only one is a number."""
    if one.shape != other.shape:
        return float("inf")
    if one.layout is not torch.strided or other.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    both = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(both, torch.zeros_like(a), a - b).abs()
    if not bool(apart.isfinite().all()):
        return float("inf")
    sizes = a.abs()
    scale = float(sizes[sizes.isfinite()].max()) if bool(sizes.isfinite().any()) else 0.0
    return float(apart.max()) / (scale or 1.0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.resolve_neg().contiguous().view(_WHOLE[real.itemsize])


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return sparse_entries(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
