"""Which tiles a step is best cut into for a budget: captured, measured, planned, from few tiles to many."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lowtide.capture.joint import Joint
from lowtide.capture.loop import Region, looped
from lowtide.capture.nested import Inner
from lowtide.capture.outside import Half
from lowtide.capture.tile import Tiling
from lowtide.cost.watch import Marker
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.geometry import geometry
from lowtide.execute.host import fits_host
from lowtide.execute.in_place import able_in_place
from lowtide.execute.loops import issue_seconds, run_body, zeros
from lowtide.execute.planning import Settings, costs_of, device_of, link_of, measurable
from lowtide.execute.regions import endings, grids, inside, middles, result_grids, result_of, rows
from lowtide.execute.room import Room
from lowtide.execute.state import with_state
from lowtide.graph import LOOP, Rect
from lowtide.plan.make import Costs
from lowtide.plan.memory import Memory
from lowtide.plan.plan import Plan, Side
from lowtide.plan.program import Loop, Program
from lowtide.plan.tile import Inside, TileStep, plan_loop
from lowtide.units import format_bytes

__all__ = ["in_tiles", "loop_of", "with_loop"]

_OVERLAP = 2.5
"""Tiles that compute more than so many times the elements of the whole step are not tried."""
_SPLIT = 1.1
"""Nor are parts of the first axis that compute more than this: they cut through what belongs together."""
_SHARE = 0.4
"""Of the time limit, for one way to cut."""
_GOOD = 0.01
"""Where a tile needs no more than so much recomputation, smaller tiles are not tried."""
_IMAGE = 3
"""A loss with so many axes has those of an image: it is cut along them, and tiles hold no loops."""
_NESTED = 4
"""So many ways to cut inside of tiles are tried."""
_GOOD_ENOUGH = 0.1
"""Where a loop over the ending of a step adds no more than this, the whole step is not cut."""
_LESS = 0.97
"""Smaller tiles must need less than this share of what larger ones need, or no more are tried."""
_PATIENCE = 8
"""All of the search, with capturing and measuring, takes no more than so many times the time limit."""
_CONVOLUTION = "aten.convolution"
_SAMPLES = 8
"""So many tiles stand for all of a way to cut."""
_ELEMENTS = 2**31 - 1
"""Tiles with larger tensors are not tried: many kernels count elements in 32 bits."""
_REPEATED = 60.0
"""Seconds for measuring the body of most tiles."""
_WORSE = 2
"""So many ways in a row may be slower than the best before the search ends."""


def loop_of(program: Program) -> Loop | None:
    """The loop of a Program, if it has one."""
    return next((line for line in program.forward if isinstance(line, Loop)), None)


def with_loop(joint: Joint, program: Program) -> Joint:
    """The captured step as the Program runs it: with a region as one operator, where it has a loop."""
    loop = loop_of(program)
    if loop is None:
        return joint
    boxes = [tile.over for tile in loop.tiles]
    inner = _inner(program)
    return looped(joint, boxes, loop.cut, loop.end, channels_last=loop.channels_last, inner=inner)


def _inner(program: Program) -> Inner | None:
    """The loops inside tiles as the Program has them, body after body."""
    loops = [loop_of(body.program) for body in program.bodies]
    left = iter(loops)

    def chosen(_: Joint) -> tuple[str, list[Rect]] | None:
        loop = next(left, None)
        return None if loop is None else (loop.end, [tile.over for tile in loop.tiles])

    return chosen if any(loops) else None


def in_tiles(
    joint: Joint,
    arguments: Sequence[Any],
    room: Room,
    settings: Settings,
    budget: int,
    plain: Side,
    state: Sequence[torch.Tensor] = (),
) -> Plan:
    """The fastest plan found that cuts the step into tiles; an optimiser's ``state`` counts in its peak.

    A CaptureError says why it cannot be cut, an InfeasibleError that no way to cut it fits.
    """
    search = _Search(joint, arguments, room, settings, budget, plain, state)
    result = result_of(joint)
    with search.unless_refused():
        search.whole_step(Tiling(joint, end=result))
    for end in middles(joint) if search.unsatisfied() else ():
        if end != result:
            with search.unless_refused():
                middle = Tiling(joint, end=end)
                search.attempts(middle, result_grids(middle))
    if search.best is None:
        raise search.refused or InfeasibleError(
            "none is small enough", budget=budget, smallest_budget=plain.peak_bytes, floor=0, proven=False
        )
    return search.best


@dataclass(frozen=True, slots=True)
class _Way:
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
class _Search:
    joint: Joint
    arguments: Sequence[Any]
    room: Room
    settings: Settings
    budget: int
    plain: Side
    state: Sequence[torch.Tensor] = ()
    best: Plan | None = None
    refused: CaptureError | InfeasibleError | None = None
    began: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    """Seconds of planning alone."""
    worse: int = 0
    largest: float = math.inf
    """The working set of the largest tile that was tried."""
    vain: int = 0
    """Ways in a row that needed hardly less than others before, and did not fit."""
    least: float = math.inf
    """What the best way to cut would have needed, where it did not fit."""
    channels_last: bool | None = None
    """How images lie in memory inside tiles; None: not known yet which way is faster."""
    inner: Inner | None = None
    """Which loops are inside tiles."""
    issue: float = 0.0
    """Seconds in which the host hands over an operator; measured with the first tile of a region."""

    def done(self) -> bool:
        """Whether nothing more is to be expected, or time is up."""
        late = time.monotonic() - self.began > _PATIENCE * self.settings.time_limit
        return self.worse >= _WORSE or self.spent > self.settings.time_limit or late

    @contextlib.contextmanager
    def unless_refused(self) -> Iterator[None]:
        """A way to cut that turns out to be impossible ends what is tried here, not what was found before."""
        try:
            yield
        except CaptureError as error:
            self.refused = self.refused or error

    def unsatisfied(self) -> bool:
        """Whether nothing good was found so far."""
        return self.best is None or self.best.overhead > _GOOD_ENOUGH

    def whole_step(self, whole: Tiling) -> None:
        """Try the ending of a step that gives a loss, then all of it; or all of one that gives a result."""
        if whole.ends:
            self.attempts(whole, result_grids(whole))
            return
        for cut in endings(whole):
            with self.unless_refused():
                ending = Tiling(self.joint, (cut,))
                self.attempts(ending, rows(ending, self.budget))
        if self.unsatisfied():
            self.attempts(whole, grids(whole))
        if self.unsatisfied() and len(whole.axes) < _IMAGE:
            self.attempts(whole, [(whole.axes[0],) + (1,) * (len(whole.axes) - 1)] * _NESTED, nest=True)

    def attempts(self, tiling: Tiling, ways: Iterable[tuple[int, ...]], nest: bool = False) -> None:
        """Plan with more and more tiles, or with more and more inside each, as long as that may help."""
        self.worse = self.vain = 0
        self.issue = 0.0
        self.least = self.largest = math.inf
        for number, parts in enumerate(ways):
            self.inner = inside(number) if nest else None
            if self.done() or not self.attempt(tiling, parts):
                break
        self.inner = None

    def attempt(self, tiling: Tiling, parts: tuple[int, ...]) -> bool:
        """Plan with so many parts of each axis; False where smaller tiles cannot help any more."""
        boxes = tiling.boxes(parts)
        if self.inner is not None:
            return self.tried(tiling, boxes, self.room.beside_bytes())
        shape = geometry(tiling, boxes, _SAMPLES)
        if shape.overlap > (_OVERLAP if any(k > 1 for k in parts[1:]) else _SPLIT):
            return True
        if shape.working_bytes >= self.largest:
            return True
        self.largest = shape.working_bytes
        beside = self.room.beside_bytes()
        resident = Memory(with_state(self.joint.graph, self.state)).resident_bytes
        if shape.working_bytes + beside + resident > self.budget or shape.elements > _ELEMENTS:
            return True
        return self.tried(tiling, boxes, beside)

    def tried(self, tiling: Tiling, boxes: Sequence[Rect], beside: int) -> bool:
        """Plan with these tiles; False where smaller ones cannot help any more."""
        try:
            plan, inner = self._planned(tiling, boxes, beside)
        except InfeasibleError as error:
            needed = self.budget + error.smallest_budget - error.budget  # a tile has a budget of its own
            if not isinstance(self.refused, InfeasibleError) or needed < self.refused.smallest_budget:
                self.refused = InfeasibleError(
                    f"none that was tried fits; {len(boxes)} of them would need {format_bytes(needed)}",
                    budget=self.budget,
                    smallest_budget=needed,
                    floor=0,
                )
            helped = needed < _LESS * self.least
            self.least = min(self.least, needed)
            self.vain = 0 if helped else self.vain + 1
            return self.vain < _WORSE
        if self.best is None or plan.predicted.seconds < self.best.predicted.seconds:
            self.best, self.worse = plan, 0
        else:
            self.worse += 1
        return inner > _GOOD

    def _planned(self, tiling: Tiling, boxes: Sequence[Rect], beside: int) -> tuple[Plan, float]:
        settings, cut, end = self.settings, tiling.begins, tiling.ends
        if self.channels_last is None:
            self.channels_last = self.faster_layout(tiling, boxes)
        way = self._cut_up(tiling, boxes, self.channels_last)
        whole, kind = way.whole, device_of(way.whole.graph)
        all_of_it = not cut and end == result_of(self.joint)
        graph = with_state(whole.graph, self.state)
        began = time.monotonic()
        plan_with = partial(
            plan_loop,
            graph,
            _around(whole, kind),
            boxes,
            way.which,
            way.steps,
            self.budget,
            self.plain,
            cut=cut,
            end=end,
            channels_last=way.channels_last,
            whole=all_of_it,
            able=able_in_place(whole),
            beside_bytes=beside,
            time_limit=(_SHARE if all_of_it else 0.5) * settings.time_limit,
            seed=settings.seed,
            progress=settings.progress,
        )
        plan = plan_with(only=settings.only, link=link_of(kind) if "offload" in settings.only else None)
        if not fits_host(graph, plan.program):
            plan = plan_with(only=[one for one in settings.only if one != "offload"] or ["recompute"])
        self.spent += time.monotonic() - began
        least = way.seconds + sum(s for k, s in enumerate(plan.seconds) if k not in way.loops)
        return plan, plan.predicted.seconds / least - 1 if least else 0.0

    def faster_layout(self, tiling: Tiling, boxes: Sequence[Rect]) -> bool:
        """Whether images had better lie with channels last than as they do, by the tile in the middle.

        Convolutions on CUDA turn images around before and after, unless they lie with channels last.
        """
        if not any(op.kind == _CONVOLUTION and op.device.startswith("cuda") for op in self.joint.graph.ops):
            return False
        one = [_middle(boxes)]
        return self._cut_up(tiling, one, True).seconds < self._cut_up(tiling, one, False).seconds

    def _cut_up(self, tiling: Tiling, boxes: Sequence[Rect], channels_last: bool) -> _Way:
        """The step in these tiles, with what their operators take."""
        begins, ends = tiling.begins, tiling.ends
        whole = looped(self.joint, boxes, begins, ends, channels_last=channels_last, inner=self.inner)
        loops = [k for k, op in enumerate(whole.graph.ops) if op.kind == LOOP]
        steps, which = self._steps(whole, loops, self.arguments)
        if self.inner is not None and not any(step.inside for step in steps):
            raise CaptureError("nothing inside of tiles can be cut")
        return _Way(whole, loops, steps, which, channels_last)

    def _steps(
        self, whole: Joint, loops: Sequence[int], arguments: Sequence[Any]
    ) -> tuple[list[TileStep], list[list[int]]]:
        """Steps of tiles with what they take, and for each loop the step of each tile."""
        kind = device_of(whole.graph)
        steps: list[TileStep] = []
        which: list[list[int]] = []
        for at in loops:
            region: Region | Half = whole.calls[at].target
            values = _values(whole, at, arguments)
            numbers = {id(body): len(steps) + k for k, body in enumerate(region.bodies)}
            steps += self._all_measured(region, values, kind)
            which.append([numbers[id(tile.joint)] for tile in region.tiles])
        return steps, which

    def _all_measured(
        self, region: Region | Half, values: Sequence[torch.Tensor], kind: str
    ) -> list[TileStep]:
        """The bodies with their costs: that of most tiles first, the others in the time limit altogether."""
        turns = Counter(id(tile.joint) for tile in region.tiles)
        bodies = list(enumerate(region.bodies))
        bodies.sort(key=lambda pair: -turns[id(pair[1])])
        found = {bodies[0][0]: self._measured(region, *bodies[0], values, kind, _REPEATED)}
        end = time.monotonic() + self.settings.time_limit
        for k, body in bodies[1:]:
            left = max(0.0, end - time.monotonic())
            found[k] = self._measured(region, k, body, values, kind, left)
        return [found[k] for k in range(len(bodies))]

    def _measured(
        self,
        region: Region | Half,
        number: int,
        body: Joint,
        values: Sequence[torch.Tensor],
        kind: str,
        time_limit: float,
    ) -> TileStep:
        loops = [k for k, op in enumerate(body.graph.ops) if op.kind == LOOP]
        if loops:
            steps, which = self._steps(body, loops, ())
            boxes = [tile.over for tile in body.calls[loops[0]].target.tiles]
            inner = Inside(boxes, body.calls[loops[0]].target.end, which, steps)
            return TileStep(body.graph, _around(body, kind), able_in_place(body), inner)
        targets = [call.target for call in body.calls]
        program = measurable(body.graph, targets, kind, self.room)

        def run(marker: Marker) -> None:
            assert program is not None
            run_body(region, number, program, values, marker)

        measured = run if program else None
        costs = costs_of(body.graph, targets, kind, measured, self.settings.cost, time_limit)
        if program and self.settings.cost == "measured" and kind == "cuda" and not self.issue:
            self.issue = issue_seconds(region, number, program, values)
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


def _around(whole: Joint, kind: str) -> Costs:
    """What the operators around the loop take: as far as they are known from the step, else estimated."""
    targets = [call.target for call in whole.calls]
    return costs_of(whole.graph, targets, kind, None, "known")
