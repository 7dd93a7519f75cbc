"""Which gradients of a captured step are added up over processes, as those of what all of them have.

``gradient_summed`` is no operator of forward, so a step that is differentiated again, as around tiles, has
them no more: what is read here says where they have to be.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from lowtide.trace.distributed.exchange import ADD_UP, EXCHANGE, SPREAD

__all__ = ["adds_gradients_up", "is_of_a_share", "summed_over"]

_LAID_OUT = "lowtide.dense"


def is_of_a_share(node: fx.Node) -> bool:
    """Whether an operator connects the devices of a split step: it has a gradient, in which all take part."""
    return node.target in (ADD_UP, EXCHANGE, SPREAD)


def summed_over(gradient: object) -> tuple[str, ...]:
    """The connections over which a gradient was added up last, as that of a parameter, in their order."""
    wires: list[str] = []
    while isinstance(gradient, fx.Node) and gradient.op == "call_function":
        if gradient.target is ADD_UP and gradient.args[1]:
            wires.append(str(gradient.args[2]))
        elif str(getattr(gradient.target, "_overloadpacket", "")) != _LAID_OUT:
            break
        gradient = gradient.args[0]
    return tuple(reversed(wires))


def adds_gradients_up(node: fx.Node) -> bool:
    """Whether a part of a function with rules of its own does nothing but ``gradient_summed``."""
    parts: list[Any] = [one for one in node.args if isinstance(one, fx.Node) and one.op == "get_attr"]
    root = node.graph.owning_module
    if len(parts) != 2 or root is None:
        return False
    backward = getattr(root, str(parts[1].target), None)
    if not isinstance(backward, fx.GraphModule):
        return False
    calls = [one for one in backward.graph.nodes if one.op == "call_function"]
    tensors = [one for one in calls if "_set_grad_enabled" not in str(one.target)]
    return bool(tensors) and all(one.target is ADD_UP for one in tensors)
