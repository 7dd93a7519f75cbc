"""Which operators of a traced graph may run inside a group, and what each of them reads."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lowtide.torch_internals import OpOverload, schema_of, storage_id

__all__ = [
    "fuses",
    "is_fusible",
    "is_part",
    "is_reduction",
    "is_view",
    "owner",
    "readers",
    "reduces_outermost",
    "size_of",
    "tensors_read",
    "values_of",
    "writes",
]

_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "var_mean", "logsumexp", "any", "all"})
_NORMALIZATIONS = frozenset(
    {
        "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
        "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
        "_fused_rms_norm", "_fused_rms_norm_backward",
    }
)  # fmt: skip
_OTHERS = frozenset(
    {
        "_to_copy", "cat", "constant_pad_nd", "slice_backward", "select_backward", "embedding", "gather",
        "index_select", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "arange", "tril",
        "triu", "where", "fill", "repeat", "flip", "scalar_tensor", "mse_loss", "mse_loss_backward",
        "hardtanh_backward", "log_sigmoid_forward", "log_sigmoid_backward", "new_zeros", "new_ones",
        "new_full", "expand_copy", "stack", "masked_fill", "_unsafe_view", "elu_backward",
        "softplus_backward", "leaky_relu_backward", "hardswish_backward", "hardsigmoid_backward",
        "glu", "glu_backward",
    }
)  # fmt: skip
"""Casts, concatenations, paddings, gathers, constants and pointwise operators without the tag."""
_KINDS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8,
                    torch.int8, torch.int16, torch.int32, torch.int64})  # fmt: skip


_VIEW = "lowtide_is_view"
"""In the meta of a node: what it was looked at with, and whether it is a view."""


def values_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node gives, as shape, type and layout."""
    value = node.meta.get("val")
    several = value if isinstance(value, tuple | list) else (value,)
    return [one for one in several if isinstance(one, torch.Tensor)]


def size_of(node: fx.Node) -> int:
    """Bytes of all that a node gives."""
    return sum(int(value.numel() * value.itemsize) for value in values_of(node))


def is_part(node: fx.Node) -> bool:
    """Whether a node is one result of an operator with several."""
    return node.target is operator.getitem and not is_view(node)


def is_view(node: fx.Node) -> bool:
    """Whether a node only names memory that is there."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    now = node.target, node.args, node.kwargs, node.meta.get("val")
    before, known = node.meta.get(_VIEW, (None, False))
    if before is None or any(one is not other for one, other in zip(before, now, strict=True)):
        known = _names_memory(node)
        node.meta[_VIEW] = now, known
    return bool(known)


def _names_memory(node: fx.Node) -> bool:
    """Whether all that an operator gives lies where something that it reads does."""
    schema = schema_of(node.target)
    if schema is None or schema.is_mutable or not node.all_input_nodes:
        return False
    made = {storage_id(value) for value in values_of(node) if value.layout is torch.strided}
    read = {
        storage_id(value)
        for source in node.all_input_nodes
        for value in values_of(source)
        if value.layout is torch.strided
    }
    return bool(made) and made <= read


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler fuses the operator with its neighbours."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_view(node):
        return False
    gathers = node.target.overloadpacket.__name__ == "index" and _gathers(node)
    return (gathers or fuses(node.target)) and bool(values_of(node)) and _on_one_device(node)


def fuses(target: Any) -> bool:
    """Whether calls of an operator are fused, as far as that does not depend on their arguments."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if schema_of(target).is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    name = target.overloadpacket.__name__
    known = name in _REDUCTIONS or name in _NORMALIZATIONS or name in _OTHERS
    return known or torch.Tag.pointwise in target.tags


def is_reduction(node: fx.Node) -> bool:
    """Whether computing it again reads much more than it gives."""
    read = sum(size_of(source) for source in node.all_input_nodes)
    return read >= 4 * size_of(node)


def reduces_outermost(node: fx.Node) -> bool:
    """Whether an operator adds up over the first axis: no kernel can go on with its result."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket.__name__ not in _REDUCTIONS:
        return False
    source = node.args[0]
    axes: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(axes, list | tuple) or not axes:
        return True
    assert isinstance(source, fx.Node)
    sizes = values_of(source)[0].shape
    first = next((k for k, size in enumerate(sizes) if size > 1), 0)
    return first in [axis % max(1, len(sizes)) for axis in axes]


def _gathers(node: fx.Node) -> bool:
    """Whether indices are whole numbers: a mask gives a size that depends on values."""
    indices: Any = node.args[1]
    found = [one.meta.get("val") for one in indices if isinstance(one, fx.Node)]
    return all(isinstance(one, torch.Tensor) and one.dtype in (torch.int32, torch.int64) for one in found)


def _on_one_device(node: fx.Node) -> bool:
    made = values_of(node)
    read = [value for source in node.all_input_nodes for value in values_of(source)]
    device = made[0].device
    return all(
        value.layout is torch.strided
        and value.dtype in _KINDS
        and (
            value.device == device
            or (value.dim() == 0 and value.device.type == "cpu" and value is not made[0])
        )
        for value in (*made, *read)
    ) and all(value.device == device for value in made)


def writes(node: fx.Node) -> bool:
    """Whether an operator may write to what it is given."""
    schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
    return schema is None or bool(schema.is_mutable)


def owner(tensor: fx.Node) -> fx.Node:
    """The operator that makes a tensor."""
    source = tensor.args[0] if is_part(tensor) else tensor
    assert isinstance(source, fx.Node)
    return source


def tensors_read(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node reads, through views."""
    for source in node.all_input_nodes:
        yield from tensors_read(source) if is_view(source) else (source,)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operators that read what a node gives, through views; once for each way."""
    for user in node.users:
        yield from readers(user) if is_view(user) or is_part(user) else (user,)
