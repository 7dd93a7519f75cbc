"""Operators with windows over an image: convolution and pooling.

At the image's edges a part is padded as the whole would be, inside it is not: how much follows from how far
the access relation reaches beyond the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from lowtide.graph import Rect
from lowtide.trace.operators.site import HeldPart, Site, replaced, with_range

__all__ = ["adaptive_pool", "average_pool", "convolution", "max_pool"]

aten = torch.ops.aten


def _numbers(value: Sequence[int] | int, rank: int) -> list[int]:
    """One number a dimension of space."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * (rank // len(numbers))


def _margins(inner: Rect, outer: Rect) -> tuple[list[int], list[int]]:
    """How much the outer box has more, below and above each dimension."""
    below = [lo - first for lo, first in zip(inner.lo, outer.lo, strict=True)]
    return below, [end - hi for hi, end in zip(inner.hi, outer.hi, strict=True)]


def _reach(site: Site, x: HeldPart) -> Rect:
    """What the windows cover, beyond the edges too."""
    reach = site.reach[x.position]
    assert reach is not None
    return reach


def convolution(site: Site) -> fx.Node:
    """A convolution, or a transposed one, of any rank; of a part of the channels read, what it adds."""
    x, weight = site.arguments["input"], site.arguments["weight"]
    rank = len(weight.shape) - 2
    numbers = {key: _numbers(site.arguments[key], rank) for key in ("stride", "padding", "dilation")}
    if site.arguments["transposed"]:
        return _transposed(site, numbers)
    windows = [d * (k - 1) + 1 for k, d in zip(weight.shape[2:], numbers["dilation"], strict=True)]
    node, numbers["padding"] = _padded(site, x, windows, numbers["stride"], 0)
    size = site.shape[1] // site.arguments["groups"]
    lo, hi = site.wanted.lo[1], site.wanted.hi[1]
    groups = -(-hi // size) - lo // size
    start, end = (lo, hi) if groups == 1 else (lo // size * size, -(-hi // size) * size)
    read = (0, weight.shape[1]) if site.over is None else next(iter(site.over))
    filters = site.cut(weight, replaced(weight.whole, {0: (lo, hi), 1: read}))
    filters = site.pad(filters, [lo - start, *[0] * (rank + 1)], [end - hi, *[0] * (rank + 1)])
    filters = site.filters(filters) if rank == 2 else filters
    node = site.again(input=node, weight=filters, bias=_bias(site, start, end), **numbers, groups=groups)
    return site.crop(node, with_range(site.wanted, 1, start, end), site.wanted)


def _bias(site: Site, start: int, end: int) -> fx.Node | None:
    """The bias of the wanted channels, zeros around it for those that are computed beside them.

    Of several parts of a sum only one has it.
    """
    bias: HeldPart | None = site.arguments["bias"]
    lo, hi = site.wanted.lo[1], site.wanted.hi[1]
    if bias is None or bias.part is None:
        return None
    return site.pad(site.cut(bias, Rect((lo,), (hi,))), [lo - start], [end - hi])


def _padded(
    site: Site, x: HeldPart, windows: Sequence[int], stride: Sequence[int], value: float, half: bool = False
) -> tuple[fx.Node, list[int]]:
    """The part with its padding, and what of it is left to the operator: equal amounts on both sides."""
    reach = _reach(site, x)
    box = reach.clip(x.shape)
    rank, lead = len(windows), reach.ndim - len(windows)
    if box.empty:
        return site.full(reach.shape, value), [0] * rank
    below, above = _margins(box, reach)
    padding = [0] * rank
    for d, (window, step) in enumerate(zip(windows, stride, strict=True)):
        margin, length = below[lead + d], box.shape[lead + d]
        fits = (length + 2 * margin - window) // step + 1 == site.wanted.shape[lead + d]
        if fits and not (half and 2 * margin > window):
            padding[d], below[lead + d], above[lead + d] = margin, 0, 0
    return site.pad(site.cut(x, box), below, above, value), padding


def _transposed(site: Site, numbers: dict[str, list[int]]) -> fx.Node:
    """Every element of the part spread over its window, and the wanted box of that."""
    x, weight, bias = (site.arguments[name] for name in ("input", "weight", "bias"))
    bias = None if bias is None or bias.part is None else bias
    box = _reach(site, x).clip(x.shape)
    size = weight.shape[1]
    lo, hi = site.wanted.lo[1], site.wanted.hi[1]
    groups = -(-hi // size) - lo // size
    start, end = (lo, hi) if groups == 1 else (lo // size * size, -(-hi // size) * size)
    made = with_range(site.wanted, 1, start, end)
    if box.empty:
        node, later = site.full(made.shape, 0), bias is not None
    else:
        first = replaced(weight.whole, {0: (box.lo[1], box.hi[1]), 1: _digits(lo, hi, size, groups)})
        ranges = {}
        for d, kernel in enumerate(weight.shape[2:]):
            step, dilation = numbers["stride"][d], numbers["dilation"][d]
            begin = box.lo[2 + d] * step - numbers["padding"][d]
            ranges[2 + d] = (begin, begin + (box.shape[2 + d] - 1) * step + dilation * (kernel - 1) + 1)
        spread = replaced(made, ranges)
        later = bias is not None and not spread.contains(made)
        zeros = [0] * len(ranges)
        filters = site.cut(weight, first)
        node = site.again(
            input=site.cut(x, box),
            weight=site.filters(filters) if len(ranges) == 2 else filters,
            bias=None if later else _bias(site, start, end),
            **{**numbers, "padding": zeros, "output_padding": zeros},
            groups=groups,
        )
        kept = spread.intersect(made)
        node = site.pad(site.crop(node, spread, kept), *_margins(kept, made))
    if later:
        shape = [-1, *[1] * (len(site.shape) - 2)]
        added = site.write(aten.reshape.default, _bias(site, start, end), shape)
        node = site.write(aten.add.Tensor, node, added)
    return site.crop(node, made, site.wanted)


def _digits(lo: int, hi: int, size: int, groups: int) -> tuple[int, int]:
    """The filters of a group that are used: those of the wanted channels, or all where there are several."""
    return (lo % size, (hi - 1) % size + 1) if groups == 1 else (0, size)


def _figures(site: Site, rank: int) -> tuple[list[int], list[int]]:
    """Kernel and stride of a pool."""
    kernel = _numbers(site.arguments["kernel_size"], rank)
    return kernel, _numbers(site.arguments["stride"] or kernel, rank)


def _rank(site: Site) -> int:
    """Over how many dimensions the operator's windows go, as its name says."""
    return next(n for n in (1, 2, 3) if f"{n}d" in site.op.kind)


def max_pool(site: Site) -> fx.Node:
    """The largest element of each window."""
    x, rank = site.arguments["self"], _rank(site)
    kernel, stride = _figures(site, rank)
    dilation = _numbers(site.arguments["dilation"], rank)
    windows = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    least = float("-inf") if site.dtype.is_floating_point else torch.iinfo(site.dtype).min
    node, padding = _padded(site, x, windows, stride, least, half=True)
    return site.again(self=node, padding=padding, ceil_mode=False)


def average_pool(site: Site) -> fx.Node:
    """The mean of each window; at the edges of what the whole would divide by."""
    x, rank = site.arguments["self"], _rank(site)
    margin = _numbers(site.arguments["padding"], rank) if site.arguments["count_include_pad"] else [0] * rank
    reach = _reach(site, x)
    lead = reach.ndim - rank
    box = reach.clip(x.shape)
    node = site.pad(site.cut(x, box), *_margins(box, reach))
    counted = replaced(
        reach, {lead + d: (-margin[d], x.shape[lead + d] + margin[d]) for d in range(rank)}
    ).intersect(reach)
    plain = {"padding": [0] * rank, "ceil_mode": False, "count_include_pad": True}
    if counted == reach or site.arguments["divisor_override"] is not None:
        return site.again(self=node, **plain)
    sums = site.again(self=node, **plain, divisor_override=1)
    below, above = _margins(counted, reach)
    ones = site.full([*[1] * lead, *counted.shape[lead:]], 1)
    counts = site.again(self=site.pad(ones, below, above), **plain, divisor_override=1)
    return site.write(aten.div.Tensor, sums, counts)


def adaptive_pool(site: Site) -> fx.Node:
    """The mean or the largest element of each of nearly equal parts.

    Where the parts have different lengths, each one is taken by itself: a cut image would be divided anew.
    """
    x, rank = site.arguments["self"], _rank(site)
    lead = len(x.shape) - rank
    return _pieces(site, x, list(range(lead, len(x.shape))), site.wanted)


def _pieces(site: Site, x: HeldPart, dims: list[int], wanted: Rect) -> fx.Node:
    """The box, one element at a time along the first of these dimensions in which parts differ."""
    ends = {d: (x.shape[d], site.shape[d], *list(wanted)[d]) for d in dims}
    for d, (length, parts, lo, hi) in ends.items():
        if length % parts and (lo, hi) != (0, parts) and hi - lo > 1:
            made = [_pieces(site, x, dims, with_range(wanted, d, k, k + 1)) for k in range(lo, hi)]
            return site.write(aten.cat.default, made, d)
    ranges = {d: (lo * n // parts, -(-hi * n // parts)) for d, (n, parts, lo, hi) in ends.items()}
    node = site.cut(x, replaced(wanted, ranges))
    return site.again(self=node, output_size=[list(wanted.shape)[d] for d in dims])
