"""A step cut into the tiles that somebody asks for, run plainly and compared with the whole: no plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.errors import CaptureError
from lowtide.execute.backend import compile_with
from lowtide.execute.compare.graphs import with_gradients
from lowtide.execute.compile.bits import largest_difference
from lowtide.execute.compile.user_code import check_loss, in_the_users_terms, users_step
from lowtide.graph import LOOP, Rect
from lowtide.graph.tiles import Cut, Own, grid_of, tile_input, tile_output
from lowtide.nested import leaves
from lowtide.plan.program.instructions import Body, Instruction, Loop, Program, Run, Tile
from lowtide.plan.program.simple import store_all
from lowtide.trace.eager.is_compiling import Answers
from lowtide.trace.step.capture import capture
from lowtide.trace.step.joint import Joint
from lowtide.trace.step.one_graph import one_graph, with_answers
from lowtide.trace.tiles.loop import looped
from lowtide.trace.tiles.owned import Owned

__all__ = ["Ran", "plain_tiles", "run_tiles"]

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ran:
    """A step in tiles beside the whole step. Differences are over the largest element of the whole step's."""

    tiles: int
    """In all loops."""
    loss_difference: float
    gradients: int
    """Of parameters and inputs: how many were compared."""
    largest_difference: float
    seconds: float
    whole_seconds: float


def plain_tiles(
    joint: Joint, boxes: Sequence[Rect], cut: Sequence[str] = (), end: str = "", **how: Any
) -> tuple[Program, Joint]:
    """The Program that runs a step in these tiles, keeping everything in each, and the step as it runs it.

    Where the loops begin and end, and ``how`` they are made, is up to :func:`looped`.
    """
    whole = looped(joint, boxes, cut, end, **how)
    return _plainly(whole, tuple(cut), how.get("channels_last", False)), whole


def _plainly(joint: Joint, cut: tuple[str, ...] = (), channels_last: bool = False) -> Program:
    loops: dict[int, Loop] = {}
    bodies: list[Body] = []
    for at, (op, call) in enumerate(zip(joint.graph.ops, joint.calls, strict=True)):
        if op.kind == LOOP:
            region: Any = call.target
            number = {id(body): len(bodies) + k for k, body in enumerate(region.bodies)}
            tiles = tuple(Tile(number[id(tile.joint)], tile.over) for tile in region.tiles)
            end, own = getattr(region, "end", ""), getattr(region, "own", "")
            loops[at] = Loop(at, tiles=tiles, end=end, own=own, cut=cut, channels_last=channels_last)
            bodies += [Body(body.graph, _plainly(body)) for body in region.bodies]

    def turned(line: Instruction) -> Instruction:
        return loops.get(line.op, line) if isinstance(line, Run) else line

    plain = store_all(joint.graph)
    return Program(tuple(map(turned, plain.forward)), tuple(map(turned, plain.backward)), tuple(bodies))


def run_tiles(
    function: Function,
    model: nn.Module,
    batch: Sequence[Any],
    cut: Cut,
    *,
    until: str = "",
    own: Own = "output",
    seed: int = 0,
) -> Ran:
    """Run ``function(model, *batch)`` and its backward as a whole and in tiles; the model stays as it was.

    Inputs of floating-point numbers get gradients too. A TileError or CaptureError names what cannot be cut.
    """
    batch = with_gradients(batch)
    with in_the_users_terms():
        joint = capture(function, model, *batch).joint
    graph = joint.graph
    asked = tile_input(graph, cut, until) if own == "input" else tile_output(graph, cut, until)
    end, owned = graph.tensors[asked.end], None
    if own == "input":
        leaf = graph.tensors[asked.tensor].gradient_of
        assert leaf is not None
        owned = Owned(graph.tensors[leaf].id, [tile.own for tile in asked.tiles])
    shape = end.shape or ()
    parts = tuple(min(count, shape[d]) for count, d in zip(cut.grid, cut.of(shape), strict=True))
    boxes = grid_of(Cut(parts, cut.dims), shape)
    program, _ = plain_tiles(joint, boxes, end=end.id, own=owned)

    def compiled(module: Any, inputs: Sequence[Any]) -> Any:
        return compile_with(module, inputs, lambda _: program, in_place=False)

    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    found: list[Any] = []

    def attempt(answers: Answers) -> None:
        found.clear()
        tiled = one_graph(function, compiled, answers)
        for step in (function, tiled, function, tiled):  # the first of each sets up
            with users_step():
                found.append(_step(step, model, batch, seed))
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    with_answers(attempt)
    model.zero_grad(set_to_none=True)
    (loss, want, whole_seconds), (other, got, seconds) = found[2:]
    if [one is None for one in want] != [one is None for one in got]:
        raise CaptureError("other gradients in tiles than in the whole step; report this as a bug")
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if a is not None and b is not None]
    return Ran(
        tiles=sum(len(line.tiles) for line in program.instructions if isinstance(line, Loop)),
        loss_difference=largest_difference(loss, other),
        gradients=len(pairs),
        largest_difference=max((largest_difference(b, a) for a, b in pairs), default=0.0),
        seconds=seconds,
        whole_seconds=whole_seconds,
    )


def _step(
    function: Function, model: nn.Module, batch: Sequence[Any], seed: int
) -> tuple[torch.Tensor, list[torch.Tensor | None], float]:
    """Loss, gradients of parameters and inputs, and seconds."""
    inputs = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    wanted = [*model.parameters(), *inputs]
    for one in wanted:
        one.grad = None
    torch.manual_seed(seed)
    began = time.perf_counter()
    loss = function(model, *batch)
    check_loss(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    taken = time.perf_counter() - began
    return loss.detach(), [one.grad for one in wanted], taken
