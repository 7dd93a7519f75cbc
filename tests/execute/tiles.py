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


def program_of(joint, parts, cut=(), end="", **how):
    """The plain Program of the step in so many parts of each axis, and the step that it runs."""
    boxes = Tiling(joint, cut, end).boxes(parts)
    whole = looped(joint, boxes, cut, end, **how)
    told = {"cut": tuple(cut), "channels_last": how.get("channels_last", False)}
    return _plainly(whole, **told), whole


def _plainly(joint, **told):
    loops, bodies = {}, []
    for at, (op, call) in enumerate(zip(joint.graph.ops, joint.calls, strict=True)):
        if op.kind == LOOP:
            region = call.target
            number = {id(body): len(bodies) + k for k, body in enumerate(region.bodies)}
            tiles = tuple(Tile(number[id(tile.joint)], tile.over) for tile in region.tiles)
            loops[at] = Loop(at, tiles=tiles, end=getattr(region, "end", ""), **told)
            bodies += [Body(body.graph, _plainly(body)) for body in region.bodies]

    def turned(line):
        return loops.get(line.op, line) if isinstance(line, Run) else line

    plain = store_all(joint.graph)
    return Program(tuple(map(turned, plain.forward)), tuple(map(turned, plain.backward)), tuple(bodies))


def in_tiles(function, parts, cut=lambda _: (), seen=None, end=lambda _: "", **how):
    """The function, run in tiles; ``cut`` and ``end`` choose from the captured step where the loop is."""

    def compiled(module, inputs):
        cuts = []

        def planned(joint):
            program, whole = program_of(joint, parts, cut(joint), end(joint), **how)
            cuts.append(whole)
            if seen is not None:
                seen.append(program)
            return program

        def once(*_, **__):
            """The step as it was cut for the Program: cutting it again would take as long."""
            return cuts[-1]

        with patch.object(tiling, "looped", once):
            return _compiled(module, leaves_of(module), inputs, planned, None)

    return torch.compile(function, backend=compiled, fullgraph=True, dynamic=False)


def outcome(joint):
    """The one result of a step whose loss is outside."""
    (result,) = joint.outputs
    return joint.graph.tensors[result].id


def gradients(function, model, batch, scale=1.0, seed=0):
    """Loss and gradients of parameters."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = function(model, *batch)
    (loss * scale).backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
