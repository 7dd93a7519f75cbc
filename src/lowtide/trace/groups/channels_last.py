"""A function whose convolutions run channels-last, made from one with the user's layouts.

What convolutions read is converted before them. Operators behind them follow the layout of what they read, so
most conversions find nothing to do. What the function returns, and what random operators read, is laid out as
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.torch_internals import HigherOrderOperator, OpOverload, tree_leaves

__all__ = ["Values", "in_channels_last", "values_of"]

Values = Mapping[fx.Node, Any]
"""What each node of a function gives, as fake tensors."""
_FORMATS = {
    torch.conv2d: torch.channels_last,
    torch.conv_transpose2d: torch.channels_last,
    torch.conv3d: torch.channels_last_3d,
    torch.conv_transpose3d: torch.channels_last_3d,
}
_RANDOM = ("drop", "rand", "bernoulli", "rrelu", "normal_", "uniform_")
"""Parts of the names of functions that draw numbers in the order of memory, which must be that of eager."""
_HOMES = ("torch", "_operator", "builtins", "math")
"""Packages whose functions are known."""
_OF_MEMORY = ("as_strided", "set_", "storage", "data_ptr", "view_as_complex", "view_as_real")
"""Parts of the names of functions that see how their arguments lie in memory."""


def in_channels_last(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
    """The function with convolutions channels-last; None where it has none, or may not be changed.

    ``inputs`` are fake tensors.
    """
    nodes = list(module.graph.nodes)
    if not any(node.target in _FORMATS for node in nodes) or not all(map(_is_plain, nodes)):
        return None
    with contextlib.suppress(Exception):  # such as a view that needs the user's layout
        before = values_of(module, inputs)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(module.graph, copies))
        changed = fx.GraphModule(module, graph)
        changed.meta = module.meta
        for old, new in copies.items():
            new.meta = dict(old.meta)
        originals = {new: old for old, new in copies.items()}
        for node in list(graph.nodes):
            if node.target in _FORMATS:
                _convert(graph, node, _FORMATS[node.target])
        _restore(changed, inputs, originals, before)
        return changed
    return None


def values_of(module: fx.GraphModule, inputs: Sequence[Any]) -> Values:
    """What each node gives for these inputs, which are fake tensors."""
    found: dict[fx.Node, Any] = {}

    class Noted(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            found[node] = super().run_node(node)
            return found[node]

    mode = next(value.fake_mode for value in inputs if hasattr(value, "fake_mode"))
    with mode, torch.random.fork_rng(devices=[]):
        Noted(module, garbage_collect_values=False).run(*inputs)
    return found


def _is_plain(node: fx.Node) -> bool:
    """Whether an operator does the same however its arguments lie in memory."""
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    if node.op == "call_method":
        name, known = str(node.target), True
    else:
        target: Any = node.target
        name, home = getattr(target, "__name__", ""), getattr(target, "__module__", None) or "torch"
        known = node.op == "call_function" and home.split(".")[0] in (
            "torch",
            "_operator",
            "builtins",
            "math",
        )
        known = known and not isinstance(target, HigherOrderOperator)
        if isinstance(target, OpOverload):
            known = target.namespace in ("aten", "prims")
    if _is_random(node) and node.kwargs.get("inplace"):
        return False
    return known and not any(part in name for part in _OF_MEMORY)


def _is_random(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return any(part in name for part in _RANDOM)


def _convert(graph: fx.Graph, node: fx.Node, layout: torch.memory_format) -> None:
    """Have a convolution read its input and weight channels-last."""
    args, kwargs = list(node.args), dict(node.kwargs)
    with graph.inserting_before(node):
        for place, name in enumerate(("input", "weight")):
            given = args[place] if place < len(args) else kwargs[name]
            converted = graph.call_method("contiguous", (given,), {"memory_format": layout})
            if place < len(args):
                args[place] = converted
            else:
                kwargs[name] = converted
    node.args, node.kwargs = tuple(args), kwargs


def _restore(
    module: fx.GraphModule, inputs: Sequence[Any], originals: Mapping[fx.Node, fx.Node], before: Values
) -> None:
    """Lay out results, and what random operators read, as before; a ValueError where nobody knows how."""
    graph = module.graph
    while True:
        now = values_of(module, inputs)
        for node in graph.nodes:
            if node.op != "output" and not _is_random(node):
                continue
            moved = [one for one in node.all_input_nodes if _moved(one, originals, before, now)]
            for one in moved:
                if not before[originals[one]].is_contiguous():
                    raise ValueError("results lie in an order of their own")
                with graph.inserting_before(node):
                    node.replace_input_with(one, graph.call_method("contiguous", (one,)))
            if moved:
                break  # what is behind it lies otherwise now
        else:
            module.recompile()
            return


def _moved(node: fx.Node, originals: Mapping[fx.Node, fx.Node], before: Values, now: Values) -> bool:
    if node not in originals:
        return False  # a conversion
    pairs = zip(_tensors(before[originals[node]]), _tensors(now[node]), strict=True)
    return any(one.stride() != other.stride() for one, other in pairs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
