"""Which tiles a step is best cut into for a budget: captured, measured, planned, from few tiles to many."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.memory.device import Room
from lowtide.execute.memory.host import fits_host
from lowtide.execute.memory.optimizer_state import with_state
from lowtide.execute.planning.step_costs import device_of, link_for
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.execute.tiling.between import arrivals, departures
from lowtide.execute.tiling.candidates import Candidate, Candidates
from lowtide.execute.tiling.capture_tiles import Cutter, Way, around
from lowtide.execute.tiling.geometry import Geometry, geometry
from lowtide.execute.tiling.regions import endings, grids, inside, middles, result_grids, result_of, rows
from lowtide.graph import Rect
from lowtide.pace import Pace
from lowtide.plan import time_shares
from lowtide.plan.budget import Budget
from lowtide.plan.make.plan_loop import LoopedStep, plan_loop
from lowtide.plan.program.memory import Memory
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan, Side
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.nested import Inner
from lowtide.trace.tiles.tiling import Tiling
from lowtide.units import format_bytes, format_seconds

__all__ = ["Search"]

_LOG = logging.getLogger(__name__)
_OVERLAP = 2.5
"""Tiles that compute more than so many times the elements of the whole step are not tried."""
_SPLIT = 1.1
"""Nor are parts of the first axis that compute more than this: they cut through what belongs together."""
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
_CROWDED = 2
"""Tiles are put off that would keep so many times what they have room for, if nothing was run again."""
_CROWDED_OFFLOAD = 4
"""The same where they can send it away."""
_SAMPLES = 4
"""So many tiles stand for all of a way to cut."""
_ROWS = 2
"""The same where the first axis alone is cut."""
_ELEMENTS = 2**31 - 1
"""Tiles with larger tensors are not tried: many kernels count elements in 32 bits."""
_WORSE = 2
"""So many ways in a row may be slower than the best before the search ends."""


@dataclass(slots=True)
class Search:
    """The search for the fastest plan in tiles."""

    joint: Joint
    cutter: Cutter
    room: Room
    request: PlanRequest
    budget: int
    plain: Side
    state: Sequence[torch.Tensor] = ()
    time_limit: float = 10.0
    """For all but measuring and compiling."""
    rival: float | None = None
    """Seconds of the step by a plan without tiles, where there is one to be beaten."""
    best: Plan | None = None
    refused: CaptureError | InfeasibleError | None = None
    began: float = field(default_factory=lambda: time.monotonic())
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
    interrupted: bool = False
    """Whether Ctrl-C came: no more ways are tried."""
    shapes: dict[Hashable, Geometry] = field(default_factory=dict)
    """Ways to cut that were looked at."""
    pace: Pace = field(default_factory=Pace)
    in_images: bool = False
    """Whether tiles of the loss have the axes of an image, and fit: none that end before can be smaller."""
    candidates: Candidates = field(default_factory=Candidates)
    """The best ways to cut that were tried."""

    def spent(self) -> float:
        """Seconds since the beginning, without those of measuring and compiling."""
        return time.monotonic() - self.began - self.cutter.measuring - self.cutter.compiling

    def left(self) -> float:
        """Seconds that it may still take."""
        return self.time_limit - self.spent()

    def done(self) -> bool:
        """Whether nothing more is to be expected, or time is up."""
        limit = self.request.limits.time_limit
        patience = time_shares.TILE_CONTENT if self.has_plan else time_shares.TILE_PATIENCE
        taken = time.monotonic() - self.began - self.cutter.compiling
        late = taken > patience * limit or (self.rival is not None and taken > limit)
        spent = self.has_plan and self.left() <= 0
        return self.worse >= _WORSE or spent or late or self.interrupted

    @property
    def has_plan(self) -> bool:
        """Whether the step has a plan, in tiles or without: a better one is not looked for at any price."""
        return self.best is not None or self.rival is not None

    @contextlib.contextmanager
    def unless_refused(self) -> Iterator[None]:
        """A way to cut that turns out to be impossible ends what is tried here, not what was found before.

        That is so whatever goes wrong: there may be other ways, or a plan without tiles.
        """
        try:
            yield
        except CaptureError as error:
            self.refused = self.refused or error
        except InfeasibleError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.refused = self.refused or CaptureError(f"a way to cut it fails: {said}")
            traceback.clear_frames(error.__traceback__)

    def unsatisfied(self, enough: float = _GOOD_ENOUGH) -> bool:
        """Whether nothing was found so far that adds no more than ``enough``, and there is time to go on."""
        in_time = self.left() > time_shares.TILE_PLANNING * self.request.limits.time_limit
        if self.best is None:
            return self.rival is None or in_time
        slow = self.rival is not None and self.best.predicted.seconds >= self.rival
        return (slow or self.best.overhead > enough) and in_time

    def try_all(self) -> None:
        """Try the whole step, and parts of it that end before the loss where nothing good is found."""
        result = result_of(self.joint)
        begins = arrivals(self.joint)
        with self.unless_refused():
            self.whole_step(Tiling(self.joint, begins, result))
        ends: list[str] = []
        with self.unless_refused():
            if self.unsatisfied() and not self.in_images:
                ends += departures(self.joint) if begins else middles(self.joint)
        for end in ends:
            if end != result and (not begins or self.unsatisfied()):
                with self.unless_refused():
                    middle = Tiling(self.joint, begins, end)
                    self.attempts(middle, result_grids(middle))

    def try_compiled(self) -> None:
        """Try all ways once more as they really run, where those that were estimated do not fit."""
        self.cutter.at_once, self.began = True, time.monotonic() - self.spent()
        self.cutter.measuring = self.cutter.compiling = 0.0
        self.try_all()

    def whole_step(self, whole: Tiling) -> None:
        """Try the ending of a step that gives a loss, then all of it; or all of one that gives a result."""
        if whole.ends:
            self.attempts(whole, result_grids(whole))
            return
        for number, cut in enumerate(endings(whole) if not whole.begins else ()):
            if number and not self.unsatisfied(_GOOD):
                break
            with self.unless_refused():
                ending = Tiling(self.joint, (cut,))
                self.attempts(ending, rows(ending, self.budget))
        if self.unsatisfied():
            self.attempts(whole, grids(whole))
            self.in_images = self.best is not None and len(whole.axes) >= _IMAGE
        if self.unsatisfied() and len(whole.axes) < _IMAGE and not self.joint.evaluates:
            self.attempts(whole, [(whole.axes[0],) + (1,) * (len(whole.axes) - 1)] * _NESTED, nest=True)

    def attempts(self, tiling: Tiling, ways: Iterable[tuple[int, ...]], nest: bool = False) -> None:
        """Plan with more and more tiles, or with more and more inside each, as long as that may help."""
        self.worse = self.vain = 0
        self.cutter.issue = 0.0  # other operators, on average
        self.least = self.largest = math.inf
        self.ratio = 0.0
        put_off: list[tuple[int, ...]] = []
        before = self.best
        for number, parts in enumerate(ways):
            self.inner = inside(number) if nest else None
            if self.done():
                break
            if not nest and self._crowded(tiling, parts):
                put_off.append(parts)
                continue
            if not self._going_on(tiling, parts):
                break
        self.inner = None
        if self.best is before:
            self._try_after_all(tiling, put_off)

    def _try_after_all(self, tiling: Tiling, put_off: Sequence[tuple[int, ...]]) -> None:
        """Plan with the smallest tiles that were put off, and with larger ones as long as that helps."""
        self.worse = self.vain = 0
        for parts in reversed(put_off):
            if self.done() or self.worse or self.vain >= _WORSE:
                break
            self.largest, self.needed = math.inf, 0
            self._going_on(tiling, parts)
            if self.best is not None and self.needed:
                break

    def _going_on(self, tiling: Tiling, parts: tuple[int, ...]) -> bool:
        """The same as ``attempt``; Ctrl-C ends the search, unless nothing is found yet."""
        going_on = False
        try:
            with self.unless_refused():
                going_on = self.attempt(tiling, parts)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.interrupted = True
        return going_on

    def _crowded(self, tiling: Tiling, parts: tuple[int, ...]) -> bool:
        """Whether a tile of the whole step would have to run most of itself again: smaller ones are faster.

        A tile keeps as much of what it makes as the plain step does, where it has room for that.
        """
        if tiling.begins or tiling.ends:
            return False
        shape = self.shape(tiling, parts)
        there = self.room.outside_bytes() + shape.gradient_bytes + self._resident()
        kept = shape.share * (self.plain.peak_bytes - there)
        room = (_CROWDED_OFFLOAD if "offload" in self.request.methods else _CROWDED) * (self.budget - there)
        return 0 < room < kept

    def shape(self, tiling: Tiling, parts: tuple[int, ...]) -> Geometry:
        """What the tiles of a way to cut are like."""
        key = tiling.begins, tiling.ends, parts
        if key not in self.shapes:
            samples = _SAMPLES if any(k > 1 for k in parts[1:]) else _ROWS
            self.shapes[key] = geometry(tiling, tiling.boxes(parts), samples)
        return self.shapes[key]

    def _resident(self) -> int:
        return Memory(with_state(self.joint.graph, self.state)).resident_bytes

    def attempt(self, tiling: Tiling, parts: tuple[int, ...]) -> bool:
        """Plan with so many parts of each axis; False where smaller tiles cannot help any more."""
        boxes = tiling.boxes(parts)
        shape = self.shape(tiling, parts)
        if self.inner is not None:
            return shape.overlap <= _SPLIT and self.tried(tiling, boxes, self.room.outside_bytes())
        if shape.overlap > (_OVERLAP if any(k > 1 for k in parts[1:]) else _SPLIT):
            return True
        if shape.working_bytes >= self.largest:
            return True
        self.largest = shape.working_bytes
        outside = self.room.outside_bytes()
        resident = self._resident()
        least = max(shape.working_bytes, shape.gradient_bytes if len(boxes) > 1 else 0)
        if least + outside + resident > self.budget or shape.elements > _ELEMENTS:
            return True
        if _CERTAIN * self.ratio * shape.working_bytes + outside + resident > self.budget:
            return True
        going_on = self.tried(tiling, boxes, outside)
        if self.needed:  # it did not fit
            ratio = (self.needed - outside - resident) / shape.working_bytes
            self.ratio = min(self.ratio or ratio, ratio)
        return going_on

    def tried(self, tiling: Tiling, boxes: Sequence[Rect], outside: int) -> bool:
        """Plan with these tiles; False where smaller ones cannot help any more, or come too late."""
        self.needed = 0
        if self.pace.due():
            seconds = None if self.best is None else self.best.predicted.seconds
            best = "nothing fits yet" if seconds is None else f"best {format_seconds(seconds)}"
            _LOG.info("trying %d tiles: %s", len(boxes), best)
        late = (
            self.cutter.expected(tiling, boxes) + time_shares.TILE_PLANNING * self.request.limits.time_limit
            > self.left()
        )
        if self.has_plan and late:
            return False
        try:
            plan, inner = self._planned(tiling, boxes, outside)
        except InfeasibleError as error:
            needed = self.needed = self.missed(error, len(boxes))
            helped = needed < _LESS * self.least
            self.least = min(self.least, needed)
            self.vain = 0 if helped else self.vain + 1
            return self.vain < _WORSE
        self.worse = 0 if self.take(plan) else self.worse + 1
        return inner > _GOOD

    def _planned(self, tiling: Tiling, boxes: Sequence[Rect], outside: int) -> tuple[Plan, float]:
        """A plan found fast for these tiles, and which share of its time it spends on what is run again."""
        if self.channels_last is None:
            self.channels_last = self.cutter.faster_layout(tiling, boxes)
        way = self.cutter.cut_up(tiling, boxes, self.channels_last, self.inner)
        search = partial(self._search, tiling, boxes, outside)
        share = time_shares.TILE_PROBE if self._all_of_it(tiling) else time_shares.TILE_PROBE_AROUND
        limit, before = max(time_shares.TILE_SHORTEST * self.time_limit, share * self.left()), self.spent()
        tried = Candidate(way, search, limit)
        try:
            plan = search(way, limit)
        except InfeasibleError as error:
            self.candidates.add(replace(tried, needed=self._needed(error)))
            raise
        over = max(0.0, self.spent() - before - limit)
        self.candidates.add(replace(tried, seconds=plan.predicted.seconds, over=over))
        least = way.seconds + sum(s for k, s in enumerate(plan.seconds) if k not in way.loops)
        return plan, plan.predicted.seconds / least - 1 if least else 0.0

    def _needed(self, error: InfeasibleError) -> int:
        """The budget with which a way to cut would fit: a tile has one of its own."""
        return self.budget + error.smallest_budget - error.budget

    def missed(self, error: InfeasibleError, tiles: int) -> int:
        """Remember the smallest budget of ways that do not fit; that of this one."""
        needed = self._needed(error)
        if not isinstance(self.refused, InfeasibleError) or needed < self.refused.smallest_budget:
            self.refused = InfeasibleError(
                f"none that was tried fits; {tiles} of them would need {format_bytes(needed)}",
                budget=self.budget,
                smallest_budget=needed,
                floor=0,
            )
        return needed

    def _search(
        self, tiling: Tiling, boxes: Sequence[Rect], outside: int, way: Way, time_limit: float
    ) -> Plan:
        kind = device_of(way.whole.graph)
        graph = with_state(way.whole.graph, self.state)
        looped = LoopedStep(
            graph,
            around(way.whole, kind),
            boxes,
            way.which,
            way.steps,
            able=able_in_place(way.whole),
            cut=tiling.begins,
            end=tiling.ends,
            channels_last=way.channels_last,
            whole=self._all_of_it(tiling),
        )
        # parameters are not offloaded around loops
        request = replace(self.request, budget=Budget(bytes=self.budget), offload=()).within(time_limit)
        link = link_for(request, kind, graphs=self.room.graph_bytes > 0)
        plan = plan_loop(looped, self.plain, request, DeviceRoom(outside, link=link))
        if not fits_host(graph, plan.program):
            request = request.without("offload")
            request = request if request.methods else replace(request, methods=("recompute",))
            plan = plan_loop(looped, self.plain, request, DeviceRoom(outside))
        self.interrupted = self.interrupted or plan.interrupted
        return plan

    def _all_of_it(self, tiling: Tiling) -> bool:
        return not tiling.begins and tiling.ends == result_of(self.joint)

    def take(self, plan: Plan) -> bool:
        """Whether the plan is the best so far."""
        better = self.best is None or plan.predicted.seconds < self.best.predicted.seconds
        self.best = plan if better else self.best
        return better
