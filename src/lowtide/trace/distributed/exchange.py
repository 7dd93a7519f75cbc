"""Operators by which the devices along an axis of a mesh exchange parts of tensors; each with its gradient.

    exchange   each device gets the range of a dimension that it wants, from those that hold it
    add_up     each device gets the sum of all parts
    spread     all devices have the same tensor, and each uses it for something of its own

``gradient_summed`` is ``spread`` of a parameter: it takes no memory, as what it gives is a view. Its sums
are ``alike``, and no others in backward.

The gradient of a piece goes back to where it came from, and is added up there. Where all devices compute the
same from what they got (``alike``), each has the whole gradient already, and keeps its own piece of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.trace.distributed.wires import Wire, wire_of

__all__ = [
    "ADD_UP", "EXCHANGE", "SPREAD", "begin_exchange", "bytes_on_their_way", "exchanged", "gradient_summed",
]  # fmt: skip

Piece = tuple[int, int, int]
"""A device, and from where to where."""


def _pieces(flat: Sequence[int]) -> list[Piece]:
    return [(flat[k], flat[k + 1], flat[k + 2]) for k in range(0, len(flat), 3)]


def _with(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of a tensor with another length."""
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


def exchanged(
    x: Tensor, dim: int, sends: Sequence[int], receives: Sequence[int], length: int, wire: Wire
) -> Tensor:
    """The range of a dimension that comes over a wire; what arrives at one place twice is added up."""
    out = [(to, x.narrow(dim, lo, hi - lo)) for to, lo, hi in _pieces(sends)]
    coming = _Coming(x, dim, receives, length, wire.place)
    wire.swap([(to, piece.contiguous()) for to, piece in out if to != wire.place], coming.wanted)
    coming.put([piece for to, piece in out if to == wire.place])
    return coming.result


def begin_exchange(
    x: Tensor, dim: int, sends: Sequence[int], receives: Sequence[int], length: int, wire: Wire
) -> tuple[Tensor, Callable[[], None]]:
    """Start the same, with copies of all parts; who reads the result calls what comes with it before."""
    out = [
        (to, x.narrow(dim, lo, hi - lo).clone(memory_format=torch.contiguous_format))
        for to, lo, hi in _pieces(sends)
    ]
    coming = _Coming(x, dim, receives, length, wire.place)
    arrived = wire.begin_swap([(to, piece) for to, piece in out if to != wire.place], coming.wanted)
    kept = [piece for to, piece in out if to == wire.place]
    del out
    moving = [coming]

    def ended() -> None:
        arrived()
        moving.pop().put(kept)
        kept.clear()

    return coming.result, ended


def bytes_on_their_way(
    x: Tensor, dim: int, sends: Sequence[int], receives: Sequence[int], mine: int
) -> list[int]:
    """What an exchange that was begun takes beside its result: the bytes of each part."""
    row = x.nbytes // max(1, x.shape[dim])
    others = [piece for piece in _pieces(receives) if piece[0] != mine]
    return [row * (hi - lo) for _, lo, hi in (*_pieces(sends), *others)]


class _Coming:
    """What is made of a tensor by an exchange, and memory for the parts that come from others."""

    def __init__(self, x: Tensor, dim: int, receives: Sequence[int], length: int, mine: int) -> None:
        self.result = x.new_zeros(_with(x, dim, length))
        places = [(come, self.result.narrow(dim, lo, hi - lo)) for come, lo, hi in _pieces(receives)]
        self._parts = [(place, None if come == mine else x.new_empty(place.shape)) for come, place in places]
        pairs = zip(places, self._parts, strict=True)
        self.wanted = [(come, part) for (come, _), (_, part) in pairs if part is not None]

    def put(self, kept: Iterable[Tensor]) -> None:
        """Have everything in the result, in the order of the devices; ``kept`` are this one's own parts."""
        own = iter(kept)
        for place, part in self._parts:
            place.add_(next(own) if part is None else part)


@torch.library.custom_op("lowtide::exchange", mutates_args=())
def _exchange(
    x: Tensor, dim: int, sends: Sequence[int], receives: Sequence[int], length: int, alike: bool, wire: str
) -> Tensor:
    return exchanged(x, dim, sends, receives, length, wire_of(wire))


@_exchange.register_fake
def _(
    x: Tensor, dim: int, sends: Sequence[int], receives: Sequence[int], length: int, alike: bool, wire: str
) -> Tensor:
    return x.new_empty(_with(x, dim, length))


@torch.library.custom_op("lowtide::add_up", mutates_args=())
def _add_up(x: Tensor, alike: bool, wire: str) -> Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    wire_of(wire).add_up(found)
    return found


@_add_up.register_fake
def _(x: Tensor, alike: bool, wire: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lowtide::spread", mutates_args=())
def _spread(x: Tensor, wire: str) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_spread.register_fake
def _(x: Tensor, wire: str) -> Tensor:
    return x.new_empty(x.shape)


EXCHANGE: Any = torch.ops.lowtide.exchange.default
ADD_UP: Any = torch.ops.lowtide.add_up.default
SPREAD: Any = torch.ops.lowtide.spread.default


def _note_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.sends, ctx.receives, _, ctx.alike, ctx.wire = inputs
    ctx.length = x.shape[ctx.dim]


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    nothing = (None,) * 6
    if not ctx.alike:
        return EXCHANGE(gradient, ctx.dim, ctx.receives, ctx.sends, ctx.length, False, ctx.wire), *nothing
    mine = wire_of(ctx.wire).place
    found = gradient.new_zeros(_with(gradient, ctx.dim, ctx.length))
    for (lo, hi), (first, end) in zip(_own(ctx.sends, mine), _own(ctx.receives, mine), strict=True):
        found = torch.slice_scatter(found, gradient.narrow(ctx.dim, first, end - first), ctx.dim, lo, hi)
    return found, *nothing


def _own(flat: Sequence[int], mine: int) -> Iterable[tuple[int, int]]:
    """What a device keeps."""
    return [(lo, hi) for other, lo, hi in _pieces(flat) if other == mine]


def _note_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.alike, ctx.wire = inputs


def _sum_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return gradient if ctx.alike else ADD_UP(gradient, False, ctx.wire), None, None


def _note_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.wire = inputs[1]


def _spread_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return ADD_UP(gradient, False, ctx.wire), None


_exchange.register_autograd(_exchange_back, setup_context=_note_exchange)
_add_up.register_autograd(_sum_back, setup_context=_note_sum)
_spread.register_autograd(_spread_back, setup_context=_note_spread)


class _GradientSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wires: tuple[str, ...]) -> Tensor:
        ctx.wires = wires
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        for wire in ctx.wires:
            gradient = ADD_UP(gradient, True, wire)
        return gradient, None


def gradient_summed(x: Tensor, wires: tuple[str, ...]) -> Tensor:
    """The same tensor, whose gradient is that of all devices along these axes."""
    found: Tensor = _GradientSummed.apply(x, wires)  # type: ignore[no-untyped-call]
    return found
