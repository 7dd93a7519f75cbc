"""Decides by measurement whether the convolutions of a step run channels-last.

Each operator whose arguments lie in memory otherwise in one of the two ways is timed, forward and backward,
with conversions among them; equal ones once. On a CPU their rounding is measured too. Nothing of the step
itself runs. Times are kept in the cache of costs: where all could be measured, the same step is laid out the
same way the next time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowtide.execute.kernels.rounding import as_close
from lowtide.execute.kernels.timed_calls import CallTimer, parts_of
from lowtide.trace.eager.layouts import Layouts, fake_arguments
from lowtide.trace.groups.channels_last import in_channels_last
from lowtide.trace.groups.functions import values_of

__all__ = ["in_faster_layout", "in_layout"]

_GAIN = 0.02
"""Channels-last is taken where it saves so much of what the operators concerned take."""


def in_faster_layout(
    module: fx.GraphModule, arguments: Sequence[Any], layouts: Layouts, seconds: float
) -> fx.GraphModule:
    """The function, or the same with convolutions channels-last, whichever is measured to be faster.

    What is not measured after so many ``seconds`` is taken to be equally fast. On a CPU with oneDNN,
    torch.compile has all convolutions channels-last: there the function is left as it is only where its
    gradients are rounded as well so. On CUDA rounding to TF32 is far more than what the order of sums does.
    """
    fakes = fake_arguments(layouts.mode(), arguments)
    changed = in_channels_last(module, fakes)
    if changed is None:
        return module
    device = next(one.device for one in arguments if isinstance(one, torch.Tensor) and one.dim() > 1)
    timed = CallTimer(device, time.monotonic() + seconds)
    parts = parts_of(values_of(module, fakes), values_of(changed, fakes))
    faster = timed.faster(parts, _GAIN)
    timed.save()
    return changed if faster or (_is_reference(device) and not as_close(parts)) else module


def _is_reference(device: torch.device) -> bool:
    """Whether torch.compile has all convolutions channels-last on a device."""
    one_dnn: Any = torch.backends.mkldnn
    return device.type == "cpu" and one_dnn.is_available() and bool(one_dnn.enabled)


def in_layout(
    module: fx.GraphModule, arguments: Sequence[Any], layouts: Layouts, *, channels_last: bool
) -> fx.GraphModule:
    """The function with its convolutions in a layout that is known to be faster."""
    changed = in_channels_last(module, fake_arguments(layouts.mode(), arguments)) if channels_last else None
    return module if changed is None else changed
