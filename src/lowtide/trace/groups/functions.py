"""Functions as Dynamo captured them: what their operators give, and which of them may be changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.torch_internals import HigherOrderOperator, OpOverload, tree_leaves

__all__ = ["Values", "copied", "is_plain", "is_random", "moved", "name_of", "values_of"]

Values = Mapping[fx.Node, Any]
"""What each node of a function gives, as fake tensors."""
_NAMES = (
    "drop rand bernoulli rrelu normal_ uniform_ exponential_ cauchy_ geometric_ poisson binomial multinomial"
)
_RANDOM = tuple(_NAMES.split())
"""Parts of the names of functions that draw numbers in the order of memory, which must be that of eager."""
_HOMES = ("torch", "_operator", "builtins", "math")
"""Packages whose functions are known."""
_LEVELS = ("torch._functorch", "torch._C._functorch")
"""Modules with functions that begin and end a level of ``vmap`` or ``grad``."""
_OF_MEMORY = ("as_strided", "storage", "data_ptr", "view_as_complex", "view_as_real")
"""Parts of the names of functions that see how their arguments lie in memory."""


def copied(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A function to be changed, and the node that each of its nodes is a copy of."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    changed = fx.GraphModule(module, graph)
    changed.meta = module.meta
    for old, new in copies.items():
        new.meta = dict(old.meta)
    return changed, {new: old for old, new in copies.items()}


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
    left = {node.args[0] for node in found if "exit_autocast" in name_of(node)}
    for node in reversed([node for node in found if "enter_autocast" in name_of(node)]):
        if node not in left:
            found[node].__exit__(None, None, None)


def is_plain(node: fx.Node) -> bool:
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
    return known and name_of(node) != "set_" and not any(part in name_of(node) for part in _OF_MEMORY)


def name_of(node: fx.Node) -> str:
    """The name of the function that a node calls."""
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def is_random(node: fx.Node) -> bool:
    """Whether a node draws numbers in the order of memory."""
    return any(part in name_of(node) for part in _RANDOM)


def moved(node: fx.Node, originals: Mapping[fx.Node, fx.Node], before: Values, now: Values) -> bool:
    """Whether what a node gives lies in memory otherwise than what its original gives."""
    if node not in originals:
        return False  # it is new
    pairs = zip(_tensors(before[originals[node]]), _tensors(now[node]), strict=True)
    return any(one.stride() != other.stride() for one, other in pairs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
