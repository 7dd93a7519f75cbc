"""What AOTAutograd has traced, to be compiled for one Program after the other.

AOTAutograd traces a function, then has it compiled. The second part can be done again without the first.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.torch_internals import TracingContext, aot_autograd, part_of_compiler, set_part_of_compiler
from lowtide.trace.refusal import calls_torch

__all__ = ["Compilers", "Traced", "called_before", "traced_alone", "traced_and_compiled"]


@dataclass(frozen=True, slots=True)
class Compilers:
    """What AOTAutograd asks for the parts of a function."""

    partition: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    inference: Callable[..., Any]


class Traced:
    """A function that AOTAutograd has traced, to be compiled again without tracing it again."""

    def __init__(self, compile_traced: Callable[..., Any], state: Any, capture: Any) -> None:
        self._compile, self.state, self.capture = compile_traced, state, capture
        self._metadata = _copied(state.fw_metadata)  # compiling changes it
        self._subclasses = _copied(getattr(capture, "maybe_subclass_meta", None))

    def compiled(self, compilers: Compilers) -> Callable[..., Any]:
        """The function, compiled by these; nothing of it is traced by Dynamo."""
        state, capture = copy.copy(self.state), copy.copy(self.capture)
        state.fw_metadata = _copied(self._metadata)
        if self._subclasses is not None:
            capture.maybe_subclass_meta = _copied(self._subclasses)
        capture.wrappers = [copy.copy(one) for one in capture.wrappers]
        context = TracingContext.try_get()
        if context is not None:
            context.fw_metadata = state.fw_metadata
        untraced: Any = torch.compiler.disable

        def backward(*args: Any) -> Any:
            return untraced(compilers.backward(*args))

        found, _ = self._compile(
            state, capture, compilers.partition, compilers.forward, backward, compilers.inference
        )

        def call(*arguments: Any) -> Any:
            return found(list(arguments))

        called: Callable[..., Any] = untraced(call)
        return called

    def with_records(self, state: Any, capture: Any) -> Traced:
        """The same function by other records of AOTAutograd; nothing of it is logged again."""
        state.aot_config = replace(state.aot_config, enable_log=False)
        return Traced(self._compile, state, capture)


def _copied(record: Any) -> Any:
    """A record of AOTAutograd, with records of its own for tensors that consist of others, as DTensors do."""
    if record is None:
        return None
    found = copy.copy(record)
    for name, value in vars(record).items():
        if name == "fw_metadata":
            setattr(found, name, _copied(value))
        elif isinstance(value, list) and any(hasattr(one, "original_subclass") for one in value):
            setattr(found, name, [_copied(one) if hasattr(one, "attrs") else one for one in value])
        elif name == "attrs":
            parts = {key: _copied(one) if hasattr(one, "attrs") else one for key, one in value.items()}
            setattr(found, name, parts)
    return found


@contextlib.contextmanager
def called_before() -> Iterator[None]:
    """Inside, torch does not look at the operators of a function that it calls for the first time.

    It has looked at them when the function ran with other shapes.
    """
    look = part_of_compiler("first call")
    if look is not None:
        set_part_of_compiler("first call", contextlib.nullcontext)
    try:
        yield
    finally:
        if look is not None:
            set_part_of_compiler("first call", look)


class _Ended(Exception):  # noqa: N818  it is no error
    """Ends AOTAutograd where all is traced."""


@calls_torch
def traced_and_compiled(
    module: fx.GraphModule, inputs: Sequence[Any], compilers: Compilers
) -> tuple[Callable[..., Any], Traced | None]:
    """The function, and what was traced, where it can be compiled again.

    A module with parameters of its own is traced again each time, and so is every one where this version of
    torch does not trace and compile in two stages.
    """
    found: list[Traced] = []
    compiled = _compiled(module, inputs, compilers, found, lambda: None)
    return compiled, found[0] if found else None


@calls_torch
def traced_alone(module: fx.GraphModule, inputs: Sequence[Any]) -> Traced | None:
    """What is traced of the function, if it can be compiled again; nothing is compiled."""
    found: list[Traced] = []

    def never(*_: Any, **__: Any) -> Any:
        raise _Ended

    try:
        _compiled(module, inputs, Compilers(never, never, never, never), found, never)
    except _Ended:
        return found[0] if found else None
    return None


@calls_torch
def _compiled(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    compilers: Compilers,
    found: list[Traced],
    then: Callable[[], None],
) -> Callable[..., Any]:
    second = part_of_compiler("traced")

    def compile_traced(state: Any, capture: Any, *args: Any) -> Any:
        assert second is not None
        alone = not list(module.parameters()) and not list(module.buffers())
        if alone:
            found.append(Traced(second, state, capture))
        then()
        return second(state, capture, *args)

    if second is not None:
        set_part_of_compiler("traced", compile_traced)
    try:
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=compilers.forward,
            bw_compiler=compilers.backward,
            inference_compiler=compilers.inference,
            partition_fn=compilers.partition,
            keep_inference_input_mutations=True,
        )(module, inputs)
    finally:
        if second is not None:
            set_part_of_compiler("traced", second)
    return compiled
