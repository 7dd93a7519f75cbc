"""Which operators can be run on parts of their inputs, by what, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx

from lowtide.graph import Graph, Op, Rect
from lowtide.trace.operators import creation, layout, moved, resize, rows, sums, windows
from lowtide.trace.operators.site import Site, shape_of, signature

__all__ = ["ADDS_UP", "Handler", "adds_up", "depends_on_place", "handler", "reason"]

Handler: TypeAlias = Callable[[Site], fx.Node]
"""Writes the nodes that compute the wanted box of an operator."""

_WORDS: dict[Handler, str] = {
    rows.pointwise: "_to_copy lift_fresh_copy lift_fresh alias detach contiguous _prelu_kernel "
    "log_sigmoid_forward hardswish rsub floor_divide",
    rows.copied: "copy",
    rows.product: "mm bmm addmm baddbmm",
    rows.along: "_softmax _log_softmax _safe_softmax sort topk",
    rows.running: "cumsum cumprod logcumsumexp cummax cummin",
    rows.layer_norm: "native_layer_norm _fused_rms_norm",
    rows.group_norm: "native_group_norm",
    rows.batch_norm: "native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit "
    "_native_batch_norm_legit_functional cudnn_batch_norm _batch_norm_with_update "
    "_batch_norm_with_update_functional _batch_norm_no_update",
    rows.embedding: "embedding",
    rows.gather: "gather",
    rows.index_select: "index_select",
    rows.attention: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    layout.view: "view _unsafe_view reshape _reshape_alias view_copy squeeze unsqueeze",
    layout.expand: "expand expand_copy",
    layout.permute: "permute t transpose",
    layout.sliced: "slice",
    layout.select: "select",
    layout.chosen: "unbind",
    layout.split: "split split_with_sizes unsafe_split",
    layout.constant_pad: "constant_pad_nd",
    layout.cat: "cat",
    layout.stack: "stack",
    layout.flip: "flip",
    moved.repeat: "repeat",
    moved.roll: "roll",
    moved.border: "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d",
    moved.overwritten: "slice_scatter select_scatter",
    moved.index: "index _unsafe_index",
    moved.unfold: "unfold",
    moved.pixel_shuffle: "pixel_shuffle",
    moved.pixel_unshuffle: "pixel_unshuffle",
    creation.constant: "full zeros ones empty empty_permuted full_like zeros_like ones_like empty_like "
    "new_full new_zeros new_ones new_empty empty_strided new_empty_strided fill zero",
    creation.arange: "arange",
    creation.cut_from_whole: "eye linspace logspace scalar_tensor tril_indices triu_indices",
    creation.triangle: "tril triu",
    windows.convolution: "convolution",
    windows.max_pool: "max_pool2d_with_indices max_pool3d_with_indices",
    windows.average_pool: "avg_pool2d avg_pool3d",
    windows.adaptive_pool: "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d "
    "adaptive_max_pool3d",
    resize.upsample: "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d",
    sums.summed: "sum mean",
    sums.reduction: "amax amin argmax argmin max min any all prod var std var_mean std_mean logsumexp "
    "linalg_vector_norm norm median",
    sums.inner: "mv dot vdot",
    sums.loss: "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits",
    sums.likelihood: "nll_loss_forward nll_loss2d_forward",
}
_HANDLERS = {f"aten.{name}": one for one, names in _WORDS.items() for name in names.split()}

ADDS_UP = frozenset({sums.summed, sums.inner, sums.loss, sums.likelihood, rows.product, windows.convolution})
"""Those that can be given a part of the summed axes."""

_FIRST_ALONE = frozenset(
    {windows.max_pool, windows.adaptive_pool, rows.attention, rows.batch_norm, rows.copied}
)
"""Those whose further results speak of the whole: places in the image, numbers for the backward pass."""


def target_of(op: Op) -> Any:
    """The function that the operator calls, or None where there is none of that name."""
    return _target(op.kind, op.overload or "default")


@cache
def _target(kind: str, overload: str) -> Any:
    space, _, name = kind.partition(".")
    packet = getattr(getattr(torch.ops, space), name, None)
    return getattr(packet, overload, None)


def handler(op: Op) -> Handler | None:
    """What writes the nodes of the operator; None for one that is not known."""
    found: Handler | None = _HANDLERS.get(op.kind)
    if found is None and torch.Tag.pointwise in getattr(target_of(op), "tags", ()):
        return rows.pointwise
    return found


def adds_up(op: Op) -> bool:
    """Whether it can be given a part of the axes that it sums over."""
    return handler(op) in ADDS_UP


def depends_on_place(op: Op) -> bool:
    """Whether it makes, out of sizes alone, other values for each place in the whole."""
    return handler(op) in (creation.arange, creation.cut_from_whole)


def _arguments(op: Op) -> dict[str, Any]:
    """Arguments by name, as the graph has them."""
    given = op.arguments or ()
    names = [argument.name for argument in signature(target_of(op))]
    return dict(zip(names, given, strict=False)) | (op.options)


def reason(op: Op, graph: Graph, wanted: Rect | None, output: int) -> str | None:
    """Why the operator cannot be run on parts of its inputs, in words; None where it can."""
    found = handler(op) if target_of(op) is not None else None
    if op.random and not (found is rows.attention and not _arguments(op).get("dropout_p")):
        return "it draws random numbers, and a part would draw others than the whole"
    if found is rows.batch_norm and _training(op):
        return "its statistics are those of the whole batch"
    if op.updates:
        return "it writes into one of its inputs"
    if found is None:
        return f"{op.kind} is not among the operators that can be run on parts"
    if output and (found in _FIRST_ALONE or "log_sigmoid" in op.kind):
        return "only its first result can be made from parts"
    return _of_arguments(op, graph, found, wanted, output)


def _training(op: Op) -> bool:
    """Whether a batch norm computes its statistics itself."""
    return "with_update" in op.kind or bool(_arguments(op).get("training"))


def _is_mask(graph: Graph, op: Op, argument: Any) -> bool:
    """Whether an argument is a tensor of yes and no."""
    return argument is not None and graph.tensors[op.inputs[argument["input"]]].dtype in ("bool", "uint8")


def _of_arguments(op: Op, graph: Graph, found: Handler, wanted: Rect | None, output: int) -> str | None:
    """Why this call cannot be, though others of its kind can."""
    given = _arguments(op)
    shape = shape_of(graph, op.outputs[output])
    if 0 in shape:
        return "its output is empty"
    if found is moved.overwritten and given.get("step", 1) != 1:
        return "it writes over elements that are not next to each other"
    if found is moved.roll and not given.get("dims"):
        return "it rolls over the ends of rows"
    if found is moved.index and any(_is_mask(graph, op, one) for one in given["indices"]):
        return "a mask says which elements it takes"
    if found is layout.view and op.overload == "dtype":
        return "it reads elements as ones of another type"
    if found is resize.upsample and wanted is not None:
        source = shape_of(graph, op.inputs[0])
        for d in resize.uneven(source, shape, given):
            if (wanted.lo[d], wanted.hi[d]) != (0, shape[d]):
                return f"dimension {d} grows from {source[d]} to {shape[d]}, which only the whole can"
    if found is rows.embedding and given.get("scale_grad_by_freq"):
        return "its gradient depends on how often the whole batch names a row"
    if found is rows.embedding and given.get("sparse"):
        return "its gradient is sparse"
    if found is rows.attention and wanted is not None:
        return _of_heads(op, graph, wanted)
    return None


def _of_heads(op: Op, graph: Graph, wanted: Rect) -> str | None:
    """Why this part of attention cannot be computed by itself."""
    query, key = (shape_of(graph, op.inputs[_arguments(op)[name]["input"]]) for name in ("query", "key"))
    shared = query[1] // key[1]
    lo, hi = wanted.lo[1], wanted.hi[1]
    if (lo % shared or hi % shared) and lo // shared != (hi - 1) // shared:
        return f"{shared} heads share their keys, and a part of them crosses to others"
    if _arguments(op).get("is_causal") and query[2] != key[2] and wanted.shape[2] != query[2]:
        return "what a causal mask hides depends on the device where there are other keys than queries"
    return None
