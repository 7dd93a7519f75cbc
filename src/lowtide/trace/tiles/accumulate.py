"""Adds the gradients of tiles up: where operators are fused in a wider type, so that a sum is rounded once.

That is float32 for half precision, and float64 for small gradients in float32. In half precision, a gradient
that is a product of matrices is added up as it is computed: its parts are neither stored nor rounded. One
that is a sum is added up before it is rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.graph import Role
from lowtide.trace.eager.library import define
from lowtide.trace.step.joint import Leaf
from lowtide.trace.tiles.differentiate import Change

__all__ = ["accumulating", "summed"]

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_TURNS = frozenset({aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default})
"""Of a matrix: views that may exchange its axes."""
_SAME = frozenset({aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default})
"""Views that keep the order of elements."""
_SMALL = 4096
"""Elements of a gradient that is small: the time and memory of float64 are not noticed."""
_ROWS, _DEPTH = 1024, 256
"""So much of a factor is in float32 at a time, where no kernel adds products of half precision to float32."""


def _accumulate(into: torch.Tensor, part: torch.Tensor) -> None:
    into.add_(part)


def _accumulate_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if into.is_cuda and torch.version.hip is None:
        aten.addmm.dtype_out(into, left, right, into.dtype, out=into)
        return
    for k in range(0, left.shape[1], _DEPTH):
        below = right[k : k + _DEPTH].to(into.dtype)
        for m in range(0, left.shape[0], _ROWS):
            into[m : m + _ROWS].addmm_(left[m : m + _ROWS, k : k + _DEPTH].to(into.dtype), below)


define("accumulate(Tensor into, Tensor part) -> ()", _accumulate)
define("accumulate.product(Tensor into, Tensor left, Tensor right) -> ()", _accumulate_product)


def summed(value: torch.Tensor, *, fused: bool) -> torch.Tensor:
    """How the sum of a gradient over tiles lies in memory, by one tensor of its form.

    Where operators are fused, half precision is added up in float32, and what is small in float64: the sum is
    rounded once.
    """
    if fused and value.dtype in _HALF:
        return _of_type(value, torch.float32)
    small = value.dtype == torch.float32 and value.numel() <= _SMALL
    return _of_type(value, torch.float64) if fused and small else value


def accumulating(
    leaves: Sequence[Leaf], sums: Mapping[int, torch.dtype], kept: Sequence[slice] = ()
) -> Change:
    """Each gradient is added to one that goes in, as soon as it is made, and not returned.

    Behind the inputs there is one for each of ``sums``: the place of a leaf, and the type in which its
    gradient is added up. Where a part of the gradient alone is ``kept``, what goes in is as large as that.
    """

    def change(joint: fx.GraphModule, num_outputs: int) -> list[Leaf]:
        graph = joint.graph
        output = graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        placeholders = graph.find_nodes(op="placeholder")
        last = placeholders[-1]
        left: list[fx.Node] = []
        for k, kind in sums.items():
            gradient = results[num_outputs + k]
            with graph.inserting_after(last):
                last = graph.placeholder(f"into_{k}")
            if not isinstance(gradient, fx.Node):  # nothing is added to it
                last.meta["val"] = _of_type(placeholders[k].meta["val"], kind)
                continue
            gradient = _part(graph, gradient, kept)
            last.meta["val"] = _of_type(gradient.meta["val"], kind)
            _add(graph, last, gradient)
            left.append(gradient)
            results[num_outputs + k] = None
        output.args = (tuple(results),)
        for node in left:
            _erase(graph, node)
        joint.recompile()
        return [Leaf(f"gradient of {leaves[k].name}", Role.INPUT) for k in sums]

    return change


def _of_type(value: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """How it lies in memory in another type."""
    if value.dtype == kind:
        return value
    with getattr(value, "fake_mode", None) or contextlib.nullcontext():
        return value.detach().to(kind)


def _add(graph: fx.Graph, into: fx.Node, gradient: fx.Node) -> None:
    """Add a gradient to the one that goes in: as it is computed, where that keeps it from being rounded."""
    narrow = gradient.meta["val"].dtype in _HALF and into.meta["val"].dtype == torch.float32
    product = _product(gradient) if narrow else None
    operator = torch.ops.lowtide.accumulate
    if product is None:
        wide = _wide_sum(graph, gradient) if narrow else None
        part = gradient if wide is None else wide
        with graph.inserting_after(part):
            node = graph.call_function(operator.default, (into, part))
    else:
        made, turned = product
        left, right = made.args
        with graph.inserting_after(gradient):
            node = graph.call_function(operator.product, (into, left, right))
        if turned:
            node.args = (into, _behind(graph, right, node), _behind(graph, left, node))
    node.meta = {"val": None, "partitioner_tag": "is_backward"}


def _way(gradient: fx.Node, views: frozenset[Any]) -> list[fx.Node]:
    """A gradient and what it is a view of, up to the operator that makes it, if nobody else reads these."""
    way = [gradient]
    while way[-1].target in views and isinstance(way[-1].args[0], fx.Node):
        way.append(way[-1].args[0])
    return way if all(len(node.users) <= 1 for node in way) else way[:1]


def _product(gradient: fx.Node) -> tuple[fx.Node, bool] | None:
    """The product of matrices that a gradient is, and whether its axes are exchanged."""
    way = _way(gradient, _TURNS | _SAME)
    made = way[-1]
    if made.target is not aten.mm.default:
        return None
    turned = False
    for node in way[:-1]:
        before, after = (one.meta["val"] for one in (node.args[0], node))  # type: ignore[union-attr]
        if after.dim() != 2:
            return None
        if node.target in _SAME and before.shape != after.shape:
            return None
        if node.target in _TURNS:
            turned ^= _exchanges(node)
    return made, turned


def _exchanges(node: fx.Node) -> bool:
    """Whether a view of a matrix has its axes in the other order."""
    if node.target is aten.permute.default:
        return [axis % 2 for axis in node.args[1]] == [1, 0]  # type: ignore[union-attr, operator]
    if node.target is aten.transpose.int:
        return node.args[1] % 2 != node.args[2] % 2  # type: ignore[operator]
    return True


def _behind(graph: fx.Graph, factor: Any, user: fx.Node) -> fx.Node:
    """A factor with its axes exchanged, for somebody who reads it."""
    if factor.target is aten.t.default:
        return factor.args[0]  # type: ignore[no-any-return]
    with graph.inserting_before(user):
        return _called(graph, aten.t.default, (factor,), {})


def _wide_sum(graph: fx.Graph, gradient: fx.Node) -> fx.Node | None:
    """The same gradient in float32, where it is a sum that is rounded when all is added."""
    way = _way(gradient, _SAME)
    made = way[-1]
    if made.target is not aten.sum.dim_IntList or made.kwargs.get("dtype") is not None:
        return None
    with graph.inserting_after(gradient):
        anchor = graph.call_function(aten.detach.default, (gradient,))
    with graph.inserting_before(anchor):
        found = _called(graph, made.target, made.args, made.kwargs | {"dtype": torch.float32})
        for node in reversed(way[:-1]):
            found = _called(graph, node.target, (found, *node.args[1:]), node.kwargs)
    graph.erase_node(anchor)
    return found


def _called(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A call of backward, with what it gives."""
    node = graph.call_function(target, args, kwargs)
    given, named = fx.map_arg((args, kwargs), lambda one: one.meta["val"])
    source = next(one for one in node.all_input_nodes)
    with source.meta["val"].fake_mode:
        node.meta = {"val": target(*given, **named), "partitioner_tag": "is_backward"}
    return node


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Take away what nobody reads any more."""
    while node.op == "call_function" and not node.users and (node.target in _TURNS | _SAME | _MADE):
        source = node.args[0]
        graph.erase_node(node)
        if not isinstance(source, fx.Node):
            return
        node = source


_MADE = frozenset({aten.mm.default, aten.sum.dim_IntList})


def _part(graph: fx.Graph, node: fx.Node, kept: Sequence[slice]) -> fx.Node:
    """A part of a gradient."""
    for axis, one in enumerate(kept):
        value = node.meta["val"]
        if (one.start, one.stop) != (0, value.shape[axis]):
            with graph.inserting_after(node):
                node = graph.call_function(aten.slice.Tensor, (node, axis, one.start, one.stop))
            with value.fake_mode:
                node.meta = {"val": value.narrow(axis, one.start, one.stop - one.start)}
            node.meta["partitioner_tag"] = "is_backward"
    return node
