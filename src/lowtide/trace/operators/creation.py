"""Operators that make a tensor out of nothing but sizes: constants, ranges, triangles."""

from __future__ import annotations

import torch
from torch import fx

from lowtide.trace.operators.site import HeldPart, Site

__all__ = ["arange", "constant", "cut_from_whole", "triangle"]

aten = torch.ops.aten


def constant(site: Site) -> fx.Node:
    """One value everywhere, or none in particular."""
    name = site.op.kind.removeprefix("aten.").removeprefix("new_").removesuffix("_like")
    shape = list(site.wanted.shape)
    if name.startswith("empty"):
        return site.write(aten.empty.memory_format, shape, dtype=site.dtype, device=site.device)
    given = site.arguments
    value = {"zero": 0, "zeros": 0, "ones": 1}.get(name, given.get("fill_value", given.get("value")))
    if isinstance(value, HeldPart):
        node = site.write(aten._to_copy.default, site.cut(value, value.whole), dtype=site.dtype)
        return site.write(aten.expand.default, node, shape)
    return site.full(shape, value)


def arange(site: Site) -> fx.Node:
    """Numbers in equal steps. Fractions are those of the whole range: another start would round them anew."""
    (lo, hi), given = next(iter(site.wanted)), site.arguments
    start, step = given.get("start", 0), given.get("step", 1)
    if not all(isinstance(n, int) for n in (start, step)):
        return cut_from_whole(site)
    function = aten.arange.start_step
    first, end = start + lo * step, start + hi * step
    return site.write(function, first, end, step, dtype=site.dtype, device=site.device)


def cut_from_whole(site: Site) -> fx.Node:
    """The part of a tensor that is made as a whole."""
    return site.crop(site.again(), site.whole, site.wanted)


def triangle(site: Site) -> fx.Node:
    """What is below or above a diagonal, which keeps its place in the whole."""
    x: HeldPart = site.arguments["self"]
    row, column = site.wanted.lo[-2:]
    diagonal = site.arguments["diagonal"] + row - column
    return site.again(self=site.cut(x, site.wanted), diagonal=diagonal)
