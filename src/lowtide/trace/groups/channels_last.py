"""A function whose convolutions run channels-last, made from one with the user's layouts.

What convolutions read is converted before them. Operators behind them follow the layout of what they read, so
most conversions find nothing to do. What the function returns, and what random operators read, is laid out as
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.trace.groups.functions import Values, copied, is_plain, is_random, moved, name_of, values_of

__all__ = ["in_channels_last"]

_FORMATS = {
    torch.conv2d: torch.channels_last,
    torch.conv_transpose2d: torch.channels_last,
    torch.conv3d: torch.channels_last_3d,
    torch.conv_transpose3d: torch.channels_last_3d,
}
_INPLACE = 3
"""The place of ``inplace`` among the arguments of dropout."""


def in_channels_last(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
    """The function with convolutions channels-last; None where it has none, or may not be changed.

    ``inputs`` are fake tensors.
    """
    nodes = list(module.graph.nodes)
    if not any(node.target in _FORMATS for node in nodes) or not all(map(is_plain, nodes)):
        return None
    with contextlib.suppress(Exception):  # such as a view that needs the user's layout
        before = values_of(module, inputs)
        changed, originals = copied(module)
        for node in list(changed.graph.nodes):
            if node.target in _FORMATS:
                _convert(changed.graph, node, _FORMATS[node.target])
        _restore(changed, inputs, originals, before)
        return changed
    return None


def _writes(node: fx.Node) -> bool:
    """Whether a random operator writes over what it reads."""
    dropout = "drop" in name_of(node) and any(node.args[_INPLACE:])
    return name_of(node).endswith("_") or dropout or bool(node.kwargs.get("inplace"))


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
            if node.op != "output" and not is_random(node):
                continue
            elsewhere = [one for one in node.all_input_nodes if moved(one, originals, before, now)]
            for one in elsewhere:
                if not before[originals[one]].is_contiguous() or (node.op != "output" and _writes(node)):
                    raise ValueError("an order of its own, or numbers that are drawn in place")
                with graph.inserting_before(node):
                    node.replace_input_with(one, graph.call_method("contiguous", (one,)))
            if elsewhere:
                break  # what is behind it lies otherwise now
        else:
            module.recompile()
            return
