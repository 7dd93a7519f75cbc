"""The access relation: which Rect of each input an operator reads to write a Rect of each output.

    relation = access(graph, op).relations[0]     one an output
    relation.needs(rect)                          a Rect of each input, or None where no value is read
    relation.needs(rect, over)                    the same for a part of the sum that the output is

Each family of operators has a module with its rules; ``index`` has the ways in which a dimension is read.
"""

from lowtide.graph.access.index import (
    Adaptive,
    At,
    BlockIndex,
    Digit,
    Either,
    Grouped,
    Index,
    Only,
    Reshaped,
    Same,
    Shift,
    Slide,
    Spans,
    Spread,
    Until,
    Whole,
    Window,
)
from lowtide.graph.access.relation import Access, Relation
from lowtide.graph.access.rules import access
from lowtide.graph.access.sound import check_calls

__all__ = [
    "Access",
    "Adaptive",
    "At",
    "BlockIndex",
    "Digit",
    "Either",
    "Grouped",
    "Index",
    "Only",
    "Relation",
    "Reshaped",
    "Same",
    "Shift",
    "Slide",
    "Spans",
    "Spread",
    "Until",
    "Whole",
    "Window",
    "access",
    "check_calls",
]
