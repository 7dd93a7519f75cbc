"""``print``, ``warnings.warn`` and loggers inside a step: what they say is said when the graph has run.

Dynamo breaks a graph at each of them, or leaves the call out. In functions that are compiled for Lowtide each
call is made at every step, in order, behind the captured graph. Tensors are copied where the call stands and
shown without the name of their gradient's function: with a gradient they would be results of the step.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lowtide.torch_internals import (
    ConstantVariable,
    DebuggingVariable,
    LoggingLoggerVariable,
    StringFormatVariable,
    TensorVariable,
)

__all__ = ["SPEAKING", "changes"]

Change = Callable[[Callable[..., Any], Callable[[Any], bool]], Callable[..., Any]]
"""Takes a method, and what tells whether a backend is one of Lowtide's; gives the changed method."""

SPEAKING = {print, warnings.warn}
"""Functions that Dynamo takes for ones that only say something."""

_ASKING = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers"})
"""Methods of a logger that tell something: it is what it was when the step was captured."""


def changes() -> tuple[tuple[Any, str, Change], ...]:
    """Methods of Dynamo's that are changed: the class, the name, and what makes the changed method."""
    return (DebuggingVariable, "call_function", _function), (LoggingLoggerVariable, "call_method", _method)


def _function(method: Callable[..., Any], ours: Callable[[Any], bool]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if tx.export or not ours(tx.output.compiler_fn):
            return method(self, tx, args, kwargs)
        return _say_later(tx, self.value, args, kwargs)

    return call_function


def _method(method: Callable[..., Any], ours: Callable[[Any], bool]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        said: logging.Logger = self.value
        function = getattr(said, name, None)
        if tx.export or not ours(tx.output.compiler_fn) or not callable(function):
            return method(self, tx, name, args, kwargs)
        if name in _ASKING and all(one.is_python_constant() for one in args):
            return ConstantVariable.create(function(*(one.as_python_constant() for one in args)))
        return _say_later(tx, function, args, kwargs)

    return call_method


def _say_later(tx: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put the call behind the graph."""
    said = _later()(partial(_by_name, function, tuple(kwargs)))
    tx.output.root_tx.debug_locals.append((said, [_shown(tx, one) for one in (*args, *kwargs.values())]))
    return ConstantVariable.create(None)


def _by_name(function: Callable[..., Any], names: Sequence[str], *args: Any) -> None:
    """Call the function with the last arguments by their names."""
    count = len(args) - len(names)
    function(*args[:count], **dict(zip(names, args[count:], strict=True)))


def _shown(tx: Any, argument: Any) -> Any:
    """An argument as it is now, without gradients: what is changed in place later is shown as it was."""
    if isinstance(argument, TensorVariable):
        return argument.call_method(tx, "detach", [], {}).call_method(tx, "clone", [], {})
    if isinstance(argument, StringFormatVariable):
        named = {name: _shown(tx, one) for name, one in argument.sym_kwargs.items()}
        args = [_shown(tx, one) for one in argument.sym_args]
        return StringFormatVariable.create(argument.format_string, args, named)
    items = None if argument.is_python_constant() else getattr(argument, "items", None)
    alone = {"source": None, "mutation_type": None}  # an object of its own, which nobody changes
    if isinstance(items, list):
        return argument.clone(items=[_shown(tx, one) for one in items], **alone)
    if isinstance(items, dict):
        return argument.clone(items={key: _shown(tx, one) for key, one in items.items()}, **alone)
    return argument


def _later() -> Callable[[Callable[..., Any]], Any]:
    """Makes what stands for a function in Dynamo that the compiled code finds among its globals."""

    def reconstruct(self: Any, codegen: Any) -> None:
        name = codegen.tx.output.install_global_by_id("lowtide_says", self.value)
        codegen.append_output(codegen.create_load_global(name, add=True))

    made: Callable[[Callable[..., Any]], Any] = type(
        "Said", (DebuggingVariable,), {"reconstruct": reconstruct}
    )
    return made
