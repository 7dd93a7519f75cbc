"""Operators that treat the elements, rows or tokens of their inputs one by one."""

from __future__ import annotations

import torch
from torch import fx

from lowtide.graph import Rect
from lowtide.trace.operators.site import HeldPart, Site, broadcast, replaced, with_range

__all__ = [
    "along",
    "attention",
    "batch_norm",
    "copied",
    "embedding",
    "gather",
    "group_norm",
    "index_select",
    "layer_norm",
    "pointwise",
    "product",
    "running",
]

aten = torch.ops.aten


def pointwise(site: Site) -> fx.Node:
    """Each element from those at its place; inputs are broadcast."""
    cut = {name: site.cut(x, broadcast(x.shape, site.wanted)) for name, x in site.tensors().items()}
    return site.again(**cut)


def copied(site: Site) -> fx.Node:
    """What is written over the first tensor, in its shape and type."""
    source: HeldPart = site.arguments["src"]
    node = site.cut(source, broadcast(source.shape, site.wanted))
    node = site.write(aten.expand.default, node, list(site.wanted.shape))
    return site.write(aten._to_copy.default, node, dtype=site.dtype, device=site.device)


def product(site: Site) -> fx.Node:
    """Rows of one matrix by columns of another, and what is added to it.

    Of a part of the dimension that both have, what it adds; what is added beside is not there for all parts.
    """
    names = list(site.tensors())
    left, right = (site.arguments[name] for name in names[-2:])
    batch, row, column = list(site.wanted)[:-2], *list(site.wanted)[-2:]
    inner = (0, left.shape[-1]) if site.over is None else next(iter(site.over))
    cut = {
        names[-2]: site.cut(left, _box([*batch, row, inner])),
        names[-1]: site.cut(right, _box([*batch, inner, column])),
    }
    if len(names) == 3:
        added: HeldPart = site.arguments[names[0]]
        if added.part is None:
            return _without(site, *cut.values())
        cut[names[0]] = site.cut(added, broadcast(added.shape, site.wanted))
    return site.again(**cut)


def _without(site: Site, left: fx.Node, right: fx.Node) -> fx.Node:
    """The product alone, where something is added to it in another part of the sum."""
    alone = aten.mm.default if site.wanted.ndim == 2 else aten.bmm.default
    node, times = site.write(alone, left, right), site.arguments["alpha"]
    return node if times == 1 else site.write(aten.mul.Scalar, node, times)


def _box(ranges: list[tuple[int, int]]) -> Rect:
    return Rect(tuple(lo for lo, _ in ranges), tuple(hi for _, hi in ranges))


def along(site: Site) -> fx.Node:
    """What needs a whole dimension to say anything about one element of it: softmax, sorting."""
    x: HeldPart = site.arguments["self"]
    if not x.shape:
        return site.again(self=site.cut(x, site.wanted))
    dim = site.arguments["dim"] % len(x.shape)
    node = site.again(self=site.cut(x, with_range(site.wanted, dim, 0, x.shape[dim])))
    return site.crop(node, with_range(site.wanted, dim, 0, site.shape[dim]), site.wanted)


def running(site: Site) -> fx.Node:
    """Sums and the like of everything up to an element."""
    x: HeldPart = site.arguments["self"]
    if not x.shape:
        return site.again(self=site.cut(x, site.wanted))
    dim = site.arguments["dim"] % len(x.shape)
    box = with_range(site.wanted, dim, 0, site.wanted.hi[dim])
    return site.crop(site.again(self=site.cut(x, box)), box, site.wanted)


def layer_norm(site: Site) -> fx.Node:
    """The last dimensions made of mean 0 and variance 1; or their mean, or what they are multiplied by."""
    x: HeldPart = site.arguments["input"]
    first = len(x.shape) - len(site.arguments["normalized_shape"])
    ends = range(first, len(x.shape))
    box = replaced(site.wanted, {d: (0, x.shape[d]) for d in ends})
    cut = {
        name: site.cut(one, box) if name == "input" else site.filled(one, one.whole)
        for name, one in site.tensors().items()
    }
    node = site.again(**cut)
    return site.crop(node, replaced(site.wanted, {d: (0, site.shape[d]) for d in ends}), site.wanted)


