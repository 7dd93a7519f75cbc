"""Operators that put elements elsewhere: repetition, rotation, borders from the inside, overwriting."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from lowtide.graph import Rect
from lowtide.trace.operators.site import HeldPart, Site, replaced, with_range

__all__ = ["border", "index", "overwritten", "pixel_shuffle", "pixel_unshuffle", "repeat", "roll", "unfold"]

aten = torch.ops.aten


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Places as runs that go up, go down or stay: the first place, the step, and how many."""
    start = 0
    while start < len(places):
        step, end = 1, start + 1
        if end < len(places) and abs(places[end] - places[start]) <= 1:
            step = places[end] - places[start]
        while end < len(places) and places[end] - places[end - 1] == step:
            end += 1
        yield places[start], step, end - start
        start = end


def _taken(site: Site, node: fx.Node, dim: int, first: int, places: Sequence[int]) -> fx.Node:
    """The elements at these places of a dimension, of a node that begins with the first."""
    pieces = []
    for start, step, count in _runs(places):
        lo = min(start, start + step * (count - 1)) - first
        piece = site.write(aten.slice.Tensor, node, dim, lo, lo + abs(step) * (count - 1) + 1)
        if step == 0:
            shape = [-1] * len(site.shape)
            shape[dim] = count
            piece = site.write(aten.expand.default, piece, shape)
        pieces.append(site.write(aten.flip.default, piece, [dim]) if step < 0 else piece)
    return pieces[0] if len(pieces) == 1 else site.write(aten.cat.default, pieces, dim)


def _placed(site: Site, place: Callable[[int, int], int]) -> fx.Node:
    """Every element of the wanted box from where ``place(dimension, index)`` says it is."""
    x: HeldPart = site.arguments["self"]
    box = site.need(x)
    node = site.cut(x, box)
    extra = len(site.shape) - len(x.shape)
    if extra:
        node = site.write(aten.reshape.default, node, [*[1] * extra, *box.shape])
    first = [*[0] * extra, *box.lo]
    for dim, (lo, hi) in enumerate(site.wanted):
        places = [place(dim, k) for k in range(lo, hi)]
        if places != list(range(first[dim], first[dim] + [*[1] * extra, *box.shape][dim])):
            node = _taken(site, node, dim, first[dim], places)
    return node


def repeat(site: Site) -> fx.Node:
    """The whole again and again along each dimension."""
    x: HeldPart = site.arguments["self"]
    shape = [*[1] * (len(site.shape) - len(x.shape)), *x.shape]
    return _placed(site, lambda dim, k: k % shape[dim])


def roll(site: Site) -> fx.Node:
    """Dimensions that begin elsewhere and go round."""
    dims = [d % len(site.shape) for d in site.arguments["dims"]]
    by = dict(zip(dims, site.arguments["shifts"], strict=True))
    return _placed(site, lambda dim, k: (k - by.get(dim, 0)) % site.shape[dim])


def border(site: Site) -> fx.Node:
    """A margin that mirrors the inside, or repeats the outermost elements."""
    x: HeldPart = site.arguments["self"]
    pads: list[int] = site.arguments["padding"]
    before = [0] * (len(x.shape) - len(pads) // 2) + pads[::2][::-1]
    mirrored = "reflection" in site.op.kind

    def place(dim: int, k: int) -> int:
        at, last = k - before[dim], x.shape[dim] - 1
        if mirrored:
            return -at if at < 0 else min(at, 2 * last - at)
        return max(0, min(last, at))

    return _placed(site, place)


def overwritten(site: Site) -> fx.Node:
    """One tensor with a slice of it replaced by another."""
    x, source = site.arguments["self"], site.arguments["src"]
    dim = site.arguments["dim"] % len(site.shape)
    lo, hi = list(site.wanted)[dim]
    if site.op.kind == "aten.select_scatter":
        start = site.arguments["index"] % site.shape[dim]
        end = start + 1
    else:
        given = slice(site.arguments["start"], site.arguments["end"])
        start, end, _ = given.indices(site.shape[dim])
        end = max(start, end)
    pieces = []
    for k, (first, last) in enumerate(itertools.pairwise((0, start, end, site.shape[dim]))):
        first, last = max(first, lo), min(last, hi)
        if first < last:
            box = with_range(site.wanted, dim, first, last)
            pieces.append(_written(site, source, dim, start, box) if k == 1 else site.cut(x, box))
    return pieces[0] if len(pieces) == 1 else site.write(aten.cat.default, pieces, dim)


def _written(site: Site, source: HeldPart, dim: int, start: int, box: Rect) -> fx.Node:
    """The box of what is written over, which begins at ``start``."""
    if site.op.kind == "aten.select_scatter":
        other = Rect(box.lo[:dim] + box.lo[dim + 1 :], box.hi[:dim] + box.hi[dim + 1 :])
        return site.write(aten.unsqueeze.default, site.cut(source, other), dim)
    return site.cut(source, with_range(box, dim, box.lo[dim] - start, box.hi[dim] - start))


def index(site: Site) -> fx.Node:
    """Elements at places that other tensors say; those dimensions are there as a whole."""
    x: HeldPart = site.arguments["self"]
    places = [None if one is None else site.cut(one, site.need(one)) for one in site.arguments["indices"]]
    return site.again(self=site.cut(x, site.need(x)), indices=places)


def unfold(site: Site) -> fx.Node:
    """Windows over a dimension, their elements as the last."""
    x: HeldPart = site.arguments["self"]
    size = site.wanted.shape[-1]
    return site.again(self=site.cut(x, site.need(x)), size=size)


def pixel_shuffle(site: Site) -> fx.Node:
    """Channels laid out as rows and columns."""
    x, r = site.arguments["self"], site.arguments["upscale_factor"]
    c, h, w = (site.wanted.ndim - 3 + k for k in range(3))
    lo, hi = site.wanted.lo, site.wanted.hi
    space = {d: (lo[d] // r, -(-hi[d] // r)) for d in (h, w)}
    node = site.again(
        self=site.filled(x, replaced(site.wanted, {c: (lo[c] * r * r, hi[c] * r * r), **space}))
    )
    return site.crop(
        node, replaced(site.wanted, {d: (a * r, b * r) for d, (a, b) in space.items()}), site.wanted
    )


def pixel_unshuffle(site: Site) -> fx.Node:
    """Rows and columns gathered as channels."""
    x, r = site.arguments["self"], site.arguments["downscale_factor"]
    c, h, w = (site.wanted.ndim - 3 + k for k in range(3))
    lo, hi = site.wanted.lo, site.wanted.hi
    first, end = lo[c] // (r * r), -(-hi[c] // (r * r))
    space = {d: (lo[d] * r, hi[d] * r) for d in (h, w)}
    node = site.again(self=site.filled(x, replaced(site.wanted, {c: (first, end), **space})))
    return site.crop(node, with_range(site.wanted, c, first * r * r, end * r * r), site.wanted)
