"""Sums, means and losses: the whole, or what one part of the summed axes adds to it."""

from __future__ import annotations

import math

import torch
from torch import fx

from lowtide.errors import GraphError
from lowtide.trace.operators.site import HeldPart, Site

__all__ = ["inner", "likelihood", "loss", "reduction", "summed", "total_weight"]

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def reduction(site: Site) -> fx.Node:
    """One number for each run of elements, which is there as a whole."""
    x: HeldPart = site.arguments["self"]
    return site.again(self=site.cut(x, site.need(x)))


def summed(site: Site) -> fx.Node:
    """A sum or mean; of a part of it, what the part adds."""
    x: HeldPart = site.arguments["self"]
    box = site.need(x)
    node = site.again(self=site.cut(x, box))
    if site.over is None or not site.op.kind.endswith("mean"):
        return node
    kept = math.prod(site.wanted.shape)
    return _share(site, node, box.size / kept, math.prod(x.shape) / math.prod(site.shape))


def _share(site: Site, node: fx.Node, part: float, whole: float) -> fx.Node:
    """The mean of a part as its share in the mean of the whole."""
    return node if part == whole else site.write(aten.mul.Tensor, node, part / whole)


def inner(site: Site) -> fx.Node:
    """A product with a vector; of a part of the dimension that both have, what it adds."""
    return site.again(**{name: site.cut(x, site.need(x)) for name, x in site.tensors().items()})


def loss(site: Site) -> fx.Node:
    """A loss of each element, by itself, added up or averaged."""
    first: HeldPart = site.arguments["self"]
    node = site.again(**{name: site.cut(x, site.need(x)) for name, x in site.tensors().items()})
    if site.arguments["reduction"] != _MEAN:
        return node
    return _share(site, node, site.need(first).size, math.prod(first.shape))


def likelihood(site: Site) -> fx.Node:
    """The negative log likelihood of targets; of a part, what it adds to the whole.

    A mean is over the weights of all targets, which the part cannot know: the caller gives their total. The
    second result is that total, and parts of it add up.
    """
    if site.output > 0:
        return site.full([], 0) if site.arguments["reduction"] == _NONE else total_weight(site)
    cut = {name: site.cut(x, site.need(x)) for name, x in site.tensors().items()}
    if site.over is None or site.arguments["reduction"] != _MEAN:
        return site.again(**cut)
    if site.total is None:
        raise GraphError(
            f"{site.op.label}: a part of a mean over targets needs the total weight of all of them; "
            "make it with loss_total"
        )
    return site.write(aten.div.Tensor, site.again(**cut, reduction=_SUM), site.total)


def total_weight(site: Site) -> fx.Node:
    """The weights of the targets that count, added up; each counts 1 where classes have no weights."""
    targets, weights = site.arguments["target"], site.arguments["weight"]
    box = site.need(targets)
    node = site.cut(targets, box)
    ignored = site.arguments["ignore_index"]
    if weights is None:  # on the CPU a sum of anything but numbers makes a copy of all of it first
        counts = site.write(aten.ne.Scalar, node, ignored)
        on_cuda = site.op.device.startswith("cuda")
        number = site.write(aten.sum.default if on_cuda else aten.count_nonzero.default, counts)
        return site.write(aten._to_copy.default, number, dtype=site.dtype)
    flat = [box.size]
    node = site.write(aten.reshape.default, node, flat)
    left_out = site.write(aten.eq.Scalar, node, ignored)
    node = site.write(aten.masked_fill.Scalar, node, left_out, 0)  # what is ignored may be no class at all
    chosen = site.write(aten.index_select.default, site.cut(weights, weights.whole), 0, node)
    return site.write(aten.sum.default, site.write(aten.masked_fill.Scalar, chosen, left_out, 0))