def group_norm(site: Site) -> fx.Node:
    """Groups of channels made of mean 0 and variance 1."""
    x: HeldPart = site.arguments["input"]
    box = site.need(x)
    batch, channels = box.shape[:2]
    size = x.shape[1] // site.arguments["group"]
    cut = {"input": site.write(aten.contiguous.default, site.cut(x, box))}
    for name in ("weight", "bias"):
        one = site.arguments[name]
        if one is not None:
            cut[name] = site.filled(one, Rect(box.lo[1:2], box.hi[1:2]))
    node = site.again(**cut, N=batch, C=channels, group=channels // size)
    if site.output == 0:
        return site.crop(node, box, site.wanted)
    groups = Rect((box.lo[0], box.lo[1] // size), (box.hi[0], box.hi[1] // size))
    return site.crop(node, groups, site.wanted)


def batch_norm(site: Site) -> fx.Node:
    """A scale and a shift for each channel, from statistics that are there already."""
    cut = {}
    for name, one in site.tensors().items():
        channels = Rect(site.wanted.lo[1:2], site.wanted.hi[1:2])
        cut[name] = site.cut(one, site.wanted if name == "input" else channels)
    return site.again(**cut)


def embedding(site: Site) -> fx.Node:
    """A row of a table for each index."""
    table, indices = site.arguments["weight"], site.arguments["indices"]
    rows = Rect((0, site.wanted.lo[-1]), (table.shape[0], site.wanted.hi[-1]))
    places = Rect(site.wanted.lo[:-1], site.wanted.hi[:-1])
    return site.again(weight=site.cut(table, rows), indices=site.cut(indices, places))


def gather(site: Site) -> fx.Node:
    """Elements at places of one dimension, which is there as a whole."""
    x, index, dim = site.arguments["self"], site.arguments["index"], site.arguments["dim"]
    if not x.shape:
        return site.again(self=site.cut(x, x.whole), index=site.cut(index, site.wanted))
    box = with_range(site.wanted, dim, 0, x.shape[dim])
    return site.again(self=site.cut(x, box), index=site.cut(index, site.wanted))


def index_select(site: Site) -> fx.Node:
    """Slices at places of one dimension, which is there as a whole."""
    x, index, dim = site.arguments["self"], site.arguments["index"], site.arguments["dim"]
    dim %= len(x.shape)
    places = Rect(site.wanted.lo[dim : dim + 1], site.wanted.hi[dim : dim + 1])
    box = with_range(site.wanted, dim, 0, x.shape[dim])
    return site.again(self=site.cut(x, box), index=site.cut(index, places))


def attention(site: Site) -> fx.Node:
    """Scaled dot product attention; queries that begin later see the keys up to their own place."""
    query, key, value = (site.arguments[name] for name in ("query", "key", "value"))
    batch, heads, rows, columns = site.wanted
    shared = query.shape[1] // key.shape[1]
    theirs = (heads[0] // shared, (heads[1] - 1) // shared + 1)
    causal = site.arguments["is_causal"] and query.shape[2] == key.shape[2]
    keys = (0, rows[1]) if causal else (0, key.shape[2])
    width = value.shape[3]
    chosen = site.cut(value, _box([batch, theirs, keys, columns]))
    cut = {
        "query": site.cut(query, _box([batch, heads, rows, (0, query.shape[3])])),
        "key": site.cut(key, _box([batch, theirs, keys, (0, key.shape[3])])),
        "value": site.pad(chosen, (0, 0, 0, columns[0]), (0, 0, 0, width - columns[1])),
    }
    name = "attn_bias" if "attn_bias" in site.arguments else "attn_mask"
    bias = site.arguments.get(name)
    if bias is not None:
        cut[name] = site.cut(bias, broadcast(bias.shape, _box([batch, heads, rows, keys])))
    node = _shifted(site, cut, rows) if causal and rows[0] > 0 else site.again(**cut)
    return site.crop(node, with_range(site.wanted, 3, 0, width), site.wanted)


def _shifted(site: Site, cut: dict[str, fx.Node], rows: tuple[int, int]) -> fx.Node:
    """Causal attention of queries that do not begin with the first: a mask says what they see."""
    mask = site.write(aten.tril.default, site.full([rows[1] - rows[0], rows[1]], 1, torch.bool), rows[0])
    args = (cut["query"], cut["key"], cut["value"], mask, 0.0, False)
    shared = site.arguments["query"].shape[1] != site.arguments["key"].shape[1]
    options = {"scale": site.arguments.get("scale"), "enable_gqa": shared}
    return site.write(aten.scaled_dot_product_attention.default, *args, **options)
