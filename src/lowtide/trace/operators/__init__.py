"""A forward operator run on parts of its inputs: the piece of which the graph of a tile is made.

    needs = access(graph, op).relations[0].needs(wanted)     a box of each input
    parts = [InputPart(node, box), ...]                           nodes that hold at least these boxes
    node = emit(tile, call, op, graph, parts, wanted)        a node that holds the wanted box of the output

Every node calls an ATen operator that autograd knows, so that the tile's graph can be differentiated.
"""

from lowtide.trace.operators.differentiable import differentiable_tensors
from lowtide.trace.operators.emit import emit, loss_total, supported
from lowtide.trace.operators.history import stopped
from lowtide.trace.operators.reads import MASKED, values_read
from lowtide.trace.operators.site import InputPart, cropped
from lowtide.trace.operators.table import adds_up, depends_on_place

__all__ = [
    "MASKED",
    "InputPart",
    "adds_up",
    "cropped",
    "depends_on_place",
    "differentiable_tensors",
    "emit",
    "loss_total",
    "stopped",
    "supported",
    "values_read",
]
