"""Parts of a captured function that the user checkpoints: their operators are in the step as all others are.

A plan says what is kept of them. Run eagerly as torch captured it, such a part runs again in backward with
other random numbers than in forward; to compare with, it runs as it would without a checkpoint.
"""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["is_checkpoint", "without_checkpoints"]

_NAMES = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})
_OPTIONS = frozenset(
    {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
)
"""Arguments of a checkpoint, which are not those of the part."""


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node runs a part of the function under a checkpoint."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _NAMES


def without_checkpoints(module: fx.GraphModule) -> fx.GraphModule:
    """A function that gives the same, and keeps for backward what eager keeps without checkpoints."""
    if not any(is_checkpoint(node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if is_checkpoint(node):
            node.target = _run
    return fx.GraphModule(module, graph)


def _run(part: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    own = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    return without_checkpoints(part)(*args, **own)
