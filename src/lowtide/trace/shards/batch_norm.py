"""BatchNorm over a batch that is split over devices: its statistics are those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.graph import Op, Rect
from lowtide.trace.distributed.exchange import ADD_UP
from lowtide.trace.operators import InputPart, cropped
from lowtide.trace.step.builder import Call
from lowtide.trace.step.joint import Joint

__all__ = ["BATCH_NORMS", "batch_norm"]

aten = torch.ops.aten
BATCH_NORMS = frozenset({"aten._native_batch_norm_legit", "aten.native_batch_norm", "aten.cudnn_batch_norm"})
"""Operators that read running statistics and write them over."""


def batch_norm(
    target: fx.Graph,
    joint: Joint,
    op: Op,
    call: Call,
    x: InputPart,
    others: Mapping[int, InputPart],
    wires: Sequence[str],
) -> fx.Node:
    """A node with the part of the result; running statistics are written over, on every device alike."""

    def write(function: Any, *args: Any) -> fx.Node:
        return target.call_function(function, args)

    args = list(call.args)
    if isinstance(args[3], bool):  # an overload without running statistics
        args[3:3] = [None, None]

    def given(place: int) -> InputPart | None:
        value = args[place]
        return others[joint.tensor_of[value]] if isinstance(value, fx.Node) else None

    shape = joint.graph.tensors[op.inputs[0]].shape or ()
    count = math.prod(shape) // shape[1]
    dims = [d for d in range(len(shape)) if d != 1]
    view = [1, -1, *[1] * (len(shape) - 2)]
    channels = Rect((x.box.lo[1],), (x.box.hi[1],))

    def parameter(place: int) -> fx.Node | None:
        part = given(place)
        return None if part is None else write(aten.view.default, cropped(target, part, channels), view)

    def mean_of(value: fx.Node) -> fx.Node:
        found = write(aten.sum.dim_IntList, value, dims, True)
        for wire in wires:
            found = write(ADD_UP, found, False, wire)
        return write(aten.div.Scalar, found, count)

    training, momentum, eps = args[5:8]
    running = given(3), given(4)
    if training:
        mean = mean_of(x.node)
        centred = write(aten.sub.Tensor, x.node, mean)
        variance = mean_of(write(aten.mul.Tensor, centred, centred))
        if running[0] is not None and running[1] is not None:
            unbiased = write(aten.mul.Scalar, variance, count / max(1, count - 1))
            for part, value in zip(running, (mean, unbiased), strict=True):
                assert part is not None
                flat = write(aten.view.default, write(aten.detach.default, value), [-1])
                kept = write(aten.mul.Scalar, cropped(target, part, channels), 1 - momentum)
                mixed = write(aten.add.Tensor, kept, write(aten.mul.Scalar, flat, momentum))
                write(aten.copy_.default, cropped(target, part, channels), mixed)
    else:
        mean, variance = parameter(3), parameter(4)  # type: ignore[assignment]
        centred = write(aten.sub.Tensor, x.node, mean)
    scale = write(aten.rsqrt.default, write(aten.add.Scalar, variance, eps))
    weight, bias = parameter(1), parameter(2)
    scale = scale if weight is None else write(aten.mul.Tensor, scale, weight)
    node = write(aten.mul.Tensor, centred, scale)
    return node if bias is None else write(aten.add.Tensor, node, bias)
