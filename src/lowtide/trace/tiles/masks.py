"""Random masks of a step in tiles, kept as bits.

A random operator draws for the whole tensor at once: a part of it cannot be drawn alone and be the same. So
masks are drawn before the loop, one after the other, and each is packed, eight elements of its last dimension
in a byte. A tile takes its rows of bytes and unpacks them. All of it is done by operators of PyTorch that the
plan counts like any others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowtide.graph import Op, Rect
from lowtide.trace.step.builder import Call

__all__ = ["drawn_as_mask", "is_mask", "pack", "packed_box", "packed_like", "unpack", "unpacked_box"]

aten = torch.ops.aten
_BITS = 8
_TURN = 0x8040201008040201 - (1 << 64)
"""Times eight bytes of 0 or 1: their bits in the highest byte, that of the first byte highest.
Times a byte: its highest bit as that of the first byte, the next as that of the second, and so on."""
_HIGHEST = 0x8080808080808080 - (1 << 64)
_DRAWN = ("aten.bernoulli", "lowtide.bernoulli", "aten.native_dropout")
_WORTH = 1024
"""Masks of fewer elements stay as they are."""


def is_mask(op: Op, value: torch.Tensor) -> bool:
    """Whether what an operator draws is nothing but zeros and ones, and large enough to be packed."""
    drawn = op.random and op.kind.startswith(_DRAWN)
    zeros_and_ones = value.dtype is torch.bool or not op.kind.endswith("dropout")
    return drawn and zeros_and_ones and value.dim() > 0 and value.numel() >= _WORTH


def packed_box(box: Rect) -> Rect:
    """The bytes that hold a box of a mask."""
    return Rect((*box.lo[:-1], box.lo[-1] // _BITS), (*box.hi[:-1], -(-box.hi[-1] // _BITS)))


def unpacked_box(box: Rect, shape: tuple[int, ...]) -> Rect:
    """What of a mask of this shape these bytes hold."""
    return Rect((*box.lo[:-1], box.lo[-1] * _BITS), (*box.hi[:-1], min(box.hi[-1] * _BITS, shape[-1])))


def packed_like(mask: torch.Tensor) -> torch.Tensor:
    """How a packed mask lies in memory."""
    return torch.empty(*mask.shape[:-1], -(-mask.shape[-1] // _BITS), dtype=torch.uint8, device="meta")


def drawn_as_mask(graph: fx.Graph, call: Call, mask: torch.Tensor) -> fx.Node | None:
    """A node that draws yes and no in place of ones and zeros; None where it would draw others.

    The host draws one number for an element, whatever its type.
    """
    if call.source is not aten.bernoulli.p or mask.device.type != "cpu":
        return None
    where: dict[str, Any] = {"dtype": torch.bool, "device": mask.device}
    form = list(mask.shape), list(mask.stride())
    memory = graph.call_function(aten.empty_strided.default, form, where)
    return graph.call_function(call.source, (memory, *call.args[1:]), dict(call.kwargs))


def pack(graph: fx.Graph, node: fx.Node, mask: torch.Tensor, *, numbers: bool) -> fx.Node:
    """Nodes that pack a mask, of ones and zeros where it has ``numbers``."""
    if numbers:
        node = graph.call_function(aten.ne.Scalar, (node, 0))
    if not mask.is_contiguous():
        node = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    if mask.shape[-1] % _BITS:
        missing = -mask.shape[-1] % _BITS
        node = graph.call_function(aten.constant_pad_nd.default, (node, [0, missing], False))
    words = graph.call_function(aten.view.dtype, (node, torch.int64))
    gathered = graph.call_function(aten.mul.Scalar, (words, _TURN))
    single = graph.call_function(aten.view.dtype, (gathered, torch.uint8))
    last = graph.call_function(aten.slice.Tensor, (single, -1, _BITS - 1, 2**63 - 1, _BITS))
    return graph.call_function(aten.clone.default, (last,), {"memory_format": torch.contiguous_format})


def unpack(graph: fx.Graph, node: fx.Node, box: Rect, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    """Nodes that give the mask that these bytes hold, as far as there is one."""
    words = graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.int64})
    spread = graph.call_function(aten.mul.Scalar, (words, _TURN))
    marked = graph.call_function(aten.bitwise_and.Scalar, (spread, _HIGHEST))
    single = graph.call_function(aten.view.dtype, (marked, torch.uint8))
    length = unpacked_box(box, shape).shape[-1]
    if length < box.shape[-1] * _BITS:
        single = graph.call_function(aten.slice.Tensor, (single, -1, 0, length))
    mask = graph.call_function(aten.ne.Scalar, (single, 0))
    if dtype is torch.bool:
        return mask
    return graph.call_function(aten._to_copy.default, (mask,), {"dtype": dtype})
