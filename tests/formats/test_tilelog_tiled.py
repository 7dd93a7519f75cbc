"""The records of the log, and its gradient, from our own tiles of the captured step."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide import zoo
from lowtide.errors import ConvertError
from lowtide.formats import tilelog
from lowtide.formats.tilelog.records import format_record
from lowtide.formats.tilelog.recover import recover
from lowtide.formats.tilelog.script import RESULT
from lowtide.formats.tilelog.tiled import format_tiles, tile_records
from lowtide.graph import Phase
from lowtide.graph.tiles import Cut, layers, tile_input, tile_output
from lowtide.plan.program.instructions import Loop
from tests.conftest import document_path
from tests.execute.tiling.tiles import in_tiles, owning
from tests.graph.tiles.poison import run, run_tiled

GRID = Cut((4, 4))


def captured(address="convpool"):
    torch._dynamo.reset()
    built = zoo.build(address)
    built.batch[0].requires_grad_()
    return lowtide.capture(built.loss, built.model, *built.batch)


@pytest.fixture(scope="module")
def document():
    return tilelog.read(document_path("004").read_bytes())


@pytest.fixture(scope="module")
def convpool():
    return captured()


def masked(text, ids):
    """The text with ``operator 2`` for an operator's id; other numbers stay."""
    for number, name in enumerate(ids, start=1):
        text = re.sub(rf"(?<=d){name}(?=\[)|(?<=next_id ){name}(?=\))", f"operator {number}", text)
    return text


def test_every_record_of_the_log(document, convpool):
    log = tilelog.log_of(document)
    graph = convpool.step.graph
    ours = tile_records(graph, tile_input(graph, GRID))
    ids = [one.id for one in log.operators]
    assert len(ours) == len(log.tiles) == 16
    seen = 0
    for tile, theirs in zip(ours, log.tiles, strict=True):
        assert tile.coord == theirs.coord
        for info, other in ((tile.forward, theirs.forward), (tile.backward, theirs.backward)):
            for one, record in zip(info.records, other.records, strict=True):
                assert masked(format_record(one), [1, 2, 3, 4]) == masked(format_record(record), ids)
                seen += 1
    assert seen == 160


def test_tiles_are_printed_as_the_log_has_them(document, convpool):
    graph = convpool.step.graph
    text = format_tiles(tile_records(graph, tile_input(graph, GRID)))
    for number, one in enumerate(tilelog.log_of(document).operators, start=1):
        text = re.sub(
            rf"(?<=d){number}(?=\[)|(?<=next_id ){number}(?=\))|(?<=, ){number}(?=: )", str(one.id), text
        )
    lines = document_path("004").read_text()
    parts = text.split("coord ")[1:]
    assert len(parts) == 16
    for part in parts:
        place, records = part.rstrip("\n").split("\n", 1)
        assert f"coord {place}" in lines
        assert records in lines


@pytest.fixture(scope="module")
def values(document, convpool):
    """The log's input and kernels by their tensor in the graph."""
    known = recover(document)
    named = {f"conv{k}.weight": kernel for k, kernel in enumerate(known.kernels.values(), start=1)}
    named["image"] = known.input
    tensors = enumerate(convpool.step.graph.tensors)
    found = {t: torch.tensor(named[one.name])[None, None] for t, one in tensors if one.name in named}
    assert len(found) == 3
    return found


@pytest.fixture(scope="module")
def printed(document):
    """The input gradient at the end of the log."""
    return torch.tensor(tilelog.log_of(document).printed(RESULT)[0].values).double().reshape(16, 16)


def whole_step(convpool, values):
    graph = convpool.step.graph
    tangent = {convpool.joint.tangents[0]: torch.tensor(1.0, dtype=torch.float64)}
    return run(convpool, range(len(graph.ops)), values | tangent)


def test_tiles_run_on_slices_give_the_logs_gradient(convpool, values, printed):
    graph = convpool.step.graph
    tiling = tile_input(graph, GRID)
    untiled = whole_step(convpool, values)[tiling.tensor][0, 0]
    found = torch.full((16, 16), torch.nan, dtype=torch.float64)
    for tile in tiling.tiles:
        steps = [one for one in layers(graph, tiling, tile) if graph.ops[one.op].phase is Phase.FORWARD]
        region = steps[0].reads[0].region
        image = values[steps[0].reads[0].tensor][region.slices()].requires_grad_()
        out = image
        for one in steps:
            (top, bottom), (left, right) = one.reads[0].padding
            if graph.ops[one.op].kind == "aten.convolution":
                weight = values[graph.ops[one.op].inputs[1]]
                out = functional.conv2d(functional.pad(out, (left, right, top, bottom)), weight)
            else:
                out = functional.max_pool2d(out, 2)
            assert out.shape == one.written.shape
        (gradient,) = torch.autograd.grad(out.sum(), image)
        own = tile.own.shift([-d for d in region.lo])
        found[tile.own.slices()[2:]] = gradient[own.slices()][0, 0]
    assert (found - untiled).abs().max() < 1e-6
    assert (found - printed).abs().max() < 1e-4
    assert np.count_nonzero(found) > 100


def test_a_loop_over_boxes_of_the_input_gives_the_logs_gradient(document, printed):
    torch._dynamo.reset()
    known, built = recover(document), zoo.build("convpool")
    model = built.model.double()
    with torch.no_grad():
        for layer, kernel in zip((model.conv1, model.conv2), known.kernels.values(), strict=True):
            layer.weight.copy_(torch.tensor(kernel))
    found = []
    for parts in ((1, 1, 1, 1), (1, 1, 4, 4)):
        image = torch.tensor(known.input)[None, None].requires_grad_()
        tiled = in_tiles(built.loss, parts, end=result, own=owning(parts[2:]), seen=(seen := []))
        tiled(model, image).backward()
        assert [len(line.tiles) for line in seen[0].backward if isinstance(line, Loop)] == [parts[2] ** 2] * 2
        found.append(image.grad[0, 0])
    assert (found[1] - found[0]).abs().max() < 1e-6
    assert (found[1] - printed).abs().max() < 1e-4


def result(joint):
    """What the loss is the sum of."""
    last = [op for op in joint.graph.ops if op.kind == "aten.max_pool2d_with_indices"][-1]
    return joint.graph.tensors[last.outputs[0]].id


def test_nothing_outside_of_the_parts_is_read(convpool, values, printed):
    tiling = tile_input(convpool.step.graph, GRID)
    whole = whole_step(convpool, values)
    found = run_tiled(convpool, tiling, values, whole, {})
    assert torch.equal(found, whole[tiling.tensor])
    assert (found[0, 0] - printed).abs().max() < 1e-4


def test_more_channels_and_uneven_grids_have_records_too():
    graph = captured("convpool:batch=2,channels=3,size=18").step.graph
    tiles = tile_records(graph, tile_input(graph, Cut((2, 3))))
    assert [tile.coord for tile in tiles] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [tile.backward.tile.otileshape for tile in tiles[:3]] == [(6, 9)] * 3
    with pytest.raises(ConvertError, match="cut the input by a grid"):
        tile_records(graph, tile_output(graph, Cut((2, 2))))


def test_other_operators_have_no_records():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    image = torch.rand(1, 1, 8, 8, requires_grad=True)
    graph = lowtide.capture(lambda model, image: model(image).sum(), model, image).step.graph
    with pytest.raises(ConvertError, match=r"aten\.relu"):
        tile_records(graph, tile_input(graph, Cut((2, 2))))
