"""The quickest way from Python to an operator: torch's own functions parse arguments faster than an overload.

Each stands for exactly one overload, if it is called with what the overload was captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.torch_internals import without_python

__all__ = ["quickest"]

aten: Any = torch.ops.aten

_OF_TENSORS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.relu.default: torch.relu,
    aten.relu_.default: torch.relu_,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.exp.default: torch.exp,
    aten.neg.default: torch.neg,
}
"""Where all arguments are tensors."""

_AS_THEY_ARE: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.convolution.default: torch.convolution,
    aten.embedding.default: torch.embedding,
    aten.sum.dim_IntList: torch.sum,
}
"""With the arguments of the overload, by position."""


def quickest(
    target: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """What to call for an operator and with what; nodes stand for tensors, and keep their places."""
    if target is aten._to_copy.default and list(options) == ["dtype"] and len(args) == 1:
        return torch.Tensor.to, (args[0], options["dtype"], False, True), {}
    if not options and target in _OF_TENSORS and all(isinstance(arg, fx.Node) for arg in args):
        return _OF_TENSORS[target], args, options
    if not options and target in _AS_THEY_ARE:
        return _AS_THEY_ARE[target], args, options
    return without_python(target), args, options
