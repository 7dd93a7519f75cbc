"""Tiles of whole networks, run: bit for bit what the untiled step gives, from the named parts alone."""

import pytest
import torch

import lowtide
from lowtide import zoo
from lowtide.graph import Rect
from lowtide.graph.tiles import Cut, tile_input, tile_output
from tests.graph.tiles.poison import leaves_of, run, run_tiled

CASES = [
    ("alexnet:batch=1", tile_input, (2, 2)),
    ("alexnet:batch=1", tile_output, (3, 2)),
    ("unet:base=1,batch=1,size=188", tile_input, (3, 2)),
    ("unet:base=1,batch=1,size=188", tile_output, (4, 3)),
]


@pytest.fixture(scope="module")
def steps():
    """Captured steps by their address, with leaves, the results of one run, and what was drawn at random."""
    found = {}

    def step(address):
        if address not in found:
            torch._dynamo.reset()
            built = zoo.build(address)
            built.batch[0].requires_grad_()
            captured = lowtide.capture(built.loss, built.model, *built.batch)
            names = [one.name for one in captured.step.graph.tensors if one.role.value == "input"]
            named = dict(built.model.named_parameters()) | dict(zip(names, built.batch, strict=True))
            leaves, drawn = leaves_of(captured, named), {}
            whole = run(captured, range(len(captured.step.graph.ops)), leaves, drawn=drawn)
            found[address] = captured, leaves, whole, drawn
        return found[address]

    return step


@pytest.mark.parametrize(("address", "tile", "grid"), CASES)
def test_parts_are_enough(steps, address, tile, grid):
    captured, leaves, whole, drawn = steps(address)
    tiling = tile(captured.step.graph, Cut(grid))
    found = run_tiled(captured, tiling, leaves, whole, drawn)
    assert torch.equal(found, whole[tiling.tensor])
    assert found.abs().max() > 0


def test_parts_are_no_larger_than_they_must_be(steps):
    captured, leaves, whole, drawn = steps("alexnet:batch=1")
    graph = captured.step.graph
    tiling = tile_output(graph, Cut((3, 2)))
    image = next(t for t, one in enumerate(graph.tensors) if one.name == "image")

    def shrunk(tile):
        part = tile.parts[image]
        return tile.parts | {image: Rect(part.lo, (*part.hi[:2], part.hi[2] - 1, part.hi[3]))}

    found = run_tiled(captured, tiling, leaves, whole, drawn, shrunk)
    for tile in tiling.tiles:
        assert found[tile.own.slices()].isnan().any()
