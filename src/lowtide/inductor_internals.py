"""Every private name of Inductor that Lowtide uses, under a public name.

As ``torch_internals`` for the rest of torch. Inductor takes seconds to import: that happens at the first use.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.torch_internals import FakeTensorMode, TracingContext, tracing

__all__ = ["compile_kernels", "kernel_compiler", "without_records"]

_SETTINGS = {
    "comprehensive_padding": False,  # strides at the border of a group are those of the step
    "shape_padding": False,
    "layout_optimization": False,
    "emulate_precision_casts": True,  # half precision is rounded between operators
    "fallback_random": True,
    "size_asserts": False,
    "nan_asserts": False,
    "triton.cudagraphs": False,
    "cpp_wrapper": False,
    "joint_graph_constant_folding": False,
    "allow_buffer_reuse": True,
}
"""Of ``torch._inductor.config``. Seen in 2.11, 2.13."""


def compile_kernels(body: fx.GraphModule, mode: FakeTensorMode) -> Callable[[list[Any]], Sequence[Any]]:
    """The function of a graph of ATen operators, compiled for the shapes of its inputs.

    It takes its arguments in a list. Seen in 2.11, 2.13.
    """
    config = import_module("torch._inductor.config")
    compile_fx = import_module("torch._inductor.compile_fx")
    table = import_module("torch._inductor.decomposition").select_decomp_table()
    values = [node.meta["val"] for node in body.graph.nodes if node.op == "placeholder"]
    known = {name: value for name, value in _SETTINGS.items() if _has(config, name)}
    with tracing(TracingContext(mode)), config.patch(known), mode:
        pieces = make_fx(body, decomposition_table=table)(*values)
        compiled: Callable[[list[Any]], Sequence[Any]] = compile_fx.compile_fx_inner(pieces, values)
    return compiled


def kernel_compiler(kind: str) -> str | None:
    """What compiles kernels for a kind of device, in words; None where it is missing. Seen in 2.11, 2.13."""
    if kind != "cpu":
        found = find_spec("triton") is not None
        return f"Triton {getattr(import_module('triton'), '__version__', '')}".strip() if found else None
    try:
        compiler: str = import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except (RuntimeError, OSError):  # of the first, Inductor has a kind of its own
        return None
    return shutil.which(compiler)


def without_records(compiled: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """A compiled function that has run, without what Inductor records of each call. Seen in 2.11, 2.13."""
    found: Callable[[list[Any]], Sequence[Any]] | None = getattr(compiled, "current_callable", None)
    return compiled if found is None else found


def _has(config: Any, name: str) -> bool:
    try:
        config.patch({name: True})
        found = config
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, KeyError):
        return False
    return True
