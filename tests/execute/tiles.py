"""Steps cut into given tiles, for tests: captured, run plainly tile after tile."""

from unittest.mock import patch

import torch

from lowtide.capture.leaves import leaves_of
from lowtide.capture.loop import LOOP, looped
from lowtide.capture.tile import Tiling
from lowtide.execute import tiling
from lowtide.execute.backend import _compiled
from lowtide.plan.plain import store_all
from lowtide.plan.program import Body, Loop, Program, Run, Tile


def program_of(joint, parts, cut=(), channels_last=False):
    """The plain Program of the step in so many parts of each axis, and the step that it runs."""
    boxes = Tiling(joint, cut).boxes(parts)
    whole = looped(joint, boxes, cut, channels_last=channels_last)
    at = next(k for k, op in enumerate(whole.graph.ops) if op.kind == LOOP)
    region = whole.calls[at].target
    number = {id(body): k for k, body in enumerate(region.bodies)}
    tiles = tuple(Tile(number[id(tile.joint)], tile.over) for tile in region.tiles)
    plain = store_all(whole.graph)
    forward = tuple(
        Loop(at, tiles=tiles, cut=tuple(cut), channels_last=channels_last)
        if isinstance(line, Run) and line.op == at
        else line
        for line in plain.forward
    )
    bodies = tuple(Body(body.graph, store_all(body.graph)) for body in region.bodies)
    return Program(forward, plain.backward, bodies), whole


def in_tiles(function, parts, cut=lambda _: (), seen=None, channels_last=False):
    """The function, run in tiles; ``cut`` chooses from the captured step where the loop begins."""

    def compiled(module, inputs):
        cuts = []

        def planned(joint):
            program, whole = program_of(joint, parts, cut(joint), channels_last)
            cuts.append(whole)
            if seen is not None:
                seen.append(program)
            return program

        def once(joint, boxes, cut, channels_last=False):
            """The step as it was cut for the Program: cutting it again would take as long."""
            return cuts[-1]

        with patch.object(tiling, "looped", once):
            return _compiled(module, leaves_of(module), inputs, planned, None)

    return torch.compile(function, backend=compiled, fullgraph=True, dynamic=False)


def gradients(function, model, batch, scale=1.0, seed=0):
    """Loss and gradients of parameters."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = function(model, *batch)
    (loss * scale).backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
