"""Which tiles a step is best cut into for a budget: captured, measured, planned, from few tiles to many."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from lowtide.capture.joint import Joint
from lowtide.capture.loop import looped
from lowtide.capture.nested import Inner
from lowtide.capture.owned import Owned
from lowtide.capture.tile import Tiling
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.cutting import Cutter, Way, around
from lowtide.execute.geometry import geometry
from lowtide.execute.host import fits_host
from lowtide.execute.in_place import able_in_place
from lowtide.execute.planning import Settings, device_of, link_of
from lowtide.execute.regions import endings, grids, inside, middles, result_grids, result_of, rows
from lowtide.execute.room import Room
from lowtide.execute.state import with_state
from lowtide.graph import Rect
from lowtide.plan.memory import Memory
from lowtide.plan.plan import Plan, Side
from lowtide.plan.program import Loop, Program
from lowtide.plan.tile import least_bytes, plan_loop
from lowtide.units import format_bytes

__all__ = ["in_tiles", "loop_of", "with_loop"]

_OVERLAP = 2.5
"""Tiles that compute more than so many times the elements of the whole step are not tried."""
_SPLIT = 1.1
"""Nor are parts of the first axis that compute more than this: they cut through what belongs together."""
_PROBE = 0.1
"""Of the time that is left, for one way to cut; the best of them gets the rest."""
_PROBE_AROUND = 0.3
"""The same where most of the step is around the tiles."""
_SHORTEST = 0.02
"""Of the time limit, for a way to cut where no time is left and no plan is found."""
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
_CERTAIN = 0.85
"""Tiles are not tried that would not fit even if they needed this share of what larger ones let expect."""
_PATIENCE = 8
"""Time limits, with capturing and measuring, after which the search ends."""
_CONTENT = 2
"""The same where a plan is found."""
_SAMPLES = 8
"""So many tiles stand for all of a way to cut."""
_ELEMENTS = 2**31 - 1
"""Tiles with larger tensors are not tried: many kernels count elements in 32 bits."""
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
    inner, own = _inner(program), _own(program)
    return looped(joint, boxes, loop.cut, loop.end, channels_last=loop.channels_last, inner=inner, own=own)


def _own(program: Program) -> Owned | None:
    """Which input tiles own, where they do."""
    loops = [line for line in program.backward if isinstance(line, Loop) and line.own]
    return Owned(loops[0].own, [tile.over for tile in loops[0].tiles]) if loops else None


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
    *,
    time_limit: float | None = None,
) -> Plan:
    """The fastest plan found that cuts the step into tiles; an optimiser's ``state`` counts in its peak.

    ``time_limit`` is that for planning, unlike that of the settings for capturing and measuring as well.
    A CaptureError says why it cannot be cut, an InfeasibleError that no way to cut it fits.
    """
    least = least_bytes(with_state(joint.graph, state)) + room.beside_bytes()
    if least > budget:
        raise InfeasibleError(
            f"none can help: parameters, inputs and gradients alone take {format_bytes(least)}",
            budget=budget,
            smallest_budget=least,
            floor=least,
            proven=True,
        )
    cutter = Cutter(joint, arguments, room, settings)
    limit = settings.time_limit if time_limit is None else time_limit
    search = _Search(joint, cutter, room, settings, budget, plain, state, time_limit=limit)
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
    search.polish()
    return msgspec.structs.replace(search.best, solve_seconds=search.spent, interrupted=search.interrupted)


@dataclass(slots=True)
class _Search:
    joint: Joint
    cutter: Cutter
    room: Room
    settings: Settings
    budget: int
    plain: Side
    state: Sequence[torch.Tensor] = ()
    time_limit: float = 10.0
    """For planning alone."""
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
    needed: int = 0
    """What the last way to cut would have needed, where it did not fit."""
    ratio: float = 0.0
    """How much more than their working set tiles have needed that did not fit."""
    channels_last: bool | None = None
    """How images lie in memory inside tiles; None: not known yet which way is faster."""
    inner: Inner | None = None
    """Which loops are inside tiles."""
    again: Callable[[float], Plan] | None = None
    """Plans the best way to cut once more, in so many seconds."""
    probed: float = 0.0
    """The time limit that it had before."""
    over: float = 0.0
    """Seconds that it took beyond."""
    interrupted: bool = False
    """Whether Ctrl-C came: no more ways are tried."""

    def left(self) -> float:
        """Seconds that planning may still take."""
        return self.time_limit - self.spent

    def done(self) -> bool:
        """Whether nothing more is to be expected, or time is up."""
        patience = _PATIENCE if self.best is None else _CONTENT
        late = time.monotonic() - self.began > patience * self.settings.time_limit
        spent = self.best is not None and self.left() <= 0
        return self.worse >= _WORSE or spent or late or self.interrupted

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
        self.cutter.issue = 0.0  # other operators, on average
        self.least = self.largest = math.inf
        self.ratio = 0.0
        for number, parts in enumerate(ways):
            self.inner = inside(number) if nest else None
            try:
                if self.done() or not self.attempt(tiling, parts):
                    break
            except KeyboardInterrupt:
                if self.best is None:
                    raise
                self.interrupted = True
        self.inner = None

    def attempt(self, tiling: Tiling, parts: tuple[int, ...]) -> bool:
        """Plan with so many parts of each axis; False where smaller tiles cannot help any more."""
        boxes = tiling.boxes(parts)
        shape = geometry(tiling, boxes, _SAMPLES)
        if self.inner is not None:
            return shape.overlap <= _SPLIT and self.tried(tiling, boxes, self.room.beside_bytes())
        if shape.overlap > (_OVERLAP if any(k > 1 for k in parts[1:]) else _SPLIT):
            return True
        if shape.working_bytes >= self.largest:
            return True
        self.largest = shape.working_bytes
        beside = self.room.beside_bytes()
        resident = Memory(with_state(self.joint.graph, self.state)).resident_bytes
        least = max(shape.working_bytes, shape.gradient_bytes if len(boxes) > 1 else 0)
        if least + beside + resident > self.budget or shape.elements > _ELEMENTS:
            return True
        if _CERTAIN * self.ratio * shape.working_bytes + beside + resident > self.budget:
            return True
        going_on = self.tried(tiling, boxes, beside)
        if self.needed:  # it did not fit
            ratio = (self.needed - beside - resident) / shape.working_bytes
            self.ratio = min(self.ratio or ratio, ratio)
        return going_on

    def tried(self, tiling: Tiling, boxes: Sequence[Rect], beside: int) -> bool:
        """Plan with these tiles; False where smaller ones cannot help any more."""
        self.needed = 0
        try:
            plan, inner = self._planned(tiling, boxes, beside)
        except InfeasibleError as error:
            # a tile has a budget of its own
            needed = self.needed = self.budget + error.smallest_budget - error.budget
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
        """A plan found fast for these tiles, and which share of its time it spends on what is run again."""
        if self.channels_last is None:
            self.channels_last = self.cutter.faster_layout(tiling, boxes)
        way = self.cutter.cut_up(tiling, boxes, self.channels_last, self.inner)
        again = partial(self._search, way, tiling, boxes, beside)
        share = _PROBE if self._all_of_it(tiling) else _PROBE_AROUND
        limit, before = max(_SHORTEST * self.time_limit, share * self.left()), self.spent
        plan = again(limit)
        if self.best is None or plan.predicted.seconds < self.best.predicted.seconds:
            self.again, self.probed, self.over = again, limit, max(0.0, self.spent - before - limit)
        least = way.seconds + sum(s for k, s in enumerate(plan.seconds) if k not in way.loops)
        return plan, plan.predicted.seconds / least - 1 if least else 0.0

    def _search(
        self, way: Way, tiling: Tiling, boxes: Sequence[Rect], beside: int, time_limit: float
    ) -> Plan:
        settings, cut, end = self.settings, tiling.begins, tiling.ends
        kind = device_of(way.whole.graph)
        graph = with_state(way.whole.graph, self.state)
        plan_with = partial(
            plan_loop,
            graph,
            around(way.whole, kind),
            boxes,
            way.which,
            way.steps,
            self.budget,
            self.plain,
            cut=cut,
            end=end,
            channels_last=way.channels_last,
            whole=self._all_of_it(tiling),
            able=able_in_place(way.whole),
            beside_bytes=beside,
            time_limit=time_limit,
            seed=settings.seed,
            progress=settings.progress,
        )
        began = time.monotonic()
        try:
            plan = plan_with(only=settings.only, link=link_of(kind) if "offload" in settings.only else None)
            if not fits_host(graph, plan.program):
                plan = plan_with(only=[one for one in settings.only if one != "offload"] or ["recompute"])
        finally:
            self.spent += time.monotonic() - began
        self.interrupted = self.interrupted or plan.interrupted
        return plan

    def _all_of_it(self, tiling: Tiling) -> bool:
        return not tiling.begins and tiling.ends == result_of(self.joint)

    def polish(self) -> None:
        """Plan the best way to cut once more, in the time that is left."""
        left = self.left() - self.over
        if self.best is None or self.again is None or left <= self.probed or self.interrupted:
            return
        with contextlib.suppress(InfeasibleError):
            plan = self.again(left)
            if plan.predicted.seconds < self.best.predicted.seconds:
                self.best = plan
