"""Every private name of torch that Lowtide uses, under a public name.

Torch may change these names in any release: they stand in this module alone, those by which Dynamo translates
Python in ``dynamo_internals.py``, those of memory and time in ``device_internals.py``, and those of tensors
of several processes in ``distributed_internals.py``;
``tests/test_architecture.py`` holds the others to it. Each name, or group, says in which versions of torch it
was seen, and handles what differs between them.
Operators such as ``torch.ops.aten._to_copy`` are not among them: a captured graph calls them by these names.
Dynamo, AOTAutograd and Inductor take seconds to import: their names are looked up when they are first used.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch

# Python versions of operators, put aside while a step is traced. Seen in 2.11, 2.13, 2.14.
import torch._decomp

# Asks a subclass of Tensor as a plain tensor; names the kernels of an operator. Seen in 2.11, 2.13, 2.14.
from torch._C import DisableTorchFunctionSubclass, DispatchKey

# A tensor on another's storage, by sizes, strides and how much further it begins. Seen in 2.11, 2.13.
from torch._C._dynamo.guards import _reinterpret_tensor as reinterpret  # type: ignore[attr-defined]

# The context that AOTAutograd traces in, with its mode of fake tensors. Seen in 2.11, 2.13, 2.14.
from torch._guards import TracingContext, tracing

# The class of operators, and of those that take functions. Seen in 2.11, 2.13, 2.14.
from torch._ops import HigherOrderOperator, OpOverload

# Tensors that have a shape and no memory, and what makes them. Seen in 2.11, 2.13, 2.14.
from torch._subclasses import FakeTensor, FakeTensorMode

# A graph without code, for one that is read and never run. Seen in 2.11, 2.13, 2.14.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# The base class of what watches operators below autograd. Seen in 2.11, 2.13, 2.14.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# The tensors in nested arguments and results. Seen in 2.11, 2.13, 2.14.
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.distributed_internals import local_of

if TYPE_CHECKING:
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        RestartAnalysis,
        ShortenTraceback,
        TorchDynamoException,
        TorchRuntimeError,
    )
    from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SkipFunctionVariable
    from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable, StringFormatVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_partition
    from torch.utils._sympy.value_ranges import ValueRanges

__all__ = [
    "GRADIENT_FUNCTIONS",
    "MATMUL_TAKES_SYMBOLS",
    "BackendCompilerFailed",
    "BuiltinVariable",
    "ConstantVariable",
    "DebuggingVariable",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "LazyGraphModule",
    "LoggingLoggerVariable",
    "OpOverload",
    "RestartAnalysis",
    "ShortenTraceback",
    "SkipFunctionVariable",
    "StringFormatVariable",
    "TensorVariable",
    "TorchDispatchMode",
    "TorchDynamoException",
    "TorchRuntimeError",
    "TracingContext",
    "ValueRanges",
    "aot_autograd",
    "autocast_disabled",
    "backward_keeps_graph",
    "boxed",
    "calls_are_watched",
    "dynamo_config",
    "expressions",
    "forget_kernels",
    "free_weak_storage",
    "functorch_config",
    "inductor_config",
    "inside_double_backward",
    "inside_transform",
    "is_batched",
    "is_excluded",
    "is_view",
    "last_sequence_number",
    "meta_of_grouped_product",
    "min_cut_partition",
    "modes_disabled",
    "overload_name",
    "part_of_compiler",
    "real_kernels",
    "reinterpret",
    "running_sequence_number",
    "saved_tensors_are_hooked",
    "schema_of",
    "set_meta_of_grouped_product",
    "set_part_of_compiler",
    "sparse_entries",
    "storage_expired",
    "storage_id",
    "storage_owners",
    "tracing",
    "tree_leaves",
    "tree_map_only",
    "trust_no_dict_versions",
    "version_of",
    "weak_storage",
    "without_python",
]

Function = TypeVar("Function", bound=Callable[..., Any])

# Dynamo, AOTAutograd and Inductor, imported when they are asked for.
_LATER = {
    # Turns a forward graph into a joint one and asks for a partition of it. Seen in 2.11, 2.13, 2.14.
    "aot_autograd": "torch._dynamo.backends.common:aot_autograd",
    # Settings, changed while a step is traced. Seen in 2.11, 2.13, 2.14.
    "dynamo_config": "torch._dynamo.config",
    "functorch_config": "torch._functorch.config",
    "inductor_config": "torch._inductor.config",
    # What torch.compile raises, and what passes through it unwrapped. Seen in 2.11, 2.13, 2.14.
    "BackendCompilerFailed": "torch._dynamo.exc:BackendCompilerFailed",
    "RestartAnalysis": "torch._dynamo.exc:RestartAnalysis",
    "ShortenTraceback": "torch._dynamo.exc:ShortenTraceback",
    "TorchDynamoException": "torch._dynamo.exc:TorchDynamoException",
    "TorchRuntimeError": "torch._dynamo.exc:TorchRuntimeError",
    # Stands for a tensor in Dynamo; some of its methods take an operator apart. Seen in 2.11, 2.13, 2.14.
    "TensorVariable": "torch._dynamo.variables.tensor:TensorVariable",
    # Stand in Dynamo for print and warn, a logger, a text, constants, builtins, skipped ones: 2.11, 2.13.
    "DebuggingVariable": "torch._dynamo.variables.misc:DebuggingVariable",
    "LoggingLoggerVariable": "torch._dynamo.variables.misc:LoggingLoggerVariable",
    "StringFormatVariable": "torch._dynamo.variables.misc:StringFormatVariable",
    "ConstantVariable": "torch._dynamo.variables:ConstantVariable",
    "BuiltinVariable": "torch._dynamo.variables:BuiltinVariable",
    "SkipFunctionVariable": "torch._dynamo.variables:SkipFunctionVariable",
    # Bounds of a size; torch's own partitioner, a baseline for plans. Seen in 2.11, 2.13.
    "ValueRanges": "torch.utils._sympy.value_ranges:ValueRanges",
    "min_cut_partition": "torch._functorch.partitioners:min_cut_rematerialization_partition",
}
"""Public names, and where torch has them: a module, or a name in one."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = pkgutil.resolve_name(_LATER[name])
        return found


