"""Private names of Dynamo: how it translates Python, and how it knows whether what it compiled still holds.

Together with ``torch_internals.py``, the only module with private names of torch. Dynamo takes seconds to
import: it is imported when one of these functions is called.
"""

from __future__ import annotations

import contextlib
import logging
import opcode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "change_instructions",
    "compile_context",
    "current_translator",
    "forget_metrics",
    "function_handlers",
    "guard_on",
    "in_a_function_of_a_graph",
    "inner_backend",
    "is_local_behind_break",
    "module_variable",
    "nothing_logged_of_fakes",
    "number_builder",
    "own_errors",
    "refuse_module",
    "sources_of_sizes",
    "value_at",
]


def current_translator() -> Any:
    """What Dynamo translates the code of a frame with now. Seen in 2.10, 2.11, 2.13, 2.14."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


def forget_metrics() -> None:
    """Have torch forget where it has set metrics of compilations that have ended. Seen in 2.13.

    It keeps that for good, as tracebacks, and with them code that was compiled and all that this holds.
    """
    from torch._dynamo.utils import get_metrics_context

    context: Any = get_metrics_context()
    if not context.in_progress():
        getattr(context, "_edits", []).clear()


def compile_context() -> Any:
    """What ``torch.compile`` wraps a function in: a class with hooks for each call. Seen in 2.11, 2.13."""
    from torch._dynamo import eval_frame

    return eval_frame.OptimizeContext


def function_handlers() -> dict[Any, Any]:
    """What Dynamo does with functions that it knows; not a copy. Seen in 2.11, 2.13, 2.14."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = getattr(TorchInGraphFunctionVariable, "_get_handlers", dict)()
    return handlers


def inner_backend(backend: Any) -> Any:
    """The backend that one of torch's own stands in front of, or None. Seen in 2.11, 2.13, 2.14."""
    names = ("compiler_fn", "_torchdynamo_orig_backend", "__wrapped__")
    return next((getattr(backend, name) for name in names if hasattr(backend, name)), None)


def module_variable() -> Any:
    """What stands for a module in Dynamo, where its code is translated. Seen in 2.11, 2.13."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    return UnspecializedNNModuleVariable


def refuse_module(translator: Any, module: Any) -> None:
    """End the graph if this is a module that Dynamo refuses to read. Seen in 2.11, 2.13."""
    from torch._dynamo.variables.builder import VariableBuilder

    VariableBuilder(translator, module.source).wrap_module(module.value)


def own_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises where it has failed itself. Seen in 2.11, 2.13."""
    from torch._dynamo.exc import InternalTorchDynamoError

    return InternalTorchDynamoError, AssertionError


def number_builder() -> Any:
    """What makes variables of values that a frame is given, numbers among them. Seen in 2.11, 2.13."""
    from torch._dynamo.variables.builder import VariableBuilder

    return VariableBuilder


def is_local_behind_break(builder: Any) -> bool:
    """Whether a variable is made of a local value in code behind the end of a graph. Seen in 2.11, 2.13."""
    from torch._dynamo.source import LocalSource

    translator = builder.tx.output.root_tx or builder.tx
    behind = translator.f_code.co_name.startswith("torch_dynamo_resume_in")
    return behind and type(builder.source) is LocalSource


@contextlib.contextmanager
def nothing_logged_of_fakes() -> Iterator[None]:
    """Inside, torch does not log what fails on fake tensors: somebody tries whether it does."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# Instructions of Python, and where the values that a frame reads come from.


def change_instructions(names: Collection[str], change: Callable[[Any], Any]) -> None:
    """Have Dynamo translate some instructions of Python otherwise. Seen in 2.11, 2.13.

    ``change`` is given what translates one, and gives what does from now on.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    for translator in _with_subclasses(InstructionTranslatorBase):
        table = getattr(translator, "dispatch_table", [])
        for code in (opcode.opmap[name] for name in names if name in opcode.opmap):
            if code < len(table) and table[code] is not None:
                table[code] = change(table[code])


def _with_subclasses(kind: Any) -> Iterator[Any]:
    yield kind
    for one in kind.__subclasses__():
        yield from _with_subclasses(one)


def in_a_function_of_a_graph(output: Any) -> bool:
    """Whether a function is translated that an operator takes, such as a checkpoint. Seen in 2.11, 2.13."""
    return output.current_tracer.parent is not None


def value_at(source: Any, output: Any) -> Any:
    """What a source of Dynamo's stands for in the call that is translated. Seen in 2.11, 2.13."""
    from torch._dynamo import guards

    scope = {"L": output.local_scope, "G": output.global_scope}
    return source.get_value(scope, dict(guards._get_closure_vars()), {})


def sources_of_sizes(output: Any) -> Mapping[Any, Sequence[Any]]:
    """The sources of symbols that stand for sizes of inputs. Seen in 2.11, 2.13."""
    found: Mapping[Any, Sequence[Any]] = output.shape_env.var_to_sources
    return found


def guard_on(output: Any, sources: Sequence[Any], holds: Callable[..., bool], told: str) -> None:
    """Have what is compiled from here run only where this holds for what is at these sources then.

    It is asked after all that Dynamo asks by itself. Where it does not hold, Dynamo compiles the frame again;
    ``told`` is the reason that torch's logs give. Seen in 2.11, 2.13.
    """
    from torch._dynamo import guards
    from torch._dynamo.source import ShapeEnvSource

    places = ", ".join(source.name if isinstance(source.name, str) else source.name() for source in sources)

    def create(builder: Any, _: Any) -> None:
        known = {**guards._get_closure_vars(), "___lowtide_holds": holds}
        builder.add_python_lambda_leaf_guard_to_root([f"___lowtide_holds({places})"], [told], known)

    output.guards.add(ShapeEnvSource().make_guard(create))
