"""Collectives of a captured step: each, with the wait for it, is one operator that runs once and in order.

Torch captures a collective as two operators: one that starts it, and a ``wait_tensor`` that gives its result.
The result is the memory of the first, which may be read after the second alone. Joined, they are an operator
like others: it reads what it is given and gives a new tensor. In a captured graph the wait comes right behind
the start, so nothing that could run between them is held up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.distributed_internals import functional_collectives, tensor_holders
from lowtide.torch_internals import OpOverload, schema_of
from lowtide.trace.distributed.exchange import ADD_UP, EXCHANGE

__all__ = ["COLLECTIVES", "is_collective", "join_waits", "lacks_joined_form", "let_go", "name_of"]

COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)
"""Those that are joined with their wait."""
_STARTS = ("_c10d_functional", "_c10d_functional_autograd")
_TALKING = frozenset({*_STARTS, "c10d", "_dtensor", "symm_mem"})
"""Where torch keeps operators that talk to other processes."""
_WAIT = "wait_tensor"
_LOOKS, _PAUSE = 2_000, 1e-4
"""So often a tensor is looked at that a thread of torch's still holds, and seconds between two looks. On a
machine with more threads than processors that thread may have to wait for its turn."""


def _joined(start: Any, wait: Any) -> Callable[..., torch.Tensor]:
    def run(given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        holders = tensor_holders(given)
        found: torch.Tensor = wait(start(given, *args, **kwargs))
        if not found.is_cuda:
            let_go(given, holders)
            let_go(found, 1)
        return found

    return run


def let_go(tensor: torch.Tensor, holders: int) -> None:
    """Wait until nobody else holds a tensor: on the CPU a thread does for a moment after the collective.

    Memory that a Program drops then is free at once.
    """
    for _ in range(_LOOKS):
        if tensor_holders(tensor) <= holders:
            return
        time.sleep(_PAUSE)


_LIBRARY: Any = torch.library.Library("lowtide", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define_all() -> dict[str, Any]:
    """The joined operators by name; none where torch is built without collectives."""
    functional, made = functional_collectives(), dict[str, Any]()
    for name in COLLECTIVES if hasattr(functional, _WAIT) else ():
        start = getattr(functional, name).default
        arguments = str(schema_of(start)).partition("(")[2]
        _LIBRARY.define(f"{name}({arguments}")
        _LIBRARY.impl(name, _joined(start, functional.wait_tensor.default), "CompositeExplicitAutograd")
        made[name] = getattr(torch.ops.lowtide, name).default
    return made


_OF_TORCH = _define_all()
_JOINED = {**_OF_TORCH, "exchange": EXCHANGE, "add_up": ADD_UP}


def name_of(target: Any) -> str | None:
    """What an operator that talks to other processes is called; None for any other operator."""
    if not isinstance(target, OpOverload):
        return None
    if target.namespace in _TALKING:
        return str(target.overloadpacket.__name__)
    return next((name for name, joined in _JOINED.items() if joined is target), None)


def is_collective(target: Any, *, of_torch: bool = False) -> bool:
    """Whether a function is a joined collective; ``of_torch``: one of those that torch has captured."""
    known = _OF_TORCH if of_torch else _JOINED
    return any(target is joined for joined in known.values())


def lacks_joined_form(target: Any) -> bool:
    """Whether an operator talks to other processes in a way that is not supported."""
    return name_of(target) is not None and not is_collective(target)


def join_waits(graph: fx.Graph) -> None:
    """Make one operator of each collective and its waits."""
    for node in list(graph.nodes):
        name = name_of(node.target) if node.op == "call_function" else None
        if name not in _JOINED or node.target.namespace not in _STARTS:
            continue
        with graph.inserting_before(node):
            joined = graph.call_function(_JOINED[name], node.args, node.kwargs)
        joined.meta = dict(node.meta)
        waits = [user for user in node.users if user.op == "call_function" and name_of(user.target) == _WAIT]
        for one in (*waits, node):
            one.replace_all_uses_with(joined)
            graph.erase_node(one)
