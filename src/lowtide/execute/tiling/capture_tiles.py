"""A step cut into tiles: their steps captured, with what their operators take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from lowtide.collector import collector_paused
from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError
from lowtide.execute.kernels.compile_groups import compile_groups, stand_in
from lowtide.execute.memory.device import Room
from lowtide.execute.planning.plan_step import measurable
from lowtide.execute.planning.step_costs import costs_of, device_of
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.execute.runtime.tile_loop import issue_seconds, run_body, zeros
from lowtide.execute.runtime.witness import Witness
from lowtide.execute.tiling.geometry import operators
from lowtide.graph import LOOP, Rect
from lowtide.plan.make.plan_loop import Inside, TileStep
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.simple import store_all
from lowtide.plan.request import PlanRequest
from lowtide.trace.eager.layouts import layouts_of
from lowtide.trace.step.group import Group
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.loop import TiledRegion, looped
from lowtide.trace.tiles.nested import Inner
from lowtide.trace.tiles.outside import Half
from lowtide.trace.tiles.tiling import Tiling

__all__ = ["Cutter", "Way", "around", "watch_tiles"]

Values = Callable[[], list[torch.Tensor]]
"""Gives what goes into a loop, made when it is asked for: most of it may be large."""

_CONVOLUTION = "aten.convolution"
_BOTH = 3
"""Operators of forward and backward for one of forward."""
_WRITING = 0.15
"""What it takes to write an operator of a tile anew, over what it takes to capture it."""
_CAPTURES = 4
"""A way to cut is captured again so many times at most, until what it gives is what was captured."""
_REPEATED = 60.0
"""Seconds for measuring the body of most tiles."""


@dataclass(frozen=True, slots=True)
class Way:
    """A step cut into tiles, with the steps of its tiles."""

    whole: Joint
    loops: list[int]
    """Which of its operators are loops."""
    steps: list[TileStep]
    which: list[list[int]]
    """For each loop the step of each tile."""
    channels_last: bool

    @property
    def seconds(self) -> float:
        """What all tiles take where nothing is run again."""
        return sum(self.steps[k].seconds for one in self.which for k in one)


@dataclass(slots=True)
class Cutter:
    """Cuts a captured step, with its arguments, into tiles."""

    joint: Joint
    arguments: Sequence[Any]
    room: Room
    request: PlanRequest
    at_once: bool = False
    """Whether groups of tiles are compiled at once; else they are estimated until a way to cut is taken."""
    issue: float = 0.0
    """Seconds in which the host hands over an operator, once a tile was measured."""
    measuring: float = 0.0
    """Seconds spent on measuring."""
    compiling: float = 0.0
    """Seconds spent on compiling groups."""
    capturing: float = 0.0
    """Seconds spent on capturing tiles."""
    captured: float = 0.0
    """Operators of them."""
    cut: set[Hashable] = field(default_factory=set)
    """Regions that were cut before."""
    witness: Witness | None = None
    """Holds what tiles give while they are measured against what was captured of them."""
    around: dict[Hashable, Joint] = field(default_factory=dict)
    """What is around a region, which is the same whatever tiles it is cut into."""

    def faster_layout(self, tiling: Tiling, boxes: Sequence[Rect]) -> bool:
        """Whether images had better lie with channels last than as they do, by the tile in the middle.

        Convolutions on CUDA turn images around before and after, unless they lie with channels last.
        """
        if not any(op.kind == _CONVOLUTION and op.device.startswith("cuda") for op in self.joint.graph.ops):
            return False
        one = [_middle(boxes)]
        return self.cut_up(tiling, one, True).seconds < self.cut_up(tiling, one, False).seconds

    def cut_up(
        self,
        tiling: Tiling,
        boxes: Sequence[Rect],
        channels_last: bool,
        inner: Inner | None = None,
        *,
        again: int = 0,
    ) -> Way:
        """The step in these tiles, with what their operators take; ``again``: captured so often before."""
        begins, ends = tiling.begins, tiling.ends
        how: dict[str, Any] = {"channels_last": channels_last, "inner": inner, "around": self.around}
        began, amount = time.monotonic(), self._amount(tiling, boxes)
        with collector_paused():
            whole = looped(self.joint, boxes, begins, ends, **how)
        self.capturing += time.monotonic() - began
        self.captured += amount
        if self.joint.kernels is not None and not self.at_once:
            stand_in(whole, self.joint.kernels)
        elif self.joint.kernels is not None:
            self._compile(whole)
        self.cut.add((begins, ends))
        loops = [k for k, op in enumerate(whole.graph.ops) if op.kind == LOOP]
        witness = self.witness = Witness(layouts_of(self.joint.values))
        steps, which = self._steps(whole, loops, self.arguments)
        if witness.learned and again < _CAPTURES:  # what was captured is not what runs
            self.around.clear()
            return self.cut_up(tiling, boxes, channels_last, inner, again=again + 1)
        if inner is not None and not any(step.inside for step in steps):
            raise CaptureError("nothing inside of tiles can be cut")
        return Way(whole, loops, steps, which, channels_last)

    @property
    def estimates(self) -> bool:
        """Whether groups of tiles are estimated until a way is taken."""
        return self.joint.kernels is not None and not self.at_once

    def compiled(self, way: Way) -> Way:
        """A way to cut whose groups were estimated, as it runs: they are compiled and measured."""
        self._compile(way.whole)
        steps, which = self._steps(way.whole, way.loops, self.arguments)
        return replace(way, steps=steps, which=which)

    def _compile(self, whole: Joint) -> None:
        """Compile groups that are not known from other ways to cut."""
        began = time.monotonic()
        compile_groups(whole, self.joint.kernels)
        self.compiling += time.monotonic() - began

    def expected(self, tiling: Tiling, boxes: Sequence[Rect]) -> float:
        """Seconds that capturing a way to cut may take, as others did; 0 before the first."""
        return self._amount(tiling, boxes) * self.capturing / max(1.0, self.captured)

    def _amount(self, tiling: Tiling, boxes: Sequence[Rect]) -> float:
        """Operators that are captured: of each body with its backward, and around the loop once.

        Bodies differ in their size, and in whether they are at the edge of an image.
        """
        inside, end = operators(tiling), boxes[-1].hi
        edges = [
            tuple((lo == 0, hi == last) for (lo, hi), last in zip(box, end, strict=True)) for box in boxes
        ]
        bodies = len({(box.shape, edge[1:]) for box, edge in zip(boxes, edges, strict=True)})
        outside = max(len(tiling.leaves), len(self.joint.graph.ops) - _BOTH * inside)
        around = 0 if (tiling.begins, tiling.ends) in self.cut else outside
        return 1 + around + inside * (_BOTH * bodies + _WRITING * len(boxes))

    def _steps(
        self, whole: Joint, loops: Sequence[int], arguments: Sequence[Any]
    ) -> tuple[list[TileStep], list[list[int]]]:
        """Steps of tiles with what they take, and for each loop the step of each tile."""
        kind = device_of(whole.graph)
        steps: list[TileStep] = []
        which: list[list[int]] = []
        for at in loops:
            region: TiledRegion | Half = whole.calls[at].target
            values = cache(partial(_values, whole, at, arguments))
            numbers = {id(body): len(steps) + k for k, body in enumerate(region.bodies)}
            steps += self._all_measured(region, values, kind)
            which.append([numbers[id(tile.joint)] for tile in region.tiles])
        return steps, which

    def _all_measured(self, region: TiledRegion | Half, values: Values, kind: str) -> list[TileStep]:
        """The bodies with their costs: that of most tiles first, the others in the time limit altogether."""
        turns = Counter(id(tile.joint) for tile in region.tiles)
        bodies = list(enumerate(region.bodies))
        bodies.sort(key=lambda pair: -turns[id(pair[1])])
        found = {bodies[0][0]: self._measured(region, *bodies[0], values, kind, _REPEATED)}
        end = time.monotonic() + self.request.limits.time_limit
        for k, body in bodies[1:]:
            left = max(0.0, end - time.monotonic())
            found[k] = self._measured(region, k, body, values, kind, left)
        return [found[k] for k in range(len(bodies))]

    def _measured(
        self,
        region: TiledRegion | Half,
        number: int,
        body: Joint,
        values: Values,
        kind: str,
        time_limit: float,
    ) -> TileStep:
        loops = [k for k, op in enumerate(body.graph.ops) if op.kind == LOOP]
        if loops:
            steps, which = self._steps(body, loops, ())
            boxes = [tile.over for tile in body.calls[loops[0]].target.tiles]
            inner = Inside(boxes, body.calls[loops[0]].target.end, which, steps)
            return TileStep(body.graph, around(body, kind), able_in_place(body), inner)
        targets = [call.target for call in body.calls]
        if self.request.cost != "measured":
            costs = costs_of(body.graph, targets, kind, None, self.request.cost)
            return TileStep(body.graph, costs, able_in_place(body))
        began = time.monotonic()
        program = measurable(body.graph, targets, kind, self.room)

        def run(marker: Marker) -> None:
            assert program is not None
            run_body(region, number, program, values(), marker, self.witness)

        guessed = [k for k, target in enumerate(targets) if isinstance(target, Group) and not target.final]
        measured = run if program else None
        costs = costs_of(body.graph, targets, kind, measured, "measured", time_limit, guessed)
        if program and kind == "cuda" and not self.issue:
            self.issue = issue_seconds(region, number, program, values())
        self.measuring += time.monotonic() - began
        return TileStep(body.graph, costs, able_in_place(body), issue=self.issue)


def _middle(boxes: Sequence[Rect]) -> Rect:
    """The box of a grid nearest to its middle: there are most of its sort."""
    ends = boxes[-1].hi
    return min(
        boxes, key=lambda box: sum(abs(lo + hi - end) for (lo, hi), end in zip(box, ends, strict=True))
    )


def _values(whole: Joint, loop: int, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """What goes into the loop, as far as it goes into the step; anything else is zeros of its form."""
    given = {t: value for t, value in zip(whole.inputs, arguments, strict=bool(arguments)) if t is not None}
    given |= whole.constants
    return [given[t] if t in given else zeros(whole.values[t]) for t in whole.graph.ops[loop].inputs]


def watch_tiles(whole: Joint, arguments: Sequence[Any], witness: Witness) -> None:
    """Run a tile of each body, and of those inside, before a witness; nothing is kept."""
    for at, op in enumerate(whole.graph.ops):
        if op.kind != LOOP:
            continue
        region: TiledRegion | Half = whole.calls[at].target
        values = _values(whole, at, arguments)
        for number, body in enumerate(region.bodies):
            if any(inner.kind == LOOP for inner in body.graph.ops):
                watch_tiles(body, (), witness)
            else:
                run_body(region, number, store_all(body.graph), values, None, witness)


def around(whole: Joint, kind: str) -> Costs:
    """What the operators around the loop take: as far as they are known from the step, else estimated."""
    targets = [call.target for call in whole.calls]
    return costs_of(whole.graph, targets, kind, None, "known")
