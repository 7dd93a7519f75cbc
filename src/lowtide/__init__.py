"""Lowtide: train the model you have in the memory you have."""

from typing import TYPE_CHECKING

from lowtide.cost import Cost, Step
from lowtide.errors import LowtideError
from lowtide.formats.registry import read_file as read
from lowtide.formats.registry import write_file as write
from lowtide.graph import Graph, Rect, Timeline
from lowtide.needs import needs_torch

if TYPE_CHECKING:
    from lowtide.execute.compare.watch import watch
    from lowtide.execute.fit import fit
    from lowtide.trace.step.capture import capture

__all__ = [
    "Cost", "Graph", "LowtideError", "Rect", "Step", "Timeline", "capture", "fit", "read", "watch", "write",
]  # fmt: skip

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """These need torch, which is not imported before somebody asks for one of them."""
    if name == "capture":
        with needs_torch("capturing a step"):
            from lowtide.trace.step.capture import capture
        return capture
    if name == "fit":
        with needs_torch("fitting a step"):
            from lowtide.execute.fit import fit
        return fit
    if name == "watch":
        with needs_torch("watching a step"):
            from lowtide.execute.compare.watch import watch
        return watch
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
