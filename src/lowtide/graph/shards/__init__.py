"""Tensors split over devices: a mesh, which dimension each of its axes cuts, and what moves between devices.

    mesh = Mesh((2, 4))                    two rows of four devices
    box_of(shape, (0, 2), mesh, rank)      the Rect that a device holds: rows cut in two, columns in four

The access relation says what a device reads to compute its Rect. What it does not hold comes from the others
along one axis of the mesh after the other, so that corners come along.
"""

from lowtide.graph.shards.cuts import Cut, OperatorShare, Shards, box_of, replicated
from lowtide.graph.shards.mesh import Mesh
from lowtide.graph.shards.moves import Pieces, pieces, scattered

__all__ = ["Cut", "Mesh", "OperatorShare", "Pieces", "Shards", "box_of", "pieces", "replicated", "scattered"]
