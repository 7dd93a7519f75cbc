"""Several ways to run the operators of a step, with fused kernels: chosen once, for all of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from lowtide.execute.kernels.layout import in_faster_layout, in_layout
from lowtide.execute.kernels.padding import faster_padded, padded
from lowtide.trace.eager.layouts import Layouts
from lowtide.trace.groups.padded import Product

__all__ = ["Ways", "in_faster_ways"]


@dataclass(frozen=True, slots=True)
class Ways:
    """How the operators of a function run."""

    channels_last: bool
    """Whether convolutions do so."""
    padded: frozenset[Product]
    """Matrix products that get columns of zeros."""


def in_faster_ways(
    module: fx.GraphModule, arguments: Sequence[Any], layouts: Layouts, seconds: float, known: Ways | None
) -> tuple[fx.GraphModule, Ways]:
    """The function with the ways that are measured to be faster, in so many ``seconds`` each.

    What is ``known`` is not measured: a user trains, and nothing but the step may take memory.
    """
    if known is None:
        laid_out = in_faster_layout(module, arguments, layouts, seconds)
        chosen = faster_padded(laid_out, arguments, layouts, seconds)
        known = Ways(laid_out is not module, chosen)
    else:
        laid_out = in_layout(module, arguments, layouts, channels_last=known.channels_last)
    return padded(laid_out, arguments, layouts, known.padded), known
