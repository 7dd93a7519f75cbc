"""Decides by measurement which matrix products of a step are padded to whole rows of 16 bytes.

Each distinct one is timed as it is and padded, forward and backward, with the operators that pad its
operands. Times are kept in the cache of costs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lowtide.execute.kernels.timed_calls import CallTimer, Part, TimedCall
from lowtide.trace.eager.layouts import Layouts, fake_arguments
from lowtide.trace.groups.functions import values_of
from lowtide.trace.groups.padded import Product, in_padded, products

__all__ = ["faster_padded", "padded"]

_DEVICE = "cuda"
"""Where there are Tensor cores."""
_GAIN = 0.1
"""A product is padded where that saves so much of what it takes."""


def faster_padded(
    module: fx.GraphModule, arguments: Sequence[Any], layouts: Layouts, seconds: float
) -> frozenset[Product]:
    """The products of a function that are faster padded; those on Tensor cores alone are looked at.

    What is not measured after so many ``seconds`` is left as it is.
    """
    devices = [one.device for one in arguments if isinstance(one, torch.Tensor)]
    fast = [device for device in devices if device.type == _DEVICE]
    if not fast:
        return frozenset()
    fakes = fake_arguments(layouts.mode(), arguments)
    before = values_of(module, fakes)
    nodes = {product: node for node, product in products(before).items()}
    compared: dict[Product, Part] = {}
    for product, node in nodes.items():
        changed = in_padded(module, fakes, [product])
        if changed is not None:
            after = values_of(changed[0], fakes)
            padded_calls = tuple(TimedCall(one, after) for one in changed[1][node])
            compared[product] = (TimedCall(node, before),), padded_calls
    timed = CallTimer(fast[0], time.monotonic() + seconds)  # tracing does not count
    chosen = {product for product, part in compared.items() if timed.faster(Counter([part]), _GAIN)}
    timed.save()
    return frozenset(chosen)


def padded(
    module: fx.GraphModule, arguments: Sequence[Any], layouts: Layouts, chosen: frozenset[Product]
) -> fx.GraphModule:
    """The function with products padded that are known to be faster so."""
    changed = in_padded(module, fake_arguments(layouts.mode(), arguments), chosen) if chosen else None
    return module if changed is None else changed[0]
