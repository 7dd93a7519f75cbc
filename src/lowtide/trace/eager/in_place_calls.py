"""Operators that the user, or autograd, runs in place: they are captured with what they are in eager PyTorch.

AOTAutograd makes every operator functional: ``x.masked_fill_(mask, 0)`` becomes ``masked_fill``. That is not
always the same. The result of one lies in memory as ``x`` does, that of the other may not; and a few kernels
round otherwise. So each such call is marked while it is traced, and its result is laid out as ``x`` is. What
runs is a form of the operator which copies ``x`` and runs in place on the copy, or on ``x`` itself where a
plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from lowtide.torch_internals import OpOverload, TorchDispatchMode, overload_name, schema_of
from lowtide.trace.eager.layouts import Layouts, is_functional_of
from lowtide.trace.eager.library import define

__all__ = ["IN_PLACE_OF", "NO_GRAD", "WRITTEN_OVER", "InPlaceCalls", "in_place_form", "operator_in_place"]

IN_PLACE_OF = "lowtide_in_place_of"
"""In the meta of a node: the operator in place that it stands for."""
NO_GRAD = "lowtide_no_grad"
"""In the meta of a node: it was called while gradients were switched off, as all of backward is."""
WRITTEN_OVER = "lowtide_written_over"
"""In the meta of such a node: it is written over its first argument, which autograd still takes it for."""

_FORMS: dict[Any, Any] = {}
"""Operators in place by the form of them that was defined; torch keeps those for the whole process too."""

_SAME_ANYWAY = frozenset({"copy_", "fill_", "zero_"})
"""These read nothing of what they write over: a copy of it would be made for nothing."""


class InPlaceCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While a step is traced: marks what runs in place, and tells the fake tensors' mode of it.

    What runs without gradients is marked too.
    """

    supports_higher_order_operators = True

    def __init__(self, layouts: Layouts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layouts = layouts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        in_place, stopped = _runs_in_place(func), not torch.is_grad_enabled()
        if not in_place and not stopped:
            return func(*args, **(kwargs or {}))
        proxies = get_proxy_mode()
        nodes = None if proxies is None else proxies.tracer.graph.nodes
        last = None if nodes is None else next(iter(reversed(nodes)), None)
        with self._layouts.laid_out_by(func) if in_place else nullcontext():
            result = func(*args, **(kwargs or {}))
        for node in reversed(nodes) if nodes is not None else ():
            if node is last:
                break
            if stopped:
                node.meta[NO_GRAD] = True
                node.meta[WRITTEN_OVER] = _writes(func) and is_functional_of(node.target, func)
            if in_place and is_functional_of(node.target, func):
                node.meta[IN_PLACE_OF] = func
        return result


def in_place_form(functional: Any, in_place: Any, args: Sequence[Any]) -> Any:
    """The operator that gives what the one in place gives, with a result of its own; None: there is none.

    It takes the arguments of the functional one. Some of these ``args`` may be numbers where that takes
    tensors, as operators of torch's own allow.
    """
    schema, other = schema_of(functional), schema_of(in_place)
    if [one.name for one in schema.arguments] != [one.name for one in other.arguments]:
        return None
    numbers = [k for k, value in enumerate(args) if isinstance(value, bool | int | float | complex)]
    kinds = [str(one.type) == "Tensor" for one in schema.arguments]
    numbers = [k for k in numbers if kinds[k]]
    name = "_".join([in_place.overloadpacket.__name__, overload_name(in_place), *map(str, numbers)])
    known = getattr(torch.ops.lowtide, name, None)
    if known is None:
        arguments = str(schema).partition("(")[2]
        for k in numbers:
            text = f"Tensor {schema.arguments[k].name}"
            arguments = arguments.replace(text, text.replace("Tensor", "Scalar"), 1)
        define(f"{name}({arguments}", _copying(in_place), tags=functional.tags)
        known = getattr(torch.ops.lowtide, name)
        _FORMS[known.default] = in_place
    return known.default


def operator_in_place(target: Any) -> Any:
    """The operator in place that a form of one stands for, or None."""
    return _FORMS.get(target) if isinstance(target, OpOverload) else None


def _copying(in_place: Any) -> Callable[..., Any]:
    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return in_place(first.clone(), *args, **kwargs)

    return run


@cache
def _writes(func: Any) -> bool:
    """Whether an operator writes over its first argument."""
    arguments = schema_of(func).arguments if isinstance(func, OpOverload) else ()
    first = arguments[0].alias_info if arguments else None
    return first is not None and first.is_write


@cache
def _runs_in_place(func: Any) -> bool:
    """Whether an operator computes its result over its first argument, and changes nothing else."""
    if not isinstance(func, OpOverload):
        return False
    name = func.overloadpacket.__name__
    if not name.endswith("_") or name.startswith("_") or name in _SAME_ANYWAY or func.namespace != "aten":
        return False
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema_of(func).arguments]
    return torch.Tag.inplace_view not in func.tags and written[:1] == [True] and not any(written[1:])