_PARTS = {
    # What Dynamo compiles a frame with. Seen in 2.11, 2.13, 2.14.
    "frame": ("torch._dynamo.convert_frame", "_compile"),
    # What AOTAutograd compiles with once it has traced. Seen in 2.10, 2.11, 2.13.
    "traced": ("torch._functorch.aot_autograd", "aot_stage2_compile"),
    # What looks at the operators of a function in its first call. Seen in 2.11, 2.13.
    "first call": ("torch._functorch._aot_autograd.runtime_wrappers", "_AnalyzeCustomOpInputOutputMode"),
    # How AOTAutograd takes the gradient of a result to lie. Seen in 2.11, 2.13.
    "incoming": (
        "torch._functorch._aot_autograd.collect_metadata_analysis",
        "coerce_tangent_and_suggest_memory_format",
    ),
}


def part_of_compiler(name: str) -> Callable[..., Any] | None:
    """A function of torch's compiler, by its name above. None where this version has none."""
    module, attribute = _PARTS[name]
    return getattr(import_module(module), attribute, None)


def set_part_of_compiler(name: str, function: Callable[..., Any]) -> None:
    """Have torch's compiler call this instead."""
    module, attribute = _PARTS[name]
    setattr(import_module(module), attribute, function)


def boxed(function: Function) -> Function:
    """The function, marked as one that takes its arguments in a list. Seen in 2.11, 2.13, 2.14."""
    setattr(function, "_boxed_call", True)  # noqa: B010
    return function


def trust_no_dict_versions(python: tuple[int, ...] = tuple(sys.version_info[:3])) -> None:
    """On Python 3.13.0, have torch check all it assumed about a model before it runs a compiled function.

    There a dictionary that changes may keep its version (github.com/python/cpython/issues/125608), by which
    torch 2.10 and 2.11 tell that nothing changed: after ``model.eval()`` it would go on training.
    The setting was seen in 2.11, 2.13, 2.14.
    """
    from torch._dynamo import config

    settings: Any = config
    if python == (3, 13, 0) and getattr(settings, "use_recursive_dict_tags_for_guards", False):
        settings.use_recursive_dict_tags_for_guards = False


# Operators and graphs.

GRADIENT_FUNCTIONS = frozenset({"_get_data_attr"})
"""Functions in a graph of Dynamo's that read past gradients. Seen in 2.11, 2.13, 2.14."""


def schema_of(target: Any) -> Any:
    """The schema of an operator; None for another function. Seen in 2.11, 2.13, 2.14."""
    return getattr(target, "_schema", None)


def without_python(target: Any) -> Any:
    """What an operator calls, without its Python; another function as it is. Seen in 2.11, 2.13."""
    return target._op if type(target) is OpOverload else target


def overload_name(target: Any) -> str:
    """The name of an operator's overload; empty for another function. Seen in 2.11, 2.13, 2.14."""
    return str(getattr(target, "_overloadname", ""))


def forget_kernels(operator: Any) -> None:
    """Have an operator choose its kernels anew, once others are there. Seen in 2.11, 2.13, 2.14."""
    operator._dispatch_cache.clear()


MATMUL_TAKES_SYMBOLS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether the built-in ``matmul`` is traced with symbols for sizes: not in 2.11, it is in 2.13."""


def calls_are_watched() -> bool:
    """Whether a dispatch mode looks at every call of an operator in this thread. Seen in 2.11, 2.13.

    One with ``leaves_calls_alone`` changes some operators and looks at no other.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not all(getattr(mode, "leaves_calls_alone", False) for mode in _get_current_dispatch_mode_stack())


