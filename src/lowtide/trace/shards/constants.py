"""Numbers that a function makes of a list: every device makes them anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lowtide.errors import CaptureError

__all__ = ["constant"]

_CONSTANT = 64
"""So many numbers a constant has at most."""

aten = torch.ops.aten


def constant(target: fx.Graph, value: torch.Tensor) -> fx.Node:
    """Numbers written in the user's code, on every device."""
    if value.numel() > _CONSTANT:
        raise CaptureError(
            f"a tensor of {value.numel()} numbers that the function makes of a list cannot be split over "
            "devices; make it once, and pass it as an argument or have it as a buffer of the model"
        )
    where: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    numbers = value.flatten().tolist()
    if len(set(numbers)) <= 1:
        return target.call_function(aten.full.default, (list(value.shape), *numbers[:1]), where)
    each = [target.call_function(aten.full.default, ([1], one), where) for one in numbers]
    flat = target.call_function(aten.cat.default, (each,))
    return target.call_function(aten.view.default, (flat, list(value.shape)))
