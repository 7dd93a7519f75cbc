"""Lowtide: train the model you have in the memory you have."""

from typing import TYPE_CHECKING

from lowtide.cost import Cost, Step
from lowtide.errors import LowtideError
from lowtide.formats.registry import read_file as read
from lowtide.formats.registry import write_file as write
from lowtide.graph import Graph, Rect, Timeline
from lowtide.needs import needs_torch

if TYPE_CHECKING:
    from lowtide.capture.step import capture
    from lowtide.execute.fit import fit
else:
    from lowtide import capture  # the package, which is called like the function: torch stays out until then

__all__ = [
    "Cost", "Graph", "LowtideError", "Rect", "Step", "Timeline", "capture", "fit", "read", "write",
]  # fmt: skip

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``fit`` needs torch, which is not imported before somebody asks for it."""
    if name != "fit":
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    with needs_torch("fitting a step"):
        from lowtide.execute.fit import fit
    return fit
