"""Puts back the kernels that eager PyTorch runs, where the functional form of a graph took others.

AOTAutograd turns BatchNorm in training into ``_native_batch_norm_legit_functional``, whose CUDA kernels are
not those of cuDNN that eager runs: slower, and different in the last bits. ``_batch_norm_with_update`` is
functional too and chooses as eager does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lowtide.trace.distributed.collectives import join_waits
from lowtide.trace.eager.updates import update_in_place

__all__ = ["as_eager", "rewrite_batch_norm", "traced_in_forward"]

aten = torch.ops.aten
_SAVED_MEAN, _RESERVE = 1, 3
_MOVED = {3: 4, 4: 5}
"""Results of the functional form that stand elsewhere in the other: the running statistics."""


def as_eager(module: fx.GraphModule) -> fx.GraphModule:
    """The same module, its graph changed where eager would run another kernel; it is read, and never run."""
    _without_detach(module.graph)
    join_waits(module.graph)
    rewrite_batch_norm(module, lambda value: value.is_cuda)
    update_in_place(module)
    return module


def _without_detach(graph: fx.Graph) -> None:
    """Autograd's marks on what it saves: they compute nothing, and no gradient is taken of a joint graph.

    Those of the user's, which forward reads, stay: who differentiates it again has to know of them. Integers
    have no gradient that could be stopped.
    """
    for node in reversed(graph.find_nodes(op="call_function", target=aten.detach.default)):
        stops = _has_gradient(node.meta.get("val"))
        if not any(user.op == "output" or (stops and traced_in_forward(user)) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _has_gradient(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def traced_in_forward(node: fx.Node) -> bool:
    """Whether a node of a joint graph was traced while forward ran."""
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def rewrite_batch_norm(module: fx.GraphModule, wanted: Callable[[torch.Tensor], bool]) -> int:
    """How many BatchNorms in training were changed, with their backward, where the input is wanted."""
    graph = module.graph
    found = [
        node
        for node in graph.find_nodes(
            op="call_function", target=aten._native_batch_norm_legit_functional.default
        )
        if node.args[5] is True and node.args[1] is not None and wanted(node.args[0].meta["val"])
    ]
    for node in found:
        _rewrite(graph, node)
    return len(found)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    source, weight, bias, mean, variance, _, momentum, eps = node.args
    target = aten._batch_norm_with_update_functional.default
    with graph.inserting_before(node):
        new = graph.call_function(target, (source, weight, bias, mean, variance, momentum, eps))
        new.meta = dict(node.meta) | {"val": _value(target, new.args)}
        reserve = graph.call_function(operator.getitem, (new, _RESERVE))
        reserve.meta = dict(node.meta) | {"val": new.meta["val"][_RESERVE]}
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        if index == _SAVED_MEAN:
            for backward in _backward_of(user):
                _rewrite_backward(graph, backward, reserve)
        user.args = (new, _MOVED.get(index, index))
    graph.erase_node(node)


def _backward_of(saved_mean: fx.Node) -> list[fx.Node]:
    """The backward operators that read this mean, themselves or through a detach."""
    found = []
    for user in saved_mean.users:
        if user.target is aten.native_batch_norm_backward.default:
            found.append(user)
        elif user.target is aten.detach.default:
            found += _backward_of(user)
    return found


def _rewrite_backward(graph: fx.Graph, node: fx.Node, reserve: fx.Node) -> None:
    target = aten.batch_norm_backward.default
    with graph.inserting_before(node):
        new = graph.call_function(target, (*node.args, reserve))
        new.meta = dict(node.meta) | {"val": _value(target, new.args)}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _value(target: Any, args: tuple[Any, ...]) -> Any:
    """What the operator gives, computed on shapes alone."""
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))
    with mode:
        return target(*values)
