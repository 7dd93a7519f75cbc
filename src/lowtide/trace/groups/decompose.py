"""Takes apart operators whose pieces are fused, or saved, better one by one.

A BatchNorm is its statistics, which read everything once, and a pointwise part that runs with what is around
it. On CUDA a convolution and its bias are two kernels, and the second can be part of another. The logarithm
of softmax and its gradient read logits that lie in memory already; what must be saved for backward is a
maximum and a sum for each row, and never a tensor as large as the logits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.torch_internals import OpOverload, overload_name, schema_of

__all__ = ["ABOUT", "decompose"]

_MEAN, _NONE = 1, 0


def decompose(module: fx.GraphModule) -> None:
    """Replace such operators of a joint graph, in place."""
    for node in list(module.graph.nodes):
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            pieces = _PIECES.get(node.target.overloadpacket.__name__)
            if pieces is not None and overload_name(node.target) == "default" and _gains(node):
                _replace(module.graph, node, pieces)
    module.graph.eliminate_dead_code(_is_impure)


def _is_impure(node: fx.Node) -> bool:
    """Nothing but the pieces' own leftovers may go: views and constants."""
    return not node.meta.get(_PIECE)


def _gains(node: fx.Node) -> bool:
    """Whether anything is gained: a BatchNorm computes its own statistics, a convolution has a bias."""
    if node.target is torch.ops.aten.convolution.default:
        return isinstance(node.args[2], fx.Node) and node.meta["val"].is_cuda
    names = [argument.name for argument in schema_of(node.target).arguments]
    flag = next((k for k, name in enumerate(names) if name in ("training", "train")), None)
    return flag is None or node.args[flag] is True


_PIECE = "lowtide_piece"


def _replace(graph: fx.Graph, node: fx.Node, pieces: Callable[..., Any]) -> None:
    given = list(node.args)
    places = [k for k, arg in enumerate(given) if isinstance(arg, fx.Node)]
    values = [given[k].meta["val"] for k in places]  # type: ignore[union-attr]
    mode = next(value.fake_mode for value in values if hasattr(value, "fake_mode"))

    def called(*tensors: Any) -> Any:
        args = list(given)
        for k, tensor in zip(places, tensors, strict=True):
            args[k] = tensor
        results, whole = pieces(*args), node.meta["val"]
        if isinstance(results, torch.Tensor):
            return _laid_out(results, whole)
        return tuple(_laid_out(one, like) for one, like in zip(results, whole, strict=True))

    with mode:
        traced = make_fx(called)(*values)
    copies: dict[fx.Node, Any] = {}
    sources = iter(given[k] for k in places)
    for one in traced.graph.nodes:
        if one.op == "placeholder":
            copies[one] = next(sources)
        elif one.op != "output":
            with graph.inserting_before(node):
                copies[one] = graph.node_copy(one, lambda source: copies[source])
            kept = {key: value for key, value in node.meta.items() if key in ABOUT}
            copies[one].meta = kept | {"val": one.meta["val"], _PIECE: True}
    results: Any = traced.graph.output_node().args[0]
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(copies[results])
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            if results[user.args[1]] is not None:
                user.replace_all_uses_with(copies[results[user.args[1]]])
            graph.erase_node(user)
    graph.erase_node(node)


def _laid_out(result: Any, like: Any) -> Any:
    """What pieces give, as the operator lays it out: they follow the layout of what they read."""
    if result is None or not any(
        size > 1 and result.stride(axis) != like.stride(axis) for axis, size in enumerate(result.shape)
    ):
        return result
    order = sorted(range(result.dim()), key=lambda axis: -like.stride(axis))
    back = sorted(range(result.dim()), key=order.__getitem__)
    return result.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


ABOUT = frozenset({"partitioner_tag", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr"})
"""What is known of an operator's place in the user's code."""


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = _wide(x)
    shifted = wide - torch.amax(wide, dim, keepdim=True)
    result = shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))
    return result if half_to_float else result.to(x.dtype)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    wide = _wide(x)
    raised = torch.exp(wide - torch.amax(wide, dim, keepdim=True))
    result = raised / torch.sum(raised, dim, keepdim=True)
    return result if half_to_float else result.to(x.dtype)


def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = 1 if x.dim() > 1 else 0
    counted = target != ignored
    safe = torch.where(counted, target, 0)
    found = -torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim)
    weights = torch.gather(weight, 0, safe.flatten()).view(safe.shape) if weight is not None else None
    found = found if weights is None else found * weights
    found = torch.where(counted, found, 0)
    if reduction == _NONE:
        return found, x.new_full((), 0.0)
    total = counted.sum().to(x.dtype) if weights is None else torch.where(counted, weights, 0).sum()
    whole = found.sum()
    return (whole / total if reduction == _MEAN else whole), total


def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    dim = 1 if x.dim() > 1 else 0
    each = -(grad / total if reduction == _MEAN else grad)
    if each.dim():
        each = each.unsqueeze(dim)
    targets = target.unsqueeze(dim)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    classes = torch.arange(x.shape[dim], device=x.device).view(shape)
    chosen = (classes == targets) & (targets != ignored)
    if weight is not None:
        each = each * weight.view(shape)
    return torch.where(chosen, each, 0).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _along_channels(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """The axes that a BatchNorm averages over, and a shape in which a value for each channel spreads."""
    return [k for k in range(x.dim()) if k != 1], [1, -1, *([1] * (x.dim() - 2))]


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    _: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    axes, spread = _along_channels(x)
    wide = _wide(x)
    count = x.numel() // x.shape[1]
    variance, mean = torch.var_mean(wide, axes, correction=0)
    inverse = torch.rsqrt(variance + eps)
    unbiased = variance * (count / max(1, count - 1))
    new_mean = mean * momentum + running_mean * (1 - momentum)
    new_var = unbiased * momentum + running_var * (1 - momentum)
    y = (wide - mean.view(spread)) * inverse.view(spread)
    y = y if weight is None else y * weight.view(spread)
    y = y if bias is None else y + bias.view(spread)
    return y.to(x.dtype), mean, inverse, new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *more: Any
) -> tuple[torch.Tensor | None, ...]:
    _, _, mean, inverse, _, _, wanted = more
    axes, spread = _along_channels(x)
    count = x.numel() // x.shape[1]
    dy, centred = _wide(grad), _wide(x) - mean.view(spread)
    of_bias = dy.sum(axes)
    projected = (dy * centred).sum(axes)
    scale = inverse if weight is None else inverse * weight
    slope, offset = projected * inverse * inverse / count, of_bias / count
    kind = x.dtype if weight is None else weight.dtype
    of_weight = (projected * inverse).to(kind)
    dx = (dy - offset.view(spread) - centred * slope.view(spread)) * scale.view(spread)
    results = dx.to(x.dtype), of_weight, of_bias.to(kind)
    return tuple(one if asked else None for one, asked in zip(results, wanted, strict=True))


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *more: Any) -> torch.Tensor:
    _, spread = _along_channels(x)
    found: torch.Tensor = torch.ops.aten.convolution.default(x, weight, None, *more)
    return found + bias.view(spread)


_PIECES: dict[str, Callable[..., Any]] = {
    "_log_softmax": _log_softmax,
    "_softmax": _softmax,
    "convolution": _convolution,
    "_native_batch_norm_legit_functional": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss2d_backward": _nll_loss_backward,
}
