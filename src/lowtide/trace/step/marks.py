"""What a user's function says about gradients that its operators alone do not tell.

A captured forward pass that is differentiated again, as tiles are, would lose it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from lowtide.torch_internals import GRADIENT_FUNCTIONS, HigherOrderOperator
from lowtide.trace.distributed.gradient_sums import adds_gradients_up
from lowtide.trace.step.checkpoints import is_checkpoint
from lowtide.trace.step.sources import where

__all__ = ["gradient_marks"]

_METHODS = frozenset({"detach_", "requires_grad_", "register_hook"})
_FUNCTIONS = GRADIENT_FUNCTIONS | {"detach_", "inference_mode"}


def gradient_marks(module: fx.GraphModule) -> str | None:
    """What the function does to gradients, in words; None where they follow from its operators."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            said = _said(node)
            if said is not None:
                return said + _place(node)
    return None


def _said(node: fx.Node) -> str | None:
    if node.op == "call_method" and node.target in _METHODS:
        return f"it calls {node.target}"
    if node.op != "call_function":
        return None
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    if isinstance(target, HigherOrderOperator) and not (is_checkpoint(node) or adds_gradients_up(node)):
        return f"it has a part with rules of its own ({name})"
    if name in _FUNCTIONS or (name == "getattr" and len(node.args) > 1 and node.args[1] == "data"):
        return f"it calls {name}"
    return None


def _place(node: fx.Node) -> str:
    """Where in the user's code that is; torch keeps no line of a switch, but one of what follows it."""
    word, one = "at", node
    while not one.meta.get("stack_trace"):
        word, one = "before", one.next
        if one.op in ("output", "root"):
            return ""
    return f" {word} {where(one)}"
