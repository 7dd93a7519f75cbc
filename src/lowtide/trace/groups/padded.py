"""A function whose matrix products have rows of whole 16 bytes, made from one with the user's sizes.

Tensor cores read rows that begin at multiples of 16 bytes. A product whose features are no such number, as
the 50,257 tokens of a vocabulary, takes several times as long. So its operands get columns of zeros, and what
comes out is narrowed to what the user sees: a view, with rows somewhat further apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

from lowtide.trace.groups.functions import Values, copied, is_plain, is_random, moved, values_of

__all__ = ["Product", "in_padded", "products"]

_ROW = 16
"""Bytes that rows are multiples of."""
_ABOUT = ("stack_trace", "nn_module_stack", "source_fn_stack")
"""What is known of where an operator comes from."""
_MATRIX = 2
"""Axes of a weight."""
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Product(NamedTuple):
    """A linear layer, whatever number of rows it is applied to."""

    inward: int
    outward: int
    dtype: torch.dtype

    @property
    def missing(self) -> tuple[int, int]:
        """How many features more on both sides would make whole rows."""
        step = _ROW // self.dtype.itemsize
        return -self.inward % step, -self.outward % step


def products(values: Values) -> dict[fx.Node, Product]:
    """The linear layers of a function whose rows are not whole."""
    found: dict[fx.Node, Product] = {}
    for node in values:
        if node.target is not functional.linear or values[node].dtype not in _TYPES:
            continue
        shape = values[_weight(node)].shape
        if len(shape) == _MATRIX and all(isinstance(size, int) for size in shape):
            found[node] = Product(shape[1], shape[0], values[node].dtype)
    return {node: one for node, one in found.items() if any(one.missing)}


def in_padded(
    module: fx.GraphModule, inputs: Sequence[Any], chosen: Collection[Product]
) -> tuple[fx.GraphModule, dict[fx.Node, list[fx.Node]]] | None:
    """The function with these products padded, and what each of them consists of then.

    None where there are none, or where the function may not be changed: what it returns, and what random
    operators read, must lie in memory as before. ``inputs`` are fake tensors.
    """
    if not all(map(is_plain, module.graph.nodes)):
        return None
    with contextlib.suppress(Exception):  # such as a view that needs the user's layout
        before = values_of(module, inputs)
        wanted = {node: one for node, one in products(before).items() if one in chosen}
        if not wanted:
            return None
        changed, originals = copied(module)
        copies = {old: new for new, old in originals.items()}
        padding = _Padding(changed.graph)
        pieces = {node: padding.pad(copies[node], one) for node, one in wanted.items()}
        changed.recompile()
        if _as_before(changed, originals, before, values_of(changed, inputs)):
            return changed, pieces
    return None


def _weight(node: fx.Node) -> fx.Node:
    weight: Any = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
    assert isinstance(weight, fx.Node)
    return weight


class _Padding:
    """Puts padded products into a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._made: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def pad(self, node: fx.Node, product: Product) -> list[fx.Node]:
        """Replace a linear layer; the operators in its place."""
        inward, outward = product.missing
        given: dict[str, Any] = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        about = {key: node.meta[key] for key in _ABOUT if key in node.meta}
        with self.graph.inserting_before(node):
            operands = [
                self._padded(given["input"], (0, inward)),
                self._padded(given["weight"], (0, inward, 0, outward)),
                self._padded(given.get("bias"), (0, outward)),
            ]
            whole = self.graph.call_function(functional.linear, tuple(operands))
            narrow = self.graph.call_function(torch.narrow, (whole, -1, 0, product.outward))
        pieces = [one for one in operands if one is not None and one not in given.values()]
        for one in (*pieces, whole, narrow):
            one.meta |= about
        node.replace_all_uses_with(narrow)
        self.graph.erase_node(node)
        return [*pieces, whole]

    def _padded(self, operand: fx.Node | None, more: tuple[int, ...]) -> fx.Node | None:
        if operand is None or not any(more):
            return operand
        if (operand, more) not in self._made:
            self._made[operand, more] = self.graph.call_function(torch.constant_pad_nd, (operand, more))
        return self._made[operand, more]


def _as_before(
    module: fx.GraphModule, originals: Mapping[fx.Node, fx.Node], before: Values, now: Values
) -> bool:
    """Whether results, and what random operators read, lie in memory as before."""
    seen = [node for node in module.graph.nodes if node.op == "output" or is_random(node)]
    return not any(
        one not in originals or moved(one, originals, before, now)
        for node in seen
        for one in node.all_input_nodes
    )
