"""Tiles: a step cut into parts that are computed one after the other, and what each part needs.

    tiling = tile_output(graph, Cut((4, 4)))      parts of the result in front of the loss
    tiling = tile_input(graph, Cut((4, 4)))       parts of the gradient of an input
    tiling.tiles[0].parts[tensor]                 the Rect of a tensor that the first tile needs
    layers(graph, tiling, tiling.tiles[0])        what each operator writes and reads for it, halo and padding

Everything follows from the access relations of the operators; no operator is known here by its kind.
"""

from lowtide.graph.tiles.cut import grid_of, reaches, tile_input, tile_output
from lowtide.graph.tiles.layers import Layer, Read, layers
from lowtide.graph.tiles.types import BATCH, SPACE, Cut, Own, TileNeeds, TilingNeeds, share
from lowtide.graph.tiles.walk import reads_of

__all__ = [
    "BATCH",
    "SPACE",
    "Cut",
    "Layer",
    "Own",
    "Read",
    "TileNeeds",
    "TilingNeeds",
    "grid_of",
    "layers",
    "reaches",
    "reads_of",
    "share",
    "tile_input",
    "tile_output",
]
