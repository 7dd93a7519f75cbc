"""Lowtide: train the model you have in the memory you have."""

from lowtide.cost import Cost, Step
from lowtide.errors import LowtideError
from lowtide.formats.registry import read_file as read
from lowtide.formats.registry import write_file as write
from lowtide.graph import Graph, Rect, Timeline

__all__ = ["Cost", "Graph", "LowtideError", "Rect", "Step", "Timeline", "__version__", "read", "write"]

__version__ = "0.1.0"
