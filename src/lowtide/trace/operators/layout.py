"""Operators that only rearrange: views, crops, padding, joining."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from lowtide.graph import Rect
from lowtide.trace.operators.site import HeldPart, Site, broadcast, with_range

__all__ = [
    "cat",
    "chosen",
    "constant_pad",
    "expand",
    "flip",
    "permute",
    "select",
    "sliced",
    "split",
    "stack",
    "view",
]

aten = torch.ops.aten
Ranges = list[tuple[int, int]]


def view(site: Site) -> fx.Node:
    """The same elements in another shape.

    The two shapes fall into groups of dimensions with equal products. In each group the part is made a
    run of consecutive elements, filled with zeros where it has gaps; so is what is wanted.
    """
    x: HeldPart = site.arguments["self"]
    need = site.need(x)
    groups = list(_groups(x.shape, site.shape))
    inner = [_run([x.shape[d] for d in dims], [list(need)[d] for d in dims]) for dims, _ in groups]
    outer = [_run([site.shape[d] for d in dims], [list(site.wanted)[d] for d in dims]) for _, dims in groups]
    box, hull = list(need), list(site.wanted)
    for (ins, outs), given, wanted in zip(groups, inner, outer, strict=True):
        for dims, ranges, change in ((ins, given, box), (outs, wanted, hull)):
            for dim, pair in zip(dims, ranges, strict=True):
                change[dim] = pair
    node = _fit(site, site.cut(x, need), list(need), box)
    flat = [_interval([x.shape[d] for d in dims], r) for (dims, _), r in zip(groups, inner, strict=True)]
    goal = [_interval([site.shape[d] for d in dims], r) for (_, dims), r in zip(groups, outer, strict=True)]
    node = _reshaped(site, node, [hi - lo for lo, hi in box], [hi - lo for lo, hi in flat])
    node = _fit(site, node, flat, goal)
    node = _reshaped(site, node, [hi - lo for lo, hi in goal], [hi - lo for lo, hi in hull])
    return site.crop(node, Rect(tuple(lo for lo, _ in hull), tuple(hi for _, hi in hull)), site.wanted)


def _reshaped(site: Site, node: fx.Node, shape: list[int], wanted: list[int]) -> fx.Node:
    return node if shape == wanted else site.write(aten.reshape.default, node, wanted)


def _fit(site: Site, node: fx.Node, given: Ranges, wanted: Ranges) -> fx.Node:
    """The node cut off where it holds too much, and filled with zeros where too little."""
    kept = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(given, wanted, strict=True)]
    for dim, ((lo, hi), (first, end)) in enumerate(zip(given, kept, strict=True)):
        if (first, end) != (lo, hi):
            node = site.write(aten.slice.Tensor, node, dim, first - lo, end - lo)
    before = [lo - first for (lo, _), (first, _) in zip(kept, wanted, strict=True)]
    after = [end - hi for (_, hi), (_, end) in zip(kept, wanted, strict=True)]
    return site.pad(node, before, after)


def _groups(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dimensions of one shape and of the other that hold the same elements; sizes of 1 left out."""
    left = [d for d, size in enumerate(first) if size != 1]
    right = [d for d, size in enumerate(second) if size != 1]
    while left:
        ins, outs = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(first[d] for d in ins)) != (b := math.prod(second[d] for d in outs)):
            if a < b:
                ins.append(left.pop(0))
            else:
                outs.append(right.pop(0))
        yield ins, outs


def _run(sizes: list[int], ranges: Ranges) -> Ranges:
    """The smallest box around these ranges whose elements follow each other without a gap."""
    first = next((k for k, (lo, hi) in enumerate(ranges) if hi - lo > 1), len(ranges))
    return ranges[: first + 1] + [(0, size) for size in sizes[first + 1 :]]


def _interval(sizes: list[int], ranges: Ranges) -> tuple[int, int]:
    """Where a box without gaps begins and ends among all elements."""
    start = 0
    for size, (lo, _) in zip(sizes, ranges, strict=True):
        start = start * size + lo
    return start, start + math.prod(hi - lo for lo, hi in ranges)


def expand(site: Site) -> fx.Node:
    """Copies along dimensions of size 1."""
    x: HeldPart = site.arguments["self"]
    node = site.cut(x, broadcast(x.shape, site.wanted))
    return site.write(aten.expand.default, node, list(site.wanted.shape))


