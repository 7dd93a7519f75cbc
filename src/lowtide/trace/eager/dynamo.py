"""What Dynamo does for a compiler, and must not do in functions that are compiled for Lowtide.

- It takes ``addcdiv(a, b, c, value=v)`` apart into a division, a product and a sum, and ``addcmul_`` into a
  product and a fused multiplication, so that the last bits differ. Here operators stay as they were written.
- It gives up on a function that it has compiled eight times, and compiles one anew for every value of a
  module's Python counter. Here it goes on, and counters may count.
- It gives up at a logger, ``print`` or ``warnings.warn``. Here they speak behind the graph (``logs.py``).
- It takes no notice of hooks of modules that are registered or removed later. Here it compiles anew.
- It refuses an LSTM where it is read, and may leave out the whole function around. Here a graph ends where
  one is called.
- It ends a graph where Python asks whether a tensor is true. Here it goes on where that is known before the
  step runs (``trace/branches``).
- It tells libraries that they are compiled, which then take other ways than in eager. Here they take those of
  eager (``is_compiling.py``).
- It takes a number for a constant until it has seen another. Here a number that code goes on with behind the
  end of a graph may be any number from the start: it was read from a tensor (``trace/shapes/numbers.py``).
- It runs what it cannot trace without a word. Here the user is told where nothing was captured
  (``nothing_ran.py``).

For other backends Dynamo does what it always did.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lowtide.dynamo_internals import (
    compile_context,
    current_translator,
    function_handlers,
    inner_backend,
    is_local_behind_break,
    module_variable,
    number_builder,
    own_errors,
    refuse_module,
)
from lowtide.torch_internals import TensorVariable, dynamo_config, part_of_compiler, set_part_of_compiler
from lowtide.trace.branches.branches import follow_branches
from lowtide.trace.eager.is_compiling import as_in_eager
from lowtide.trace.eager.layouts import grouped_products
from lowtide.trace.eager.logs import SPEAKING, changes
from lowtide.trace.eager.nothing_ran import warned_once

__all__ = ["adapt_dynamo", "fresh", "lowtides"]

_MARK = "lowtide_backend"
_METHODS = ("method_addcmul_", "method_addcdiv_")
_FUNCTIONS = (torch.addcdiv,)
_COMPILER = 5
"""Where the backend is among the arguments of what compiles a frame."""
_RECURRENT = {"allow_rnn": True} if hasattr(dynamo_config, "allow_rnn") else {}
"""With these an LSTM may be read."""
_COMPUTING = ("forward", "flatten_parameters")
"""Methods of an LSTM that run kernels of its own."""
_SETTINGS = {
    "recompile_limit": 1024,
    "accumulated_recompile_limit": 1024,
    "allow_unspec_int_on_nn_module": True,
    "reorderable_logging_functions": SPEAKING,
    "skip_nnmodule_hook_guards": False,
    **_RECURRENT,
}


def lowtides(backend: Callable[..., Any]) -> Callable[..., Any]:
    """The backend, marked as one of Lowtide's."""
    setattr(backend, _MARK, True)
    return backend


def adapt_dynamo() -> None:
    """Have Dynamo do what Lowtide needs, in functions that are compiled for it; once is enough."""
    compile_frame = part_of_compiler("frame")
    if compile_frame is not None and not hasattr(compile_frame, _MARK):
        set_part_of_compiler("frame", lowtides(_often(compile_frame)))
    for name in _METHODS:
        method = getattr(TensorVariable, name, None)
        if method is not None and not hasattr(method, _MARK):
            setattr(TensorVariable, name, lowtides(_unless_ours(method)))
    handlers = function_handlers()
    for function in _FUNCTIONS:
        handler = handlers.get(function)
        if handler is not None and not hasattr(handler, _MARK):
            handlers[function] = lowtides(_unless_ours(handler))
    as_in_eager(handlers, _found, _MARK)
    follow_branches(_found, _MARK)
    context = compile_context()
    if not hasattr(context.__init__, _MARK):
        context.__init__ = lowtides(warned_once(context.__init__, _ours))
    for variable, name, change in (*changes(), *_recurrent_changes(), *_number_changes()):
        method = getattr(variable, name)
        if not hasattr(method, _MARK):
            setattr(variable, name, lowtides(change(method, _ours)))


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with code of its own, so that torch keeps what it compiled for others apart."""
    if isinstance(function, MethodType):
        return MethodType(fresh(function.__func__), function.__self__)
    if isinstance(function, FunctionType):
        return _twin(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return _twin(call)


def _twin(function: FunctionType | Callable[..., Any]) -> FunctionType:
    assert isinstance(function, FunctionType)
    code, name = function.__code__.replace(), function.__name__
    twin = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _recurrent_changes() -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
    """Methods of what stands for a module in Dynamo that end the graph at an LSTM, a GRU or an RNN."""

    def call(method: Callable[..., Any], ours: Callable[[Any], bool]) -> Callable[..., Any]:
        def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_recurrent(self, tx, ours)
            return method(self, tx, *args, **kwargs)

        return call_function

    def call_by_name(method: Callable[..., Any], ours: Callable[[Any], bool]) -> Callable[..., Any]:
        def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            if name in _COMPUTING:
                _refuse_recurrent(self, tx, ours)
            return method(self, tx, name, *args, **kwargs)

        return call_method

    return (module_variable(), "call_function", call), (module_variable(), "call_method", call_by_name)


def _number_changes() -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
    """What takes a number for a constant."""

    def wrap(method: Callable[..., Any], ours: Callable[[Any], bool]) -> Callable[..., Any]:
        def wrap_symfloat(self: Any, value: float) -> Any:
            if not ours(self.tx.output.compiler_fn) or not is_local_behind_break(self):
                return method(self, value)
            with dynamo_config.patch(assume_static_by_default=False):
                return method(self, value)

        return wrap_symfloat

    return ((number_builder(), "wrap_symfloat", wrap),)


def _refuse_recurrent(variable: Any, tx: Any, ours: Callable[[Any], bool]) -> None:
    """End the graph as torch does where such a module is read."""
    if isinstance(variable.value, nn.RNNBase) and ours(tx.output.compiler_fn):
        with dynamo_config.patch(dict.fromkeys(_RECURRENT, False)):
            refuse_module(tx, variable)


def _often(compile_frame: Callable[..., Any]) -> Callable[..., Any]:
    """What compiles a frame, which does so many times for Lowtide."""

    def compiled(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("compiler_fn", args[_COMPILER] if len(args) > _COMPILER else None)
        if not _ours(given):
            return compile_frame(*args, **kwargs)
        with dynamo_config.patch(_SETTINGS), grouped_products():
            try:
                return compile_frame(*args, **kwargs)
            except own_errors():  # as of numbers that functions inside of others use: constants work
                with dynamo_config.patch(specialize_float=True):
                    return compile_frame(*args, **kwargs)

    return compiled


def _unless_ours(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which takes nothing apart (gives None) in a function that is compiled for Lowtide."""

    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        translator = args[0] if args and hasattr(args[0], "output") else current_translator()
        return None if _ours(translator.output.compiler_fn) else method(self, *args, **kwargs)

    return kept


def _ours(backend: Any) -> bool:
    return _found(backend) is not None


def _found(backend: Any) -> Any:
    """The backend of Lowtide's that this is or stands in front of; None where it is another's."""
    seen: list[Any] = []
    while backend is not None and not any(backend is one for one in seen):
        if getattr(backend, _MARK, False):
            return backend
        seen.append(backend)
        backend = inner_backend(backend)
    return None
