"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` inside a step: the graph ends where they are called.

Dynamo refuses them where they are read. Where no operator stands before, it then leaves out the whole
function around. In functions that are compiled for Lowtide they may be read, and only the call ends a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.dynamo_internals import module_variable, refuse_module
from lowtide.torch_internals import dynamo_config

__all__ = ["SETTINGS", "changes"]

Change = Callable[[Callable[..., Any], Callable[[Any], bool]], Callable[..., Any]]

SETTINGS = {"allow_rnn": True} if hasattr(dynamo_config, "allow_rnn") else {}
"""Settings of Dynamo's with which they may be read."""

_COMPUTING = frozenset({"forward", "flatten_parameters"})
"""Methods that run kernels of theirs."""


def changes() -> tuple[tuple[Any, str, Change], ...]:
    """Methods of Dynamo's that are changed: the class, the name, and what makes the changed method."""
    return (module_variable(), "call_function", _call), (module_variable(), "call_method", _method)


def _call(method: Callable[..., Any], ours: Callable[[Any], bool]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(self, tx, ours)
        return method(self, tx, *args, **kwargs)

    return call_function


def _method(method: Callable[..., Any], ours: Callable[[Any], bool]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _COMPUTING:
            _refuse(self, tx, ours)
        return method(self, tx, name, *args, **kwargs)

    return call_method


def _refuse(variable: Any, tx: Any, ours: Callable[[Any], bool]) -> None:
    """End the graph as torch does where such a module is read, if this is one."""
    if isinstance(variable.value, nn.RNNBase) and ours(tx.output.compiler_fn):
        with dynamo_config.patch(dict.fromkeys(SETTINGS, False)):
            refuse_module(tx, variable)