def permute(site: Site) -> fx.Node:
    """Dimensions in another order."""
    x: HeldPart = site.arguments["self"]
    order = list(range(len(x.shape)))
    if site.op.kind == "aten.permute":
        order = [d % len(order) for d in site.arguments["dims"]]
    elif site.op.kind == "aten.t":
        order.reverse()
    elif order:
        a, b = site.arguments["dim0"], site.arguments["dim1"]
        order[a], order[b] = order[b], order[a]
    box = list(x.whole)
    for dim, source in enumerate(order):
        box[source] = list(site.wanted)[dim]
    return site.again(self=site.cut(x, Rect(tuple(lo for lo, _ in box), tuple(hi for _, hi in box))))


def sliced(site: Site) -> fx.Node:
    """Every step-th element from a start."""
    x: HeldPart = site.arguments["self"]
    dim, step = site.arguments["dim"] % len(x.shape), site.arguments["step"]
    start, _, _ = slice(site.arguments["start"], site.arguments["end"]).indices(x.shape[dim])
    lo, hi = list(site.wanted)[dim]
    node = site.cut(x, with_range(site.wanted, dim, start + lo * step, start + (hi - 1) * step + 1))
    if step == 1 or hi - lo == 1:
        return node
    return site.write(aten.slice.Tensor, node, dim, 0, (hi - lo - 1) * step + 1, step)


def _without(site: Site, dim: int, index: int) -> fx.Node:
    """One index of a dimension, which goes."""
    x: HeldPart = site.arguments["self"]
    dim %= len(x.shape)
    index %= x.shape[dim]
    lo, hi = list(site.wanted.lo), list(site.wanted.hi)
    lo.insert(dim, index)
    hi.insert(dim, index + 1)
    return site.write(aten.select.int, site.cut(x, Rect(tuple(lo), tuple(hi))), dim, 0)


def select(site: Site) -> fx.Node:
    """One index of a dimension."""
    return _without(site, site.arguments["dim"], site.arguments["index"])


def chosen(site: Site) -> fx.Node:
    """One of the results of taking a dimension apart."""
    return _without(site, site.arguments["dim"], site.output)


def split(site: Site) -> fx.Node:
    """One of the pieces of a dimension."""
    x: HeldPart = site.arguments["self"]
    dim = site.arguments["dim"] % len(x.shape)
    if site.op.kind.endswith("with_sizes"):
        before = sum(site.arguments["split_sizes"][: site.output])
    else:
        before = site.arguments["split_size"] * site.output
    lo, hi = list(site.wanted)[dim]
    return site.cut(x, with_range(site.wanted, dim, before + lo, before + hi))


def constant_pad(site: Site) -> fx.Node:
    """A margin of one value; a negative margin is a crop."""
    x: HeldPart = site.arguments["self"]
    pads, value = site.arguments["pad"], site.arguments["value"]
    before = [0] * len(x.shape)
    for k in range(len(pads) // 2):
        before[-1 - k] = pads[2 * k]
    inner = site.wanted.shift([-n for n in before])
    box = inner.clip(x.shape)
    if box.empty:
        return site.full(site.wanted.shape, value)
    below = [lo - first for lo, first in zip(box.lo, inner.lo, strict=True)]
    above = [end - hi for hi, end in zip(box.hi, inner.hi, strict=True)]
    return site.pad(site.cut(x, box), below, above, value)


def cat(site: Site) -> fx.Node:
    """Tensors one behind the other, those that the box meets."""
    dim = site.arguments["dim"] % len(site.shape)
    lo, hi = list(site.wanted)[dim]
    pieces, start = [], 0
    for x in site.arguments["tensors"]:
        if x.shape == (0,):
            continue
        end = start + x.shape[dim]
        if max(lo, start) < min(hi, end):
            pieces.append(
                site.cut(x, with_range(site.wanted, dim, max(lo, start) - start, min(hi, end) - start))
            )
        start = end
    return pieces[0] if len(pieces) == 1 else site.write(aten.cat.default, pieces, dim)


def stack(site: Site) -> fx.Node:
    """Tensors side by side in a new dimension, those that the box meets."""
    dim = site.arguments["dim"] % len(site.shape)
    lo, hi = list(site.wanted)[dim]
    ranges = [pair for d, pair in enumerate(site.wanted) if d != dim]
    box = Rect(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))
    return site.write(aten.stack.default, [site.cut(x, box) for x in site.arguments["tensors"][lo:hi]], dim)


def flip(site: Site) -> fx.Node:
    """The other way round."""
    x: HeldPart = site.arguments["self"]
    box = site.wanted
    for dim in site.arguments["dims"]:
        lo, hi = list(site.wanted)[dim]
        box = with_range(box, dim, x.shape[dim] - hi, x.shape[dim] - lo)
    return site.again(self=site.cut(x, box))
