"""Values that are made while gradients are switched off, written into a graph that is differentiated again.

No gradient goes through them. Only what is written over a tensor, as by ``clamp_``, is that tensor still for
autograd: its gradient goes on to where the tensor came from, as if nothing had been written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.errors import CaptureError
from lowtide.trace.operators.differentiable import differentiable_tensors
from lowtide.trace.operators.site import InputPart, cropped
from lowtide.trace.step.joint import Joint

__all__ = ["stopped"]


@torch.library.custom_op("lowtide::written_over", mutates_args=())
def _written_over(value: Tensor, before: Tensor) -> Tensor:  # noqa: ARG001
    return value.clone()


@_written_over.register_fake
def _(value: Tensor, before: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(value)


def _back(_: Any, gradient: Tensor) -> tuple[None, Tensor]:
    return None, gradient


_written_over.register_autograd(_back)


def stopped(
    target: fx.Graph, joint: Joint, tensor: int, part: InputPart, parts: Mapping[int, InputPart]
) -> fx.Node:
    """A part of a tensor, through which gradients go where they went in the captured step.

    ``parts`` has at least the same part of the tensor that it is written over, if it is.
    """
    if tensor not in joint.stopped:
        return part.node
    before = joint.overwritten.get(tensor)
    if before is None or not {before, joint.graph.storages()[before]} & differentiable_tensors(joint):
        return target.call_function(torch.ops.aten.detach.default, (part.node,))
    tensors = joint.graph.tensors
    same = joint.values[before].shape == joint.values[tensor].shape
    if not same or tensors[before].alias is not None or before not in parts:
        source = tensors[tensor].source
        where = f"{source.file}:{source.line}" if source else tensors[tensor].label
        raise CaptureError(
            f"{where}: what is written over a part of a tensor while gradients are switched off cannot be "
            "computed in parts. Write the result to a tensor of its own"
        )
    operator: Any = torch.ops.lowtide.written_over.default
    return target.call_function(operator, (part.node, cropped(target, parts[before], part.box)))
