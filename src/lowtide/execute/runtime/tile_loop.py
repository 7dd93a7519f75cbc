"""Runs a loop: tile after tile, each by the Program of its body.

Tiles add to the loss and to the gradients; or each makes its box of a result, and in a second loop, once the
gradient of that is there, adds to the gradients.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch

from lowtide.cost.watch import Marker
from lowtide.execute.calls.random_state import Drawing
from lowtide.execute.calls.views import Views
from lowtide.execute.runtime.copies import Form, Transfers, transfers
from lowtide.execute.runtime.fits import refuse_invalid
from lowtide.execute.runtime.frame import Frame
from lowtide.execute.runtime.instructions import Nested, run_lines
from lowtide.execute.runtime.launch import Launch
from lowtide.execute.runtime.prepare import prepared, random_again
from lowtide.execute.runtime.witness import Watched, Witness
from lowtide.plan.program.instructions import Body, Loop, Program, Run, Send
from lowtide.torch_internals import calls_are_watched
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.loop import TiledRegion
from lowtide.trace.tiles.outside import Half
from lowtide.trace.tiles.tiling import CapturedTile

__all__ = ["Copying", "LendsCopies", "Turning", "issue_seconds", "run_body", "zeros"]


class LendsCopies(Protocol):
    """Has what copies to the host in turns."""

    def turn(self, sizes: Sequence[int], own: Transfers) -> AbstractContextManager[Transfers]:
        """Inside, a turn runs that copies so many bytes each time; without others by its ``own`` lanes."""


class Copying:
    """Who copies to the host in turns now; shared by all loops of a Program."""

    def __init__(self) -> None:
        self.by: LendsCopies | None = None


class _Turn:
    """The Program of a body, ready to run."""

    def __init__(
        self, joint: Joint, program: Program, watched: Watched, drawing: Drawing, copying: Copying
    ) -> None:
        self.joint, self.watched, self.drawing, self.copying = joint, watched, drawing, copying
        self.states = random_again(joint, program)
        loops = partial(Turning, watched=watched, drawing=drawing, copying=copying)
        forward, backward = prepared(joint, program, self.states, loops=loops)
        self.lines = [*forward, *backward]
        held = [t for t in (*joint.inputs, *joint.tangents, *joint.constants) if t is not None]
        launch = Launch(joint, Views(joint), held, [t for t in joint.outputs if t is not None])
        for line in self.lines:
            launch.add(line)
        self.steps = launch.steps
        sent = [joint.values[line.tensor] for line in program.instructions if isinstance(line, Send)]
        self.sent = [Form.of(one).storage_bytes for one in sent]
        self.transfers = transfers(joint.values[0].device) if sent else None

    def __call__(
        self, arguments: Sequence[Any], tangent: torch.Tensor | None = None, marker: Marker | None = None
    ) -> Any:
        """What the tile gives, if anything."""
        with self._lanes() as lanes:
            return self._turn(arguments, tangent, marker, lanes)

    def _lanes(self) -> AbstractContextManager[Transfers | None]:
        if self.transfers is None or self.copying.by is None:
            return nullcontext(self.transfers)
        return self.copying.by.turn(self.sent, self.transfers)

    def _turn(
        self,
        arguments: Sequence[Any],
        tangent: torch.Tensor | None,
        marker: Marker | None,
        lanes: Transfers | None,
    ) -> Any:
        joint = self.joint
        states: list[Any] = [None] * len(self.states)
        witness = self.watched.by(joint)
        quick = marker is None and witness is None and not calls_are_watched()
        frame = Frame(len(joint.graph.tensors), states, self.drawing, lanes, witness, quick)
        try:
            table = frame.table
            for t, value in joint.constants.items():
                table[t] = value
            for place, argument in zip(joint.inputs, arguments, strict=True):
                assert place is not None
                table[place] = argument
            for place in joint.tangents:
                table[place] = tangent
            run_lines(self.steps if quick else self.lines, frame, marker)
            frame.settle()
            return next((table[t] for t in joint.outputs if t is not None), None)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            frame.clear()
            raise


class Turning(Nested):
    """A loop as the function that its operator calls."""

    def __init__(
        self,
        region: TiledRegion | Half,
        loop: Loop,
        bodies: Sequence[Body],
        watched: Watched,
        drawing: Drawing,
        copying: Copying,
    ) -> None:
        """``loop`` and ``bodies`` are known to fit the region (``execute/runtime/fits.py``)."""
        self.region = region
        turns: dict[int, _Turn] = {}
        self.turns: list[_Turn] = []
        for tile, planned in zip(region.tiles, loop.tiles, strict=True):
            if planned.body not in turns:
                program = bodies[planned.body].program
                turns[planned.body] = _Turn(tile.joint, program, watched, drawing, copying)
            self.turns.append(turns[planned.body])

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """What the operator gives."""
        region = self.region
        with torch.no_grad():
            if isinstance(region, TiledRegion):
                return self._added_up(region, values)
            return self._result(region, values) if region.gradients is None else self._later(region, values)

    def _added_up(self, region: TiledRegion, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The loss, the gradient of it that was expected, and the gradients."""
        loss: torch.Tensor | None = None
        total = values[-1] if region.totals else None
        made = [zeros(like) for _, like in region.gradients]
        into = {t: gradient for (t, _), gradient in zip(region.gradients, made, strict=True)}
        expected = region.came[-1] if region.came else _ones(region.loss)
        for tile, turn in zip(region.tiles, self.turns, strict=True):
            part = turn(_arguments(region, tile, values, total, into), expected, self.marker)
            loss = part.clone() if loss is None else loss.add_(part)  # a part may lie on a larger storage
            del part
        assert loss is not None
        return [loss, expected, *made]

    def _result(self, region: Half, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The result of the region, box after box."""
        result = _empty(region.like[0])
        for tile, turn in zip(region.tiles, self.turns, strict=True):
            result[tile.over.slices()].copy_(turn(_arguments(region, tile, values), None, self.marker))
        return [result]

    def _later(self, region: Half, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients, from what went in and the gradient of the result."""
        made = [zeros(like) for like in region.like]
        into = dict(zip(region.gradients or (), made, strict=True))
        for tile, turn in zip(region.tiles, self.turns, strict=True):
            tangent = values[-1][(tile.reach or tile.over).slices()]
            turn(_arguments(region, tile, values, into=into), tangent, self.marker)
        return made


def _arguments(
    region: TiledRegion | Half,
    tile: CapturedTile,
    values: Sequence[torch.Tensor],
    total: torch.Tensor | None = None,
    into: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """Parts of what goes into a tile, and of the gradients that it adds to."""
    parts = [values[region.places[t]][box.slices()] for t, box in tile.given]
    if total is not None:
        parts.append(total)
    for k in tile.wanted:
        t, box = tile.given[k]
        parts.append(into[t][(box if tile.reach is None else tile.over.intersect(box)).slices()])
    return parts


def run_body(
    region: TiledRegion | Half,
    number: int,
    program: Program,
    values: Sequence[torch.Tensor],
    marker: Marker | None,
    witness: Witness | None = None,
) -> None:
    """Run one tile of a body, with a marker where its operators are measured; nothing is kept.

    A ``witness`` holds what its operators give against the capture.
    """
    _one_turn(region, number, program, values, witness)(marker)


def issue_seconds(
    region: TiledRegion | Half, number: int, program: Program, values: Sequence[torch.Tensor]
) -> float:
    """Seconds in which the host hands an operator of a body to the device, on average."""
    turn = _one_turn(region, number, program, values)
    runs = sum(isinstance(line, Run) for line in program.instructions)
    device = region.bodies[number].values[0].device
    taken = 0.0
    for _ in range(2):  # what is set up in the first does not count
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        turn(None)
        taken = time.perf_counter() - began
    torch.cuda.synchronize(device)
    return taken / max(1, runs)


def _one_turn(
    region: TiledRegion | Half,
    number: int,
    program: Program,
    values: Sequence[torch.Tensor],
    witness: Witness | None = None,
) -> Callable[[Marker | None], None]:
    """A function that runs one tile of a body."""
    joint = region.bodies[number]
    tile = next(tile for tile in region.tiles if tile.joint is joint)
    refuse_invalid(joint, program, inside=True)
    turn = _Turn(joint, program, Watched(witness), Drawing(), Copying())

    def run(marker: Marker | None) -> None:
        with torch.no_grad():
            if isinstance(region, TiledRegion):
                total = values[-1] if region.totals else None
                into = {t: zeros(like) for t, like in region.gradients}
                turn(_arguments(region, tile, values, total, into), _ones(region.loss), marker)
            elif region.gradients is None:
                turn(_arguments(region, tile, values), None, marker)
            else:
                into = dict(zip(region.gradients, map(zeros, region.like), strict=True))
                tangent = values[-1][(tile.reach or tile.over).slices()]
                turn(_arguments(region, tile, values, into=into), tangent, marker)

    return run


def _ones(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(like.shape, dtype=like.dtype, device=like.device)


def zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros that lie in memory as another tensor does."""
    return _empty(like).zero_()


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
