"""Convolutions and transposed convolutions of any rank, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph.access.call import AccessCall, Indices, Rule, Shape, same, whole
from lowtide.graph.access.index import (
    BlockIndex,
    Digit,
    Grouped,
    Index,
    Reshaped,
    Same,
    Slide,
    Spread,
    Whole,
    Window,
)
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


class _Figures:
    """What the last arguments of a convolution say, one number a dimension of space."""

    def __init__(self, call: AccessCall, first: int, weight: Shape) -> None:
        rank = len(weight) - 2
        stride, padding, dilation = ([int(n) for n in call.value(first + k)] for k in range(3))
        self.kernel: Sequence[int] = weight[2:]
        self.stride = stride * (rank // len(stride))
        self.padding = padding * (rank // len(padding))
        self.dilation = dilation * (rank // len(dilation))
        self.transposed = bool(call.value(first + 3))
        self.groups = int(call.value(first + 5))

    def along(self, index: type[Window | Spread], first: int = 2) -> Indices:
        """The rows and columns that windows over the axes of space cover, or that are covered."""
        return tuple(
            index(first + d, kernel, self.stride[d], self.padding[d], self.dilation[d])
            for d, kernel in enumerate(self.kernel)
        )

    def slides(self, first: int, taps: int) -> Indices:
        """The same with the kernel as axes of the domain."""
        return tuple(
            Slide(first + d, taps + d, self.stride[d], self.padding[d], self.dilation[d])
            for d in range(len(self.kernel))
        )


def _convolution(call: AccessCall) -> list[Relation]:
    """Windows over the image; without groups the sum over its channels can be cut."""
    image, weight, bias = (call.value(k) for k in range(3))
    shape, filters = call.outputs[0], call.shape(weight) or ()
    figures = _Figures(call, 3, filters)
    channels, sums, read = _channels(shape, call.shape(image) or (), figures, turned=figures.transposed)
    place = (Same(0), channels, *figures.along(Spread if figures.transposed else Window))
    reads = [(image, place), (weight, (*read, *whole(figures.kernel))), (bias, (Same(1),))]
    return [call.relation(shape, reads, sums=sums, once=[bias])]


def _channels(
    shape: Shape, source: Shape, figures: _Figures, *, turned: bool
) -> tuple[Index, tuple[int, ...], Indices]:
    """The channels read for those written (axis 1), the sum over them, and both dimensions of the weight.

    The weight has the channels written first, then those read in a group; ``turned``, those read first,
    then those written in a group.
    """
    if figures.groups == 1:
        added = Same(len(shape))
        return added, source[1:2], (added, Same(1)) if turned else (Same(1), added)
    per, within = shape[1] // figures.groups, source[1] // figures.groups
    block = BlockIndex(1, per, within)
    return block, (), (block, Reshaped((Digit(1, 1, per),))) if turned else (Same(1), Whole())


def _backward(call: AccessCall) -> list[Relation]:
    """Gradients of image, weight and bias, as far as they are asked for."""
    gradient, image, weight = (call.value(k) for k in range(3))
    figures = _Figures(call, 4, call.shape(weight) or ())
    parts = (_of_image, _of_weight, _of_bias)
    wanted = [part for part, asked in zip(parts, call.value(10), strict=True) if asked]
    return [
        part(call, shape, figures, (gradient, image, weight))
        for part, shape in zip(wanted, call.outputs, strict=True)
    ]


def _of_image(call: AccessCall, shape: Shape, figures: _Figures, given: Sequence[object]) -> Relation:
    """A convolution the other way round: what was a window is spread, and back."""
    gradient, _, weight = given
    turned = not figures.transposed
    channels, sums, read = _channels(shape, call.shape(gradient) or (), figures, turned=turned)
    place = (Same(0), channels, *figures.along(Spread if turned else Window))
    return call.relation(shape, [(gradient, place), (weight, (*read, *whole(figures.kernel)))], sums=sums)


def _of_weight(call: AccessCall, shape: Shape, figures: _Figures, given: Sequence[object]) -> Relation:
    """A sum over the batch and the places at which the kernel was put."""
    gradient, image, _ = given
    windows, moved = (image, gradient) if figures.transposed else (gradient, image)
    extent = call.shape(windows) or ()
    rank, space = len(shape), len(figures.kernel)
    batch, first = Same(rank), rank + 1
    inner: Index = Same(1)
    if figures.groups > 1:
        inner = Grouped(0, 1, shape[0] // figures.groups, shape[1])
    reads = [
        (windows, (batch, Same(0), *same(space, first))),
        (moved, (batch, inner, *figures.slides(first, 2))),
    ]
    return call.relation(shape, reads, sums=(extent[0], *extent[2:]))


def _of_bias(call: AccessCall, shape: Shape, figures: _Figures, given: Sequence[object]) -> Relation:
    """A sum over everything but channels."""
    gradient = given[0]
    extent = call.shape(gradient) or ()
    place = (Same(1), Same(0), *same(len(figures.kernel), 2))
    return call.relation(shape, [(gradient, place)], sums=(extent[0], *extent[2:]))


RULES: dict[str, Rule] = {"convolution": _convolution, "convolution_backward": _backward}
