"""Lowtide: train the model you have in the memory you have."""

from typing import TYPE_CHECKING

from lowtide.cost import Cost, Step
from lowtide.errors import LowtideError
from lowtide.formats.registry import read_file as read
from lowtide.formats.registry import write_file as write
from lowtide.graph import Graph, Rect, Timeline

if TYPE_CHECKING:
    from lowtide.capture.step import capture
else:
    from lowtide import capture  # the package, which is called like the function: torch stays out until then

__all__ = [
    "Cost", "Graph", "LowtideError", "Rect", "Step", "Timeline", "__version__", "capture", "read", "write",
]  # fmt: skip

__version__ = "0.1.0"
