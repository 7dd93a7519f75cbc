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
_NAMES = (
    "drop rand bernoulli rrelu normal_ uniform_ exponential_ cauchy_ geometric_ poisson binomial multinomial"
)
_RANDOM = tuple(_NAMES.split())
"""Parts of the names of functions that draw numbers in the order of memory, which must be that of eager."""
_HOMES = ("torch", "_operator", "builtins", "math")
"""Packages whose functions are known."""
_LEVELS = ("torch._functorch", "torch._C._functorch")
"""Modules with functions that begin and end a level of ``vmap`` or ``grad``."""
_INPLACE = 3
"""The place of ``inplace`` among the arguments of dropout."""
_OF_MEMORY = ("as_strided", "storage", "data_ptr", "view_as_complex", "view_as_real")
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
    with mode, torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            Noted(module, garbage_collect_values=False).run(*inputs)
        except BaseException:
            _leave_autocast(found)
            raise
    return found


def _leave_autocast(found: Values) -> None:
    """Leave the regions of autocast that a function was in when it failed."""
    left = {node.args[0] for node in found if "exit_autocast" in _name(node)}
    for node in reversed([node for node in found if "enter_autocast" in _name(node)]):
        if node not in left:
            found[node].__exit__(None, None, None)


def _is_plain(node: fx.Node) -> bool:
    """Whether an operator does the same however its arguments lie in memory."""
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    known = node.op == "call_method"
    if node.op == "call_function":
        target: Any = node.target
        home = getattr(target, "__module__", None) or "torch"
        known = home.split(".")[0] in _HOMES and not home.startswith(_LEVELS)
        known = known and not isinstance(target, HigherOrderOperator)
        if isinstance(target, OpOverload):
            known = target.namespace in ("aten", "prims")
    return known and _name(node) != "set_" and not any(part in _name(node) for part in _OF_MEMORY)


def _name(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def _is_random(node: fx.Node) -> bool:
    return any(part in _name(node) for part in _RANDOM)


def _writes(node: fx.Node) -> bool:
    """Whether a random operator writes over what it reads."""
    dropout = "drop" in _name(node) and any(node.args[_INPLACE:])
    return _name(node).endswith("_") or dropout or bool(node.kwargs.get("inplace"))


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
                if not before[originals[one]].is_contiguous() or (node.op != "output" and _writes(node)):
                    raise ValueError("an order of its own, or numbers that are drawn in place")
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
