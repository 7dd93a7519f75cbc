"""Index: where one dimension of an input is read, told from the part of the result that is wanted.

The *domain* of a relation is the axes of the output, then the axes that are summed over. An Index takes a
part of the domain, one half-open range an axis, to the half-open range of one input dimension. Ranges are
the smallest that hold everything read; they may have gaps, and may reach over the ends of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = [
    "LONGEST_TABLE",
    "Adaptive",
    "At",
    "BlockIndex",
    "Digit",
    "Either",
    "Grouped",
    "Index",
    "Only",
    "Range",
    "Reshaped",
    "Same",
    "Shift",
    "Slide",
    "Spans",
    "Spread",
    "Until",
    "Whole",
    "Window",
]

LONGEST_TABLE = 1 << 22
"""A dimension with more elements is not written down element by element: all of it is taken for read."""
Range = tuple[int, int]
"""``lo <= i < hi``; empty where ``hi <= lo``."""


class Index(msgspec.Struct, frozen=True):
    """How one dimension of an input follows from the domain."""

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """What is read of a dimension of this length; no range of the domain is empty."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it reads of {length} in {domain}")


class Same(Index, frozen=True):
    """Element i for element i."""

    axis: int

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """The range of the axis."""
        return domain[self.axis]


class Whole(Index, frozen=True):
    """Everything, whatever is wanted; the way of a broadcast dimension too, which has one element."""

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """The whole dimension."""
        return 0, length


class At(Index, frozen=True):
    """One element, whatever is wanted."""

    position: int

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """The element."""
        return self.position, self.position + 1


class Shift(Index, frozen=True):
    """Element ``i * step + offset`` for element i."""

    axis: int
    offset: int
    step: int = 1

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the first to the last."""
        lo, hi = domain[self.axis]
        return lo * self.step + self.offset, (hi - 1) * self.step + self.offset + 1


class Until(Index, frozen=True):
    """Everything up to element i for element i: running sums, causal attention."""

    axis: int

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the beginning to the end of the axis's range."""
        return 0, domain[self.axis][1]


class Window(Index, frozen=True):
    """``kernel`` elements, ``dilation`` apart, from ``i * stride - padding`` on for element i."""

    axis: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the first window to the last."""
        lo, hi = domain[self.axis]
        last = (hi - 1) * self.stride + (self.kernel - 1) * self.dilation
        return lo * self.stride - self.padding, last - self.padding + 1


class Spread(Index, frozen=True):
    """The windows that hold element i: the inverse of a Window with the same figures."""

    axis: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the first window that meets the range to the last."""
        lo, hi = domain[self.axis]
        reach = (self.kernel - 1) * self.dilation
        first = -((reach - lo - self.padding) // self.stride)
        last = (hi - 1 + self.padding) // self.stride
        while first <= last and not self._meets(first, lo, hi):
            first += 1
        while first < last and not self._meets(last, lo, hi):
            last -= 1
        return first, max(first, last + 1)

    def _meets(self, window: int, lo: int, hi: int) -> bool:
        """Whether an element of the window is in the range: dilated windows may step over it."""
        start = window * self.stride - self.padding
        tap = max(0, -((start - lo) // self.dilation))
        return tap < self.kernel and start + tap * self.dilation < hi


class Slide(Index, frozen=True):
    """Element ``i * stride - padding + k * dilation`` for element i of one axis and k of another.

    A Window whose kernel is an axis of the domain: how the gradient of a weight reads.
    """

    axis: int
    tap: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the first element to the last."""
        (lo, hi), (first, last) = domain[self.axis], domain[self.tap]
        start = lo * self.stride + first * self.dilation - self.padding
        return start, (hi - 1) * self.stride + (last - 1) * self.dilation - self.padding + 1


class Adaptive(Index, frozen=True):
    """Element i of ``parts`` nearly equal parts of ``length``; with both exchanged, the parts that hold i."""

    axis: int
    parts: int
    length: int

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the beginning of the first part to the end of the last."""
        lo, hi = domain[self.axis]
        return lo * self.length // self.parts, -(-hi * self.length // self.parts)


class BlockIndex(Index, frozen=True):
    """A block of ``length`` elements for each block of ``size`` of the axis: groups of channels."""

    axis: int
    size: int
    length: int

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """All blocks that the range touches."""
        lo, hi = domain[self.axis]
        return lo // self.size * self.length, ((hi - 1) // self.size + 1) * self.length


class Grouped(Index, frozen=True):
    """Element j of block ``i // size``, blocks having ``length`` elements, for i and j of two axes."""

    axis: int
    inner: int
    size: int
    length: int

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the first element in the first block to the last in the last."""
        (lo, hi), (first, last) = domain[self.axis], domain[self.inner]
        return lo // self.size * self.length + first, (hi - 1) // self.size * self.length + last


class Digit(msgspec.Struct, frozen=True):
    """``(i // stride) % length`` of an axis, counted ``weight`` times."""

    axis: int
    stride: int
    length: int
    weight: int = 1

    def span(self, domain: Sequence[Range]) -> Range:
        """First and last value, the last included."""
        lo, hi = domain[self.axis]
        block = self.stride * self.length
        if lo // block != (hi - 1) // block:
            return 0, (self.length - 1) * self.weight
        first, last = lo // self.stride % self.length, (hi - 1) // self.stride % self.length
        return first * self.weight, last * self.weight


class Reshaped(Index, frozen=True):
    """The sum of digits of several axes: dimensions that were merged or split."""

    digits: tuple[Digit, ...]

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """From the sum of the first values to the sum of the last."""
        spans = [digit.span(domain) for digit in self.digits]
        return sum(lo for lo, _ in spans), sum(hi for _, hi in spans) + 1


class Spans(Index, frozen=True):
    """A range written down for each element: resizing, reflection."""

    axis: int
    ranges: tuple[Range, ...]

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """The smallest range that holds those of all elements wanted."""
        lo, hi = domain[self.axis]
        found = [(a, b) for a, b in self.ranges[lo:hi] if a < b]
        return (min(a for a, _ in found), max(b for _, b in found)) if found else (0, 0)


class Only(Index, frozen=True):
    """As another Index where the axis holds ``position``, else nothing: one of several stacked inputs."""

    axis: int
    position: int
    index: Index

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """The other's range, or an empty one."""
        lo, hi = domain[self.axis]
        return self.index.span(domain, length) if lo <= self.position < hi else (0, 0)


class Either(Index, frozen=True):
    """Both of two: a tensor that an operator is given twice."""

    first: Index
    second: Index

    def span(self, domain: Sequence[Range], length: int) -> Range:
        """The smallest range that holds both; an empty one adds nothing."""
        one, other = self.first.span(domain, length), self.second.span(domain, length)
        if min(one[1], length) <= max(one[0], 0):
            return other
        if min(other[1], length) <= max(other[0], 0):
            return one
        return min(one[0], other[0]), max(one[1], other[1])