def inside_transform() -> bool:
    """Whether a transform of torch.func runs, such as grad or linearize. Seen in 2.11, 2.13."""
    tracing_calls: Callable[[], bool] = import_module("torch.fx._symbolic_trace").is_fx_symbolic_tracing
    return torch._C._functorch.peek_interpreter_stack() is not None or tracing_calls()


def is_batched(value: Any) -> bool:
    """Whether this is many tensors in one, as ``is_grads_batched`` makes them. Seen in 2.13."""
    functorch = torch._C._functorch
    legacy = getattr(functorch, "is_legacy_batchedtensor", functorch.is_batchedtensor)
    return isinstance(value, torch.Tensor) and (functorch.is_batchedtensor(value) or legacy(value))


def is_excluded(key: DispatchKey) -> bool:
    """Whether kernels of this key are passed over in this thread. Seen in 2.11, 2.13, 2.14."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def meta_of_grouped_product() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What checks a product of groups without values, and what gives its result. Seen in 2.11, 2.13."""
    meta: Any = import_module("torch._meta_registrations")
    names = ("_meta_grouped_mm_common", "_create_grouped_mm_output_tensor")
    check, result = (getattr(meta, name, None) for name in names)
    return None if check is None or result is None else (check, result)


def set_meta_of_grouped_product(check: Callable[..., Any]) -> None:
    """Have products of groups without values checked by this."""
    setattr(import_module("torch._meta_registrations"), "_meta_grouped_mm_common", check)  # noqa: B010


def expressions(number: Any) -> set[Any]:
    """How a symbolic number may be written in what is computed from it. Seen in 2.11, 2.13, 2.14."""
    return {number.node.expr, getattr(number.node, "_expr", number.node.expr)}


# Tensors and storages.

is_view = torch.Tensor._is_view
"""Whether autograd takes a tensor for a view. The method itself. Seen in 2.11, 2.13, 2.14."""


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows whenever the tensor is changed in place. Seen in 2.11, 2.13, 2.14."""
    return tensor._version


def sparse_entries(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor in COO form, as they are stored. Seen in 2.11, 2.13, 2.14."""
    return tensor._indices(), tensor._values()


def storage_id(tensor: torch.Tensor) -> int:
    """Tells the storages of strided tensors apart, fake or real. Seen in 2.11, 2.13, 2.14."""
    return int(local_of(tensor).untyped_storage()._cdata)


def storage_owners(tensor: torch.Tensor) -> int:
    """How many tensors and others are on a storage. Seen in 2.11, 2.13, 2.14."""
    count: int = torch._C._storage_Use_Count(storage_id(tensor))
    return count


def weak_storage(tensor: torch.Tensor) -> int:
    """A weak reference to a tensor's storage, which must be freed. Seen in 2.11, 2.13, 2.14."""
    storage: Any = tensor.untyped_storage()
    return int(storage._weak_ref())


def storage_expired(weak: int) -> bool:
    """Whether nobody holds the storage any more. Seen in 2.11, 2.13, 2.14."""
    storage: Any = torch.UntypedStorage
    return bool(storage._expired(weak))


def free_weak_storage(weak: int) -> None:
    """Give a weak reference back. Seen in 2.11, 2.13, 2.14."""
    storage: Any = torch.UntypedStorage
    storage._free_weak_ref(weak)


# Autograd.


def autocast_disabled() -> AbstractContextManager[Any]:
    """Inside, autocast casts nothing. Seen in 2.11, 2.13, 2.14."""
    return torch._C._DisableAutocast()


def modes_disabled() -> AbstractContextManager[Any]:
    """Inside, tensors are real ones, also while torch traces. Seen in 2.11, 2.13."""
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found


@contextmanager
def real_kernels() -> Iterator[None]:
    """Inside, operators run the kernels of real tensors, none written in Python. Seen in 2.11, 2.13."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def last_sequence_number() -> int:
    """What autograd has numbered last in this thread. Seen in 2.11, 2.13, 2.14."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def running_sequence_number() -> int | None:
    """The number of the node whose backward runs; None outside of one. Seen in 2.11, 2.13, 2.14."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def saved_tensors_are_hooked() -> bool:
    """Whether somebody is shown what autograd saves. Seen in 2.11, 2.13, 2.14."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def backward_keeps_graph() -> bool:
    """Whether the backward that runs was asked for with retain_graph. Seen in 2.11, 2.13, 2.14."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def inside_double_backward() -> bool:
    """Whether AOTAutograd prepares a backward of a backward, by the first names: 2.11, 2.13, 2.14."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_varnames[:2] == ("double_ctx", "unused_args"):
            return True
    return False
