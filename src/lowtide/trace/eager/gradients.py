"""Gradients as autograd leaves them in ``.grad``: with the strides of their leaf, each in memory of its own.

What backward returns for a leaf may have other strides (that of a weight behind a convolution over
channels-last images), be one number for all elements (``weight.sum()``), or be the gradient of another leaf
too (``a + b``). Autograd copies such a gradient when it arrives at the leaf. At the end of a planned step
that would be memory which no plan knows of: so the copy is an operator of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowtide.distributed_internals import local_of
from lowtide.trace.eager.layouts import as_number
from lowtide.trace.eager.library import define

__all__ = [
    "copy_gradients",
    "gradient_strides",
    "is_dense",
    "laid_out",
    "owners_of_gradients",
    "place_of",
    "whole",
]

_FROM_CODE = ("seq_nr", "stack_trace", "nn_module_stack", "fwd_nn_module_stack")


def _dense(part: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(part.shape, stride, dtype=part.dtype, device=part.device).copy_(part)


define("dense(Tensor part, int[] stride) -> Tensor", _dense)


def gradient_strides(inputs: Sequence[object]) -> list[tuple[int, ...] | None]:
    """The strides in which autograd keeps the gradient of each input; None where it keeps none."""
    return [_kept(value) if isinstance(value, torch.Tensor) else None for value in inputs]


def _kept(value: torch.Tensor) -> tuple[int, ...] | None:
    if not value.requires_grad or not value.is_leaf or value.layout is not torch.strided:
        return None
    value = local_of(value)
    if is_dense(tuple(map(as_number, value.shape)), tuple(map(as_number, value.stride()))):
        return tuple(value.stride())
    return tuple(torch.empty(value.shape, device="meta").stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether every place between the first and the last element of a tensor is one element."""
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= size
    return True


def copy_gradients(
    joint: fx.GraphModule, num_outputs: int, strides: Sequence[tuple[int, ...] | None]
) -> None:
    """Copy what backward returns where it does not lie in these strides, was given, or was returned before.

    The first ``num_outputs`` results of the joint module are those of forward, then there is one gradient an
    input, and maybe more.
    """
    graph, output = joint.graph, joint.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    given = graph.find_nodes(op="placeholder")
    returned = {*given, *(one for one in results[:num_outputs] if isinstance(one, fx.Node))}
    inputs = [node for node in given if not node.name.startswith("tangents")]
    owners = owners_of_gradients(inputs, results[num_outputs:])
    for k, node in enumerate(results[num_outputs : num_outputs + len(owners)]):
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        place = place_of(given[owners[k]], owners[k])
        wanted = strides[place] if place is not None and place < len(strides) else None
        if wanted is not None and not _lies(node.meta.get("val"), wanted):
            results[num_outputs + k] = laid_out(graph, node, wanted)
        elif wanted is not None and node in returned:
            results[num_outputs + k] = laid_out(graph, node, node.meta["val"].stride())
        returned.add(node)
    output.args = (tuple(results),)


def owners_of_gradients(inputs: Sequence[fx.Node], returned: Sequence[Any]) -> list[int]:
    """For each gradient that backward returns, the position of the input that it is for.

    That is one an input; but a DTensor without a gradient, which is several inputs of the graph, has one None
    for all of them. What is returned behind the gradients of all inputs is left out.
    """
    owners: list[int] = []
    places = [(place_of(node, k), k) for k, node in enumerate(inputs)]
    for _, group in itertools.groupby(places, lambda one: (one[0], one[1] if one[0] is None else -1)):
        parts = [k for _, k in group]
        none = len(owners) < len(returned) and returned[len(owners)] is None
        owners += parts[:1] if none else parts
    return owners[: len(returned)]


def place_of(node: fx.Node, position: int) -> int | None:
    """Which input of the function an input of the graph is, or is a part of.

    None for memory that several of them lie in.
    """
    told = whole(node.meta.get("desc"))
    place: int | None = position if told is None else getattr(told, "idx", None)
    return place


def whole(told: Any) -> Any:
    """What AOTAutograd tells of a tensor that one of its inputs or results is a part of.

    A DTensor is the tensor of this process and a mesh to it.
    """
    while hasattr(told, "base") and hasattr(told, "attr"):
        told = told.base
    return told


def _lies(value: Any, stride: Sequence[int]) -> bool:
    """Whether a value has these strides; where they say nothing of it, nothing is to be done."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.numel():
        return True
    strides = zip(value.shape, value.stride(), stride, strict=False)
    return value.dim() != len(stride) or all(size == 1 or own == one for size, own, one in strides)


def laid_out(graph: fx.Graph, node: fx.Node, stride: Sequence[int]) -> fx.Node:
    """A copy of a tensor of backward in these strides, made right behind it."""
    value, before = node.meta["val"], node
    while before.next.op == "placeholder":
        before = before.next
    with graph.inserting_after(before):
        made = graph.call_function(torch.ops.lowtide.dense.default, (node, list(stride)))
    with value.fake_mode:
        made.meta = {"val": _dense(value, stride), "partitioner_tag": "is_backward"}
    made.meta |= {key: node.meta[key] for key in _FROM_CODE if key in node.meta}
    return made
